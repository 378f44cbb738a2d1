"""From row ids to the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


class TokenRows(Protocol):
    """What collation needs of a token store."""

    def tokens(self, index: int) -> np.ndarray: ...
    def labelled(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank.

    Attributes:
        inputs: keyword arguments of ``CausalLMWithLoss.forward``.
        row_ids: (tokens,) the row each labelled token belongs to.
        num_tokens: real tokens, without padding.
    """

    inputs: dict[str, Any]
    row_ids: np.ndarray
    num_tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        moved = {
            k: v.pin_memory().to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for k, v in self.inputs.items()
        }
        return MicroBatch(moved, self.row_ids, self.num_tokens)


def collate(
    rows: TokenRows, sequences: Sequence[np.ndarray], packed: bool, length: int | None = None, multiple: int = 8
) -> MicroBatch:
    """Lay out sequences of rows, padded on the right.

    A label sits where its token is predicted: at the position before it. Padding has token 0, positions of its own
    and no label, so it changes nothing; which id pads is never looked at.

    Args:
        sequences: row ids of each sequence; an empty one becomes padding.
        packed: mark documents, so that rows of one sequence do not see each other.
        length: tokens of each sequence; None: the longest, rounded up to ``multiple``.
    """
    filled = [sum(len(rows.tokens(int(i))) for i in ids) for ids in sequences]
    if length is None:
        length = max(-(-max(filled, default=1) // multiple), 1) * multiple
    layout = _Layout(len(sequences), length)
    for line, ids in enumerate(sequences):
        layout.place(line, ids, rows)
    several = packed and any(len(ids) > 1 for ids in sequences)  # one row a sequence is plain causal attention
    return MicroBatch(layout.inputs(with_documents=several), _joined(layout.row_ids), sum(filled))


class _Layout:
    """The arrays of a micro-batch while rows are put in their places."""

    def __init__(self, num_sequences: int, length: int) -> None:
        self.length = length
        shape = (num_sequences, length)
        self.input_ids, self.position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.document_ids = np.zeros(shape, np.int64)
        self.label_positions: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.row_ids: list[np.ndarray] = []
        self.starts: list[int] = []

    def place(self, line: int, ids: np.ndarray, rows: TokenRows) -> None:
        """Rows end to end from the start of a sequence; what is left over becomes a document of its own."""
        at = 0
        for document, row in enumerate(ids, start=1):
            tokens, labelled = rows.tokens(int(row)), rows.labelled(int(row))
            end, start = at + len(tokens), line * self.length + at
            self.input_ids[line, at:end] = tokens
            self.position_ids[line, at:end] = np.arange(len(tokens))
            self.document_ids[line, at:end] = document
            learned = np.flatnonzero(labelled[1:])
            self.label_positions.append(start + learned)
            self.targets.append(tokens[learned + 1])
            self.row_ids.append(np.full(len(learned), row, dtype=np.int64))
            self.starts.append(start)
            at = end
        if at < self.length:
            self.position_ids[line, at:] = np.arange(self.length - at)
            self.starts.append(line * self.length + at)

    def inputs(self, with_documents: bool) -> dict[str, Any]:
        """Keyword arguments of ``CausalLMWithLoss.forward``."""
        found: dict[str, Any] = {
            "input_ids": torch.from_numpy(self.input_ids),
            "position_ids": torch.from_numpy(self.position_ids),
            "label_positions": torch.from_numpy(_joined(self.label_positions)),
            "targets": torch.from_numpy(_joined(self.targets)),
        }
        if with_documents:
            boundaries = np.array([*self.starts, self.input_ids.size], dtype=np.int32)
            found["document_ids"] = torch.from_numpy(self.document_ids)
            found["cu_seqlens"] = torch.from_numpy(boundaries)
            found["max_seqlen"] = int(np.diff(boundaries).max())
        return found


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
