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
    shape = (len(sequences), length)
    input_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    document_ids = np.zeros(shape, np.int64)
    positions: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    row_ids: list[np.ndarray] = []
    starts: list[int] = []
    for line, ids in enumerate(sequences):
        at = 0
        for document, row in enumerate(ids, start=1):
            tokens, labelled = rows.tokens(int(row)), rows.labelled(int(row))
            end = at + len(tokens)
            input_ids[line, at:end] = tokens
            position_ids[line, at:end] = np.arange(len(tokens))
            document_ids[line, at:end] = document
            learned = np.flatnonzero(labelled[1:])
            positions.append(line * length + at + learned)
            targets.append(tokens[learned + 1])
            row_ids.append(np.full(len(learned), row, dtype=np.int64))
            starts.append(line * length + at)
            at = end
        if at < length:
            position_ids[line, at:] = np.arange(length - at)
            starts.append(line * length + at)
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "label_positions": torch.from_numpy(_joined(positions)),
        "targets": torch.from_numpy(_joined(targets)),
    }
    if packed and any(len(ids) > 1 for ids in sequences):  # one row a sequence is plain causal attention
        boundaries = np.array([*starts, shape[0] * length], dtype=np.int32)
        inputs["document_ids"] = torch.from_numpy(document_ids)
        inputs["cu_seqlens"] = torch.from_numpy(boundaries)
        inputs["max_seqlen"] = int(np.diff(boundaries).max())
    return MicroBatch(inputs, _joined(row_ids), sum(filled))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
