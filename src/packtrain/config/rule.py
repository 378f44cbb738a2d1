"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe
from packtrain.errors import UserError

Severity = Literal["error", "warning"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning")
Fix = Literal["yes", "sometimes", "no"]
Edits = dict[str, Any]
"""Dotted keys of a recipe and their new values; None: the key is left out."""


@dataclass(frozen=True)
class Broken:
    """What is wrong, with the offending values, and what mends it; neither has a full stop.

    Attributes:
        edits: the mend as settings; empty where it is an installation or the user's choice.
    """

    message: str
    mend: str
    edits: Edits = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A rule that a recipe breaks.

    Attributes:
        rule: its id. setting: what is at fault. message, mend, edits: as in ``Broken``.
    """

    rule: str
    setting: str
    severity: Severity
    message: str
    mend: str
    edits: Edits = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        return f"{self.setting}: {self.message}; {self.mend}."

    @classmethod
    def of(cls, rule: str, error: UserError) -> Finding:
        """What a user's mistake is, found while looking for something else."""
        return cls(rule, error.where, "error", error.what, error.mend)


@dataclass(frozen=True)
class Rule:
    """One thing that cannot be or is unwise. The first line of ``check``'s docstring says what, for the docs.

    Attributes:
        id: its name. setting: what is at fault.
        fix: whether what it finds comes with edits.
    """

    id: str
    setting: str
    severity: Severity
    check: Callable[[Recipe, Facts], Broken | None]
    fix: Fix

    @property
    def meaning(self) -> str:
        return (self.check.__doc__ or "").strip().partition("\n")[0].rstrip(".")
