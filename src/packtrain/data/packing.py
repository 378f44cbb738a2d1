"""Packing: rows into sequences of at most ``capacity`` tokens by first-fit decreasing."""

from __future__ import annotations

import numpy as np

IntArray = np.ndarray


def pack(lengths: IntArray, capacity: int) -> list[IntArray]:
    """First-fit decreasing over rows.

    Rows of equal length are interchangeable, so that a whole length is placed at once: bins in order take
    as many of them as fit, then new bins open. The result is that of the sequential algorithm, ties in order.

    Args:
        lengths: tokens of each row, ``(rows,)``, each from 1 to ``capacity``.
        capacity: tokens of a sequence.

    Returns:
        for each sequence the indices of its rows.

    Raises:
        ValueError: a row is longer than ``capacity``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return []
    if lengths.max() > capacity:
        raise ValueError(f"a row of {lengths.max()} tokens does not fit into {capacity}")
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(-lengths, return_counts=True)
    bins, num_bins = _place(-values, counts, capacity, len(lengths))
    by_bin = np.argsort(bins, kind="stable")
    edges = np.cumsum(np.bincount(bins, minlength=num_bins))[:-1]
    return np.split(order[by_bin], edges)


def efficiency(num_tokens: int, num_sequences: int, capacity: int) -> float:
    """Real tokens over the room in the sequences, 0 to 1."""
    return num_tokens / (num_sequences * capacity) if num_sequences else 0.0


def _place(values: IntArray, counts: IntArray, capacity: int, num_rows: int) -> tuple[IntArray, int]:
    """The bin of each row, rows in descending order of length, and the number of bins."""
    room = np.empty(num_rows, dtype=np.int64)
    bins = np.empty(num_rows, dtype=np.int64)
    num_bins = done = 0
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        fits = room[:num_bins] // length
        taken = np.minimum(fits, np.maximum(count - (np.cumsum(fits) - fits), 0))
        rest = count - int(taken.sum())
        per_bin = capacity // length
        new = -(-rest // per_bin)
        room[num_bins : num_bins + new] = capacity
        taken = np.concatenate([taken, np.full(new, per_bin)])
        if new:
            taken[-1] = rest - per_bin * (new - 1)
        num_bins += new
        room[:num_bins] -= taken * length
        bins[done : done + count] = np.repeat(np.arange(num_bins), taken)
        done += count
    return bins, num_bins
