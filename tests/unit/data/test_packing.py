from __future__ import annotations

import time

import numpy as np
import pytest

from packtrain.data import efficiency, pack


def naive_ffd(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((b for b, free in enumerate(room) if free >= lengths[row]), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(row)
        room[place] -= lengths[row]
    return bins


@pytest.mark.parametrize("seed", range(20))
def test_equals_sequential_first_fit_decreasing(seed: int) -> None:
    random = np.random.default_rng(seed)
    capacity = int(random.integers(10, 100))
    lengths = random.integers(1, capacity + 1, int(random.integers(1, 400)))
    assert [list(b) for b in pack(lengths, capacity)] == naive_ffd(lengths.tolist(), capacity)


def test_fast_and_nothing_dropped() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.5, 100_000).astype(int), 1, 2048)
    start = time.perf_counter()
    bins = pack(lengths, 2048)
    assert time.perf_counter() - start < 2
    assert sorted(np.concatenate(bins)) == list(range(100_000))
    assert max(lengths[b].sum() for b in bins) <= 2048
    assert efficiency(int(lengths.sum()), len(bins), 2048) > 0.98


def test_edges() -> None:
    assert pack(np.array([], dtype=int), 8) == []
    with pytest.raises(ValueError, match="9 tokens"):
        pack(np.array([9]), 8)
