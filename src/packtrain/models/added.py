"""Tokens that a recipe adds to a model's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that the base model does not know.

    Args:
        first: the id of the first of them; the others follow.
        pieces: for each, the ids its text has without it: where its rows start is the mean of theirs.
    """

    first: int
    pieces: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def end(self) -> int:
        """One past the last id."""
        return self.first + len(self.pieces)
