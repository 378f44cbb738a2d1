"""Order: what the rows of step s are is a function of (data, seed, s) alone, whatever the number of processes.

An epoch's rows are chosen (mixture weights), shuffled and grouped into sequences (packed, or one row each); the
sequences are ordered and cut into global batches. Nothing is dropped: the last batch of an epoch may be smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from packtrain.data.packing import pack

_GROUP = 32  # batches whose rows are sorted by length together


class Rows(Protocol):
    """What the order needs to know of a token store."""

    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def label_counts(self) -> np.ndarray: ...
    @property
    def dataset(self) -> np.ndarray: ...


@dataclass(frozen=True)
class GlobalBatch:
    """What all ranks do in one optimizer step.

    Attributes:
        sequences: row ids of each sequence; one id each where rows are not packed.
        label_count: labelled tokens over all sequences, the divisor of the loss.
        token_count: real tokens over all sequences.
    """

    step: int
    epoch: int
    sequences: list[np.ndarray]
    label_count: int
    token_count: int


class Order:
    """The global batches of a run.

    Args:
        rows: lengths, label counts and data set of each row.
        weights: passes over each data set in one epoch.
        batch_size: sequences of one global batch.
        max_length: tokens of a packed sequence; None: rows are not packed.
    """

    def __init__(
        self, rows: Rows, weights: Sequence[float], batch_size: int, max_length: int | None, seed: int
    ) -> None:
        self.rows, self.weights = rows, weights
        self.batch_size, self.max_length, self.seed = batch_size, max_length, seed
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def steps_in_epoch(self, epoch: int) -> int:
        return len(self._epoch(epoch))

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step ``step`` (from 0)."""
        epoch, first = 0, 0
        while step >= first + self.steps_in_epoch(epoch):
            first += self.steps_in_epoch(epoch)
            epoch += 1
        sequences = self._epoch(epoch)[step - first]
        ids = np.concatenate(sequences)
        labels, tokens = int(self.rows.label_counts[ids].sum()), int(self.rows.lengths[ids].sum())
        return GlobalBatch(step, epoch, sequences, labels, tokens)

    def total_steps(self, epochs: float) -> int:
        """Optimizer steps of ``epochs`` passes, at least one; part of an epoch is rounded up."""
        whole = int(epochs)
        steps = sum(self.steps_in_epoch(e) for e in range(whole))
        if epochs > whole:
            steps += int(np.ceil((epochs - whole) * self.steps_in_epoch(whole) - 1e-9))
        return max(steps, 1)

    def _make_epoch(self, epoch: int) -> list[list[np.ndarray]]:
        random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, epoch]))
        ids = random.permutation(self._chosen(random))
        if self.max_length is not None:
            sequences = [ids[bin_] for bin_ in pack(self.rows.lengths[ids], self.max_length)]
            shuffled = [sequences[i] for i in random.permutation(len(sequences))]
            return [shuffled[i : i + self.batch_size] for i in range(0, len(shuffled), self.batch_size)]
        return self._grouped_by_length(ids, random)

    def _chosen(self, random: np.random.Generator) -> np.ndarray:
        """Row ids of one epoch: each data set ``weight`` times, a fraction drawn without replacement."""
        parts = []
        for index, weight in enumerate(self.weights):
            ids = np.flatnonzero(self.rows.dataset == index)
            whole = int(weight)
            parts += [ids] * whole
            rest = round((weight - whole) * len(ids))
            if rest:
                parts.append(random.choice(ids, size=rest, replace=False))
        return np.concatenate(parts)

    def _grouped_by_length(self, ids: np.ndarray, random: np.random.Generator) -> list[list[np.ndarray]]:
        """Batches of rows of like length, in random order; the smaller batch stays the last."""
        window = self.batch_size * _GROUP
        batches: list[list[np.ndarray]] = []
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            part = part[np.argsort(-self.rows.lengths[part], kind="stable")]
            batches += [
                [part[j : j + 1] for j in range(i, min(i + self.batch_size, len(part)))]
                for i in range(0, len(part), self.batch_size)
            ]
        full = [b for b in batches if len(b) == self.batch_size]
        rest = [b for b in batches if len(b) < self.batch_size]
        return [full[i] for i in random.permutation(len(full))] + rest


def share(sequences: Sequence[np.ndarray], rank: int, world_size: int, micro_batch_size: int) -> list[list[np.ndarray]]:
    """This rank's micro-batches of a global batch; as many on every rank.

    Sequences are dealt in turn, so that ranks get rows of like length. A rank that runs out gets empty sequences,
    which weigh nothing.
    """
    empty = np.empty(0, dtype=np.int64)
    mine = list(sequences[rank::world_size])
    most = -(-len(sequences) // world_size)
    num_micro = -(-most // micro_batch_size)
    size = -(-most // num_micro)
    mine += [empty] * (num_micro * size - len(mine))
    return [mine[i * size : (i + 1) * size] for i in range(num_micro)]
