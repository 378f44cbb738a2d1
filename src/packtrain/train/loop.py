"""The training loop. It knows the strategy's contract, never which strategy it has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from packtrain.checkpoint.folders import whole
from packtrain.checkpoint.store import Position, SaveFailedError
from packtrain.data.batches import MicroBatch, collate
from packtrain.data.order import GlobalBatch, share
from packtrain.train.evaluation import evaluate
from packtrain.train.faults import STALL_SECONDS, NonFiniteError, SpikeWatch, stalled
from packtrain.train.footprint import log_memory
from packtrain.train.schedule import factor
from packtrain.train.session import Session

SETTLED_STEPS = 3
"""Steps after which memory is what it will be, and is compared with the plan."""


class Stop(Protocol):
    """Set from outside when the run should end after the step it is at."""

    @property
    def set(self) -> bool: ...


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, over all ranks: mean loss per labelled token, gradient norm before clipping.

    ``skipped``: fp16 gradients overflowed, so the weights stayed and the loss scale was lowered.
    ``stalled``: some rank had to wait for its batch.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    stop: bool
    skipped: bool
    stalled: bool


@dataclass(frozen=True)
class Prepared:
    """A global batch and this rank's part of it, collated; the seconds that it was waited for."""

    batch: GlobalBatch
    micro_batches: list[MicroBatch]
    waited: float = 0.0


def train_steps(session: Session, stop: Stop) -> bool:
    """Run from the session's position to the end. Returns False where ``stop`` ended it early."""
    session.built.model.train()
    clock, spikes = time.perf_counter(), SpikeWatch()
    settled = session.position.step + SETTLED_STEPS
    for prepared in prefetched(session):
        result = train_step(session, prepared, stop)
        step = prepared.batch.step + 1
        _warn(session, step, prepared, result, spikes)
        session.position = Position(step, session.position.tokens + prepared.batch.token_count)
        now = time.perf_counter()
        if step % session.recipe.log.every == 0 or step == session.total_steps:
            log_step(session, prepared, result, now - clock)
        clock = now
        if step in (settled, session.total_steps) or result.stop:
            log_memory(session, step)
        if _after_step(session, step, result.stop):
            clock = time.perf_counter()
        if result.stop:
            return step == session.total_steps
    return True


def train_step(session: Session, prepared: Prepared, stop: Stop) -> StepResult:
    """One optimizer step: the loss is a sum over labelled tokens divided by their global count."""
    strategy, world, recipe, timer = session.built.strategy, session.world, session.recipe, session.timer
    batch, micro_batches = prepared.batch, prepared.micro_batches
    seed_step(recipe.train.seed, batch.step, world.rank)
    timer.begin()
    loss_sum = torch.zeros((), dtype=torch.float32, device=world.device)
    for index, micro in enumerate(micro_batches):
        session.beat()
        with strategy.accumulate(last=index == len(micro_batches) - 1):
            own_loss = strategy.forward(**micro.to(world.device).inputs)
            timer.end("forward")
            strategy.backward(own_loss / max(batch.label_count, 1))
            timer.end("backward")
        loss_sum += own_loss.detach()
    norm = strategy.clip([p for _, p in session.named], recipe.train.max_grad_norm)
    # The step's one host synchronisation: a non-finite value must be seen before the update, and a stop be agreed.
    flags = loss_sum.new_tensor([float(stop.set), float(prepared.waited > STALL_SECONDS)])
    shared = world.sum(torch.cat([loss_sum[None], flags]))
    total, stops, stalls, grad_norm = torch.stack([*shared, norm.to(shared)]).tolist()
    timer.end("clip")
    loss = total / max(batch.label_count, 1)
    skipped = math.isfinite(loss) and strategy.skips(grad_norm)
    if not skipped:
        NonFiniteError.check(world, batch.step, loss, grad_norm, loss_sum, micro_batches)
    rate = learning_rate(session, batch.step)
    session.updates.apply(rate)
    timer.end("update")
    return StepResult(loss, grad_norm, rate, stops > 0, skipped, stalls > 0)


def _warn(session: Session, step: int, prepared: Prepared, result: StepResult, spikes: SpikeWatch) -> None:
    """What is odd about a step and does not end the run. All ranks come to the same answer."""
    if result.stalled:
        session.log.write("warning", step=step, message=f"step {step}: {stalled(session.world, prepared.waited)}")
    if usual := spikes.usual_before(result.loss):
        message = f"step {step}: the loss jumped to {result.loss:.4f}; it was {usual:.4f} in the steps before"
        session.log.write("warning", step=step, message=message)


def learning_rate(session: Session, step: int) -> float:
    section = session.recipe.train
    return section.learning_rate * factor(section, step, session.total_steps)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout's random stream is a function of (seed, step, rank): a resumed run draws the same."""
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)


def prefetched(session: Session) -> Iterator[Prepared]:
    """This rank's batches from the session's position on, each collated while the one before it is trained on."""
    steps = range(session.position.step, session.total_steps)
    with ThreadPoolExecutor(1, thread_name_prefix="collate") as pool:
        waiting = pool.submit(prepare, session, steps[0]) if steps else None
        for step in steps:
            assert waiting is not None
            session.beat("step")
            started = time.perf_counter()
            ready = replace(waiting.result(), waited=time.perf_counter() - started)
            if step + 1 in steps:
                waiting = pool.submit(prepare, session, step + 1)
            yield ready


def prepare(session: Session, step: int) -> Prepared:
    recipe, world = session.recipe, session.world
    batch = session.order.batch(step)
    packed, micro = recipe.data.packing, recipe.train.micro_batch_size
    assert isinstance(micro, int) and isinstance(recipe.data.max_length, int)
    # Compiled blocks see one shape; elsewhere padding would be computed for nothing.
    length = recipe.data.max_length if packed and recipe.parallel.compile else None
    parts = share(batch.sequences, world.rank, world.size, micro)
    return Prepared(batch, [collate(session.data.train, part, packed, length) for part in parts])


def log_step(session: Session, prepared: Prepared, result: StepResult, seconds: float) -> None:
    batch, parts = prepared.batch, {"data": prepared.waited, **session.timer.seconds()}
    session.log.write(
        "step",
        step=batch.step + 1,
        epoch=batch.epoch,
        loss=result.loss,
        lr=result.learning_rate,
        grad_norm=result.grad_norm,
        tokens=batch.token_count,
        tokens_per_second=round(batch.token_count / seconds, 1),
        seconds=round(seconds, 6),
        parts={part: round(spent, 6) for part, spent in parts.items()},
        memory=session.memory.bytes if session.memory else 0,
        **loss_scaling(session, result),
    )


def loss_scaling(session: Session, result: StepResult) -> dict[str, Any]:
    """What is said of a step with fp16 gradients."""
    scale = session.built.strategy.loss_scale
    return {} if scale is None else {"loss_scale": scale, "skipped": result.skipped}


def _after_step(session: Session, step: int, stopping: bool) -> bool:
    """Evaluate and save where it is due. Returns whether anything was done."""
    recipe = session.recipe
    evaluating = not stopping and session.due(recipe.evaluate.every, step)
    if evaluating:
        session.beat("evaluating")
        run_evaluation(session)
    saving = stopping or session.due(recipe.checkpoint.every, step)
    if saving:
        session.beat("saving")
        save_checkpoint(session)
    return evaluating or saving


def save_checkpoint(session: Session) -> None:
    """A save that fails is a warning: the older checkpoints are as they were, and training goes on."""
    step, started = session.position.step, time.perf_counter()
    try:
        path = session.save()
    except SaveFailedError as error:
        older = list(whole(session.store.folder).values())
        left = f"the newest checkpoint is {older[-1].name}" if older else "there is no older checkpoint"
        session.log.write("warning", step=step, message=f"no checkpoint at step {step}: {error}; {left}")
        return
    session.log.write("checkpoint", step=step, path=path.name, seconds=round(time.perf_counter() - started, 3))


def run_evaluation(session: Session) -> None:
    found = evaluate(session)
    if found is not None:
        values = {"loss": found.loss, "rows": found.rows, "tokens": found.tokens}
        if "perplexity" in session.recipe.evaluate.metrics:
            values["perplexity"] = found.perplexity
        session.log.write("eval", step=session.position.step, **values)
