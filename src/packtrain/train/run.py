"""A whole run in this process, from a resolved recipe to trained weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from packtrain.config.schema import Recipe
from packtrain.metrics.curve import draw_curve
from packtrain.metrics.reader import read_events
from packtrain.parallel.world import World
from packtrain.train.garbage import settled_heap
from packtrain.train.loop import Stop, train_steps
from packtrain.train.peak import PeakMemory
from packtrain.train.session import Beat, Session, open_session, silent


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. ``stopped``: before its last step, with a checkpoint."""

    session: Session
    stopped: bool


def train(folder: Path, recipe: Recipe, world: World, stop: Stop, beat: Beat = silent) -> TrainResult:
    """Train in this process as one rank of ``world``; continues from the newest checkpoint where there is one."""
    started = time.perf_counter()
    with PeakMemory(world.device) as memory:
        session = open_session(recipe, folder, world, beat)
        session.memory = memory
        _log_start(session, time.perf_counter() - started)
        with settled_heap():
            finished = train_steps(session, stop)
    if finished:
        seconds = round(time.perf_counter() - started, 1)
        session.log.write("end", steps=session.position.step, seconds=seconds, tokens=session.position.tokens)
    if world.is_main:
        draw_curve(read_events(folder / "events.jsonl"), folder / "curve.png", folder.name)
    session.log.close()
    return TrainResult(session, stopped=not finished)


def _log_start(session: Session, seconds: float) -> None:
    traffic = session.built.strategy.traffic(session.micro_batches)
    session.log.write(
        "start",
        step=session.position.step,
        total_steps=session.total_steps,
        parameters=session.built.num_parameters,
        trainable=session.built.num_trained,
        strategy=session.built.strategy.describe(),
        traffic=traffic.describe() if traffic else "",
        world_size=session.world.size,
        device=session.world.device.type,
        precision=session.recipe.train.precision,
        rows=len(session.data.train),
        recomputed_blocks=session.built.num_recomputed,
        quantized_linears=session.built.num_quantized,
        bytes_read=session.built.bytes_read,
        seconds=round(seconds, 2),
    )
