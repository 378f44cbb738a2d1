"""A recipe against this machine: the rules it breaks are errors, and every `auto` gets its value."""

from __future__ import annotations

from packtrain.config import Recipe
from packtrain.config.edits import with_edits
from packtrain.config.facts import Facts
from packtrain.config.resolve import resolve as resolve_values
from packtrain.config.rule import Edits, Finding
from packtrain.config.rules import check, first_error
from packtrain.errors import UserError
from packtrain.launch.facts import gather_facts
from packtrain.plan.rank import rank
from packtrain.plan.remedies import remedies
from packtrain.plan.report import Plan, plan_resolved

SHOWN = 3
_GIB = 2**30
_LEARNED = ("method.", "data.")
"""Settings that a shortage of memory is no reason to change unasked."""


def resolve(recipe: Recipe, processes: int | None = None) -> tuple[Recipe, list[str]]:
    """The recipe without `auto`, and what is unwise about it, one sentence each.

    Args:
        processes: the size of the group that this process has joined, or None to choose.
    """
    facts = gather_facts(recipe, processes)
    warnings = judge(recipe, facts)
    resolved = fill(recipe, facts)
    short = shortage(recipe, plan_resolved(resolved, facts))
    return resolved, warnings + [finding.sentence for finding in short]


def judge(recipe: Recipe, facts: Facts) -> list[str]:
    """What is unwise about a recipe on a machine, one sentence each.

    Raises:
        UserError: a rule keeps it from running there.
    """
    findings = check(recipe, facts)
    for finding in findings:
        if finding.severity == "error":
            raise UserError(finding.setting, finding.message, finding.mend)
    return [finding.sentence for finding in findings]


def shortage(asked: Recipe, made: Plan) -> list[Finding]:
    """What the plan of a resolved recipe says against starting it: a plan may be wrong, so it is a warning."""
    if made.fits:
        return []
    kind = "GPU" if made.facts.device == "cuda" else "process"
    if not made.host_fits:
        needed, there = max(made.host.training, made.host.loading), float(made.facts.host_memory)
        rule, what = "host-memory", f"the node needs {needed / _GIB:.1f} GiB of host memory and has {there / _GIB:.1f}"
    else:
        what = f"a {kind} needs {made.peak.total / _GIB:.1f} GiB, and {made.limit / _GIB:.1f} may be filled"
        rule = "memory"
    found = remedies(asked, made.facts)
    helping = ", ".join(f"{remedy.setting} ({remedy.total / _GIB:.1f} GiB)" for remedy in found[:SHOWN])
    mend = f"what would fit: {helping}" if helping else "see `packtrain plan`"
    edits = next((remedy.edits for remedy in found if _helps(remedy.edits, asked, made.facts)), {})
    return [Finding(rule, "plan", "warning", what, mend, edits)]


def _helps(edits: Edits, asked: Recipe, facts: Facts) -> bool:
    """Whether settings make a recipe fit, in the host's memory too, and leave what is learned as it is."""
    if not edits or any(key.startswith(_LEARNED) for key in edits):
        return False
    changed = with_edits(asked, edits)
    return not first_error(changed, facts) and plan_resolved(fill(changed, facts), facts).fits


def fill(recipe: Recipe, facts: Facts) -> Recipe:
    """A copy without `auto`: on GPUs the plan's first choice, of the settings that the recipe leaves open."""
    if facts.device == "cpu":
        return resolve_values(recipe, facts)
    return rank(recipe, facts)[0].recipe
