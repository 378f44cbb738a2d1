"""Everything that ``packtrain doctor`` may find, the rules of the table and what else it looks at.

``python -m packtrain.launch.findings`` prints the table of docs/doctor.md.
"""

from __future__ import annotations

from typing import NamedTuple

from packtrain.config.rule import Fix, Severity
from packtrain.config.rules import RULES


class Kind(NamedTuple):
    """One thing that may be found. ``fix``: whether ``--fix`` mends it."""

    id: str
    severity: Severity
    meaning: str
    fix: Fix


BEYOND_RULES: tuple[Kind, ...] = (
    Kind("deepspeed-config", "error", "A DeepSpeed JSON that cannot be read, or contradicts the recipe", "no"),
    Kind("model", "error", "No model of that name, or one that cannot be trained", "no"),
    Kind("weights", "error", "Weight files that are missing, cut short or not safetensors", "no"),
    Kind("memory", "warning", "The plan exceeds what a GPU, or a process on a CPU, may fill", "sometimes"),
    Kind("host-memory", "warning", "The plan exceeds the host's memory", "sometimes"),
    Kind("folder", "error", "The run folder or that of tokenised data cannot be made or written to", "no"),
    Kind("disk", "error", "The disk of the run folder cannot hold what the run will write", "no"),
    Kind("data", "error", "The first rows of a data set are missing, unreadable, refused by the chat template, or hold "
         "nothing to learn", "no"),
    Kind("data-rows", "warning", "Some of the first rows of a data set would be dropped, cut or read oddly", "no"),
    Kind("run-exists", "warning", "A run of this name exists", "no"),
    Kind("secret", "error", "The recipe holds a token or key of the environment", "no"),
    Kind("port", "warning", "`MASTER_PORT` is set and taken on this host; an error in a group of torchrun", "no"),
)  # fmt: skip


def kinds() -> list[Kind]:
    """The rules in their order, then the rest."""
    return [Kind(rule.id, rule.severity, rule.meaning, rule.fix) for rule in RULES] + list(BEYOND_RULES)


def as_markdown() -> str:
    """A row for each."""
    lines = ["| id | level | found when | `--fix` |", "| --- | --- | --- | --- |"]
    lines += [f"| `{k.id}` | {k.severity} | {k.meaning.replace('``', '`')} | {k.fix} |" for k in kinds()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
