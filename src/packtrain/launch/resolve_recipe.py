"""A recipe against this machine: the rules it breaks are errors, and every `auto` gets its value."""

from __future__ import annotations

from packtrain.config import Recipe
from packtrain.config.facts import Facts
from packtrain.config.resolve import resolve as resolve_values
from packtrain.config.rules import check
from packtrain.errors import UserError
from packtrain.launch.facts import gather_facts
from packtrain.plan.rank import rank


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
    resolved = fill(recipe, facts)
    return resolved, [f"{finding.rule}: {finding.message}; {finding.mend}." for finding in findings]


def fill(recipe: Recipe, facts: Facts) -> Recipe:
    """A copy without `auto`: on GPUs the plan's first choice, of the settings that the recipe leaves open."""
    if facts.device == "cpu":
        return resolve_values(recipe, facts)
    return rank(recipe, facts)[0].recipe
