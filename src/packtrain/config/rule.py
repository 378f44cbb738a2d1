"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A rule that a recipe breaks. ``rule`` is its id and names the setting at fault."""

    rule: str
    severity: Severity
    message: str
    mend: str


Broken = tuple[str, str] | None
"""(message with the offending values, mend), or None where the rule holds."""


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    check: Callable[[Recipe, Facts], Broken]
