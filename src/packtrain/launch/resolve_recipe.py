"""A recipe against this machine: the rules it breaks are errors, and every `auto` gets its value."""

from __future__ import annotations

from packtrain.config import Recipe
from packtrain.config.resolve import resolve as resolve_values
from packtrain.config.rules import check
from packtrain.errors import UserError
from packtrain.launch.facts import gather_facts
from packtrain.plan.memory import choose


def resolve(recipe: Recipe, processes: int | None = None) -> tuple[Recipe, list[str]]:
    """The recipe without `auto`, and what is unwise about it, one sentence each.

    Args:
        processes: the size of the group that this process has joined, or None to choose.
    """
    facts = gather_facts(recipe, processes)
    findings = check(recipe, facts)
    for finding in findings:
        if finding.severity == "error":
            raise UserError(finding.rule, finding.message, finding.mend)
    resolved = resolve_values(recipe, facts)
    if facts.device == "cuda":
        choice = choose(resolved, facts)
        resolved.train.micro_batch_size = choice.micro_batch_size
        if resolved.parallel.recompute == "auto":
            resolved.parallel.recompute = choice.recompute
    return resolved, [f"{finding.rule}: {finding.message}; {finding.mend}." for finding in findings]
