"""A non-finite loss or gradient stops every rank before the update and says where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.jobs import NeverStop, open_job
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_chats


def poisoned(world: Any, recipe: dict[str, Any]) -> tuple[str, bool]:
    """One good step, then rank 1's loss becomes infinite; the message, and whether the weights stayed."""
    import torch

    from packtrain.train.faults import NonFiniteError
    from packtrain.train.loop import prefetched, train_step

    session = open_job(world, recipe)
    strategy = session.built.strategy
    batches = prefetched(session)
    train_step(session, next(batches), NeverStop())
    forward = strategy.forward
    if world.rank == 1:
        strategy.forward = lambda **batch: forward(**batch) * float("inf")
    before = [p.detach().clone() for _, p in session.named]
    with pytest.raises(NonFiniteError) as caught:
        train_step(session, next(batches), NeverStop())
    same = all(torch.equal(a, p.detach()) for a, (_, p) in zip(before, session.named, strict=True))
    return str(caught.value), same


def test_non_finite_loss_names_step_rank_and_rows(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), str(write_chats(tmp_path / "chats.jsonl", 8))
    recipe = values(
        model,
        data,
        method={"type": "lora"},
        parallel={"strategy": "ddp"},
        train={"batch_size": 4, "micro_batch_size": 2},
    )
    for message, same in run_ranks(2, poisoned, recipe):
        assert message.startswith("step 2: loss ")
        assert "rank 1, rows" in message and "rank 0" not in message
        assert "not updated" in message and same
