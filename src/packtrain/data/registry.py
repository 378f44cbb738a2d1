"""Data sets that have a name: where they are and how a row of theirs becomes a prompt and an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MINIATURES = Path(__file__).parent / "miniatures"

SUMMARIZE = "Summarize this dialogue in one sentence:\n{dialogue}"
CORRECT = "Correct this to standard English:\n{sentence}"


@dataclass(frozen=True)
class Registered:
    """A named data set.

    Args:
        hub: its hub id, or None for a shipped miniature.
        prompt: the template of the user's turn; None means the alpaca format.
        answer: the column of the answer; of a list, the first item.
        splits: our split names to the hub's, where they differ.
    """

    hub: str | None
    prompt: str | None = None
    answer: str | None = None
    splits: dict[str, str] = field(default_factory=dict)


REGISTERED = {
    "samsum": Registered("knkarthick/samsum", SUMMARIZE, "summary"),
    "alpaca": Registered("tatsu-lab/alpaca"),
    "grammar": Registered("jhu-clsp/jfleg", CORRECT, "corrections", {"train": "validation"}),
    "samsum_mini": Registered(None, SUMMARIZE, "summary"),
    "alpaca_mini": Registered(None),
    "grammar_mini": Registered(None, CORRECT.replace("{sentence}", "{input}"), "target"),
}


def recognised(columns: set[str]) -> Registered | None:
    """The named data set whose columns these are: how a copy of it on disk is known."""
    for known in REGISTERED.values():
        if known.prompt and known.hub and {known.prompt.split("{")[1].rstrip("}"), known.answer} <= columns:
            return known
    return None
