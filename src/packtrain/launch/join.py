"""Under torchrun or srun the processes exist already: join their group instead of starting another."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from packtrain.config import Recipe
from packtrain.errors import UserError
from packtrain.launch import failure, summary, worker
from packtrain.launch.folder import RunFolder
from packtrain.launch.prepare import prepare
from packtrain.launch.process import ProcessId, StopFlag
from packtrain.launch.progress import Progress
from packtrain.launch.scores import score_final
from packtrain.launch.supervisor import HEARTBEAT_SECONDS, Outcome
from packtrain.metrics.reader import EventReader

if TYPE_CHECKING:
    from packtrain.parallel.world import World


def join_group(recipe: Recipe, open_folder: Callable[[], RunFolder]) -> Outcome:
    """Train as one rank of the group that was found.

    Args:
        open_folder: makes or checks the run's folder; called by rank 0 when all ranks are there.
    """
    from packtrain.config.schema import seconds
    from packtrain.parallel import world

    stop = StopFlag()
    stop.listen()
    prepare(recipe)
    here = world.join(recipe.launch.device, seconds(recipe.launch.timeout))
    with ExitStack() as held:
        folder = _agree_on_folder(here, open_folder, held)
        recipe.output.name = folder.name
        try:
            with _shown(folder, here):
                state = worker.train(folder, recipe, here, stop)
        except BaseException as error:  # noqa: BLE001 - the end of a rank: recorded, then it leaves
            _record(folder, failure.describe(error, here.rank))
            worker.raise_at_once(folder, error)
        world.leave()
        outcome = Outcome(state, 130 if state == "stopped" else 0)
        if here.is_main:
            folder.update_status(state=state, exit=outcome.exit)
            if state == "done":
                score_final(folder, recipe)
            print("\n".join(summary.ended(folder, state)), flush=True)
    return outcome


def _agree_on_folder(here: World, open_folder: Callable[[], RunFolder], held: ExitStack) -> RunFolder:
    """Rank 0 opens the folder, or fails to; everybody hears of it."""
    answer: object = None
    if here.is_main:
        try:
            answer = str(_lead(open_folder(), held).path)
        except UserError as error:
            answer = error
    answer = here.broadcast(answer)
    if isinstance(answer, UserError):
        raise answer
    folder = RunFolder(str(answer))
    blind = here.gather(None if folder.status.exists() else socket.gethostname())
    hosts = sorted({str(host) for host in blind if host})
    if hosts:
        what = f"{folder.path} is not seen from {', '.join(hosts)}"
        raise UserError("output.folder", what, "give a folder that all nodes share")
    return folder


def _lead(folder: RunFolder, held: ExitStack) -> RunFolder:
    held.enter_context(folder.led())
    for path in folder.logs.glob("rank-*.error.json"):
        path.unlink()
    own = asdict(ProcessId.of(os.getpid()))
    folder.update_status(state="starting", supervisor=own, ranks=[], command=sys.argv, error=None, exit=None)
    return folder


def _record(folder: RunFolder, found: failure.Failure) -> None:
    """The first rank to fail says so in status.json; those that only lost it do not."""
    status = folder.read_status()
    if status.error is None and not found.consequence:
        folder.update_status(state="failed", error=found.as_status(), exit=2 if found.kind == "user" else 1)


@contextmanager
def _shown(folder: RunFolder, here: World) -> Iterator[None]:
    """On rank 0, keep the heartbeat and print progress from a thread of its own."""
    if not here.is_main:
        yield
        return
    progress = Progress(EventReader(folder.events, from_end=True), sys.stdout)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            folder.update_status()
            progress.update()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.update()
