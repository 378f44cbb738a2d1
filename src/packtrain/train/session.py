"""A run in this process: model, optimizer, data and checkpoints, made from a resolved recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from packtrain.checkpoint.folders import newest as newest_checkpoint
from packtrain.checkpoint.store import CheckpointStore, Position
from packtrain.config.schema import Every, Recipe
from packtrain.data import PreparedData, prepare_data
from packtrain.data.order import Order
from packtrain.metrics.events import EventLog
from packtrain.metrics.sinks import make_sinks
from packtrain.models.locate import model_folder
from packtrain.parallel.strategy import full_tensor
from packtrain.parallel.updates import Updates
from packtrain.parallel.world import World
from packtrain.train.build import Built, build
from packtrain.train.optimizer import make_optimizer, trainable
from packtrain.train.peak import PeakMemory
from packtrain.train.timer import StepTimer


class Beat(Protocol):
    """Called whenever the training thread goes on: with what it begins (``step``, ``saving``, ...), or None."""

    def __call__(self, phase: str | None = None) -> None: ...


def silent(phase: str | None = None) -> None:
    """Where nobody watches."""


@dataclass
class Session:
    """Everything the loop works on."""

    recipe: Recipe
    folder: Path
    model_folder: Path
    world: World
    data: PreparedData
    built: Built
    updates: Updates
    order: Order
    total_steps: int
    store: CheckpointStore
    log: EventLog
    timer: StepTimer
    position: Position = field(default_factory=lambda: Position(0))
    beat: Beat = silent
    memory: PeakMemory | None = None

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, as the model holds it."""
        return self.updates.named

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """What ``final/`` holds of a parameter, whole and on the CPU. A collective."""
        return full_tensor(self.updates.saved(parameter)).cpu()

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step, on each process."""
        return self.recipe.train.micro_batches(self.world.size)

    def save(self) -> Path:
        return self.store.save(self.updates.state(), self.position)

    def due(self, every: Every, step: int) -> bool:
        """Whether something that happens ``every`` so often, and at the end, happens after ``step`` optimizer steps."""
        if every == "never":
            return False
        if step == self.total_steps:
            return True
        if every == "epoch":
            return self.order.batch(step).epoch != self.order.batch(step - 1).epoch
        assert isinstance(every, float)
        interval = max(round(every * self.total_steps), 1) if every < 1 else round(every)
        return step % interval == 0


def open_session(recipe: Recipe, folder: Path, world: World, beat: Beat = silent) -> Session:
    """Build everything, and continue from the newest whole checkpoint where the run folder has one.

    Args:
        recipe: resolved: it holds no ``auto``.
        folder: the run folder.
    """
    base = model_folder(recipe.model.path)
    assert isinstance(recipe.data.max_length, int)
    data = prepare_data(
        recipe.data, base, recipe.data.max_length, recipe.train.seed, add_tokens=recipe.model.add_tokens
    )  # fmt: skip
    order = make_order(recipe, data)
    total = recipe.train.max_steps or order.total_steps(recipe.train.epochs)
    built = build(recipe, base, world, folder)
    belongs_to = {"data": data.train.folder.name, "base model": built.files.fingerprint}
    store = CheckpointStore(folder / "checkpoints", recipe.checkpoint.keep, world, belongs_to)
    sinks = make_sinks(recipe, folder) if world.is_main else []
    log = EventLog(folder / "events.jsonl" if world.is_main else None, sinks)
    updates = built.strategy.updates(trainable(built.model), partial(make_optimizer, recipe))
    timer = StepTimer(world.device)
    session = Session(recipe, folder, base, world, data, built, updates, order, total, store, log, timer, beat=beat)
    _resume(session)
    return session


def make_order(recipe: Recipe, data: PreparedData) -> Order:
    packed = recipe.data.max_length if recipe.data.packing else None
    assert packed is None or isinstance(packed, int)
    weights = [entry.weight for entry in recipe.data.train]
    return Order(data.train, weights, recipe.train.batch_size, packed, recipe.train.seed)


def _resume(session: Session) -> None:
    found = session.world.broadcast(newest_checkpoint(session.store.folder) if session.world.is_main else None)
    newest: Path | None
    passed_over: list[str]
    newest, passed_over = found  # type: ignore[misc]
    for fault in passed_over:
        session.log.write("warning", message=f"checkpoint passed over: {fault}")
    if newest is None:
        return
    state = session.updates.state()
    session.position = session.store.load(newest, state)
    session.updates.loaded(state)
    session.log.write("resume", step=session.position.step, checkpoint=newest.name)
