"""The order of rows is a function of (data, seed, step); shares are even, complete, and alike in number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from packtrain.data.order import Order, share


@dataclass
class Rows:
    lengths: np.ndarray
    label_counts: np.ndarray
    dataset: np.ndarray


def make_rows(count: int = 100, datasets: int = 1, seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 60, size=count).astype(np.int32)
    return Rows(lengths, lengths // 2, (np.arange(count) % datasets).astype(np.int16))


def ids_of(order: Order, epoch_steps: range) -> list[int]:
    return [int(i) for step in epoch_steps for ids in order.batch(step).sequences for i in ids]


@pytest.mark.parametrize("max_length", [None, 64], ids=["padded", "packed"])
def test_an_epoch_holds_every_row_once(max_length: int | None) -> None:
    order = Order(make_rows(), [1.0], 8, max_length, seed=3)
    first = order.steps_in_epoch(0)
    assert sorted(ids_of(order, range(first))) == list(range(100))
    second = ids_of(order, range(first, first + order.steps_in_epoch(1)))
    assert sorted(second) == list(range(100)) and second != ids_of(order, range(first))
    assert order.batch(first).epoch == 1


def test_a_batch_depends_on_nothing_but_seed_and_step() -> None:
    rows = make_rows()
    one, two = Order(rows, [1.0], 8, 64, seed=3), Order(rows, [1.0], 8, 64, seed=3)
    late = [ids.tolist() for ids in two.batch(17).sequences]  # asked for first
    assert late == [ids.tolist() for ids in one.batch(17).sequences]
    other = Order(rows, [1.0], 8, 64, seed=4)
    assert [ids.tolist() for ids in other.batch(17).sequences] != late


def test_packed_sequences_fit_and_counts_are_sums() -> None:
    rows = make_rows()
    batch = Order(rows, [1.0], 8, 64, seed=0).batch(0)
    assert all(rows.lengths[ids].sum() <= 64 for ids in batch.sequences)
    ids = np.concatenate(batch.sequences)
    assert (batch.label_count, batch.token_count) == (rows.label_counts[ids].sum(), rows.lengths[ids].sum())


def test_weights_are_passes_over_a_data_set() -> None:
    rows = make_rows(120, datasets=3)
    order = Order(rows, [1.0, 0.5, 2.25], 8, None, seed=0)
    counts = np.bincount(rows.dataset[ids_of(order, range(order.steps_in_epoch(0)))])
    assert counts.tolist() == [40, 20, 90]


def test_rows_of_a_padded_batch_are_of_like_length() -> None:
    rows = make_rows(512)
    order = Order(rows, [1.0], 8, None, seed=0)
    spreads = [np.ptp(rows.lengths[np.concatenate(order.batch(s).sequences)]) for s in range(order.steps_in_epoch(0))]
    assert np.mean(spreads) < 5


@pytest.mark.parametrize("total, world, micro", [(8, 2, 2), (7, 4, 1), (1, 4, 2), (13, 3, 2), (5, 1, 5)])
def test_shares_are_complete_and_alike_in_number(total: int, world: int, micro: int) -> None:
    sequences = [np.array([i]) for i in range(total)]
    shares = [share(sequences, rank, world, micro) for rank in range(world)]
    assert len({len(s) for s in shares}) == 1
    assert all(len(batch) <= micro for s in shares for batch in s)
    given = sorted(int(i) for s in shares for batch in s for ids in batch for i in ids)
    assert given == list(range(total))


def test_total_steps_of_part_of_an_epoch() -> None:
    order = Order(make_rows(80), [1.0], 8, None, seed=0)
    assert [order.total_steps(e) for e in (0.01, 1, 1.5, 2)] == [1, 10, 15, 20]
