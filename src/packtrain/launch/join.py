"""Under torchrun or srun the processes exist already: join their group instead of starting another."""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from packtrain.config import Recipe
from packtrain.errors import UserError
from packtrain.launch import failure, group, summary, worker
from packtrain.launch.folder import RunFolder
from packtrain.launch.measured import write_measured
from packtrain.launch.prepare import prepare
from packtrain.launch.process import (
    DUMP_STACKS,
    ProcessId,
    StopFlag,
    die_with_agent,
    keep_files_private,
    leave_at_once,
)
from packtrain.launch.progress import Progress
from packtrain.launch.scores import score_final
from packtrain.launch.secrets import redact
from packtrain.launch.supervisor import GRACE_SECONDS, HEARTBEAT_SECONDS, WORD_SECONDS, Outcome
from packtrain.launch.watch import HangWatch
from packtrain.metrics.reader import EventReader

if TYPE_CHECKING:
    from packtrain.parallel.world import World


def join_group(recipe: Recipe, open_folder: Callable[[], RunFolder]) -> Outcome:
    """Train as one rank of the group that was found.

    Args:
        open_folder: makes or checks the run's folder; called by rank 0 when all ranks are there.
    """
    from packtrain.config.schema import seconds
    from packtrain.data.cache import data_root
    from packtrain.launch import preflight
    from packtrain.parallel import world

    die_with_agent()
    keep_files_private()
    faulthandler.register(DUMP_STACKS)
    stop = StopFlag()
    stop.listen()
    prepare(recipe)
    try:
        here = world.join(recipe.launch.device, seconds(recipe.launch.timeout))
    except RuntimeError as error:
        told = preflight.not_joined(error, recipe)
        if told is None:
            raise
        raise told from error
    found = preflight.check(here, recipe, data_root(recipe.data.cache))
    if here.is_main:
        print("\n".join(found.lines), flush=True)
    with ExitStack() as held:
        folder = _agree_on_folder(here, open_folder, held)
        recipe.output.name = folder.name
        try:
            attend = Attendant(folder, here, stop, seconds(recipe.launch.heartbeat))
            with _shown(folder, here):
                state = worker.train(folder, recipe, here, stop, [attend])
        except BaseException as error:  # noqa: BLE001 - the end of a rank: recorded, then it leaves
            _record(folder, failure.describe(error, here.rank))
            worker.raise_at_once(folder, error)
        world.leave()
        outcome = Outcome(state, 130 if state == "stopped" else 0)
        if here.is_main:
            folder.update_status(state=state, exit=outcome.exit)
            write_measured(folder)
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
    for path in folder.logs.glob("rank-*.beat"):
        path.unlink()
    own = asdict(ProcessId.of(os.getpid()))
    command = [redact(word) for word in sys.argv]
    cleared: dict[str, Any] = {"ranks": [], "gpus": [], "error": None, "exit": None, "note": ""}
    folder.update_status(state="starting", supervisor=own, command=command, group=group.identity(), **cleared)
    return folder


class Attendant:
    """What a rank does beside training where no supervisor does it, about once a second.

    Rank 0 hears of requests and finds the rank that hangs; the others leave when the run has ended without them.
    """

    def __init__(self, folder: RunFolder, here: World, stop: StopFlag, heartbeat: float) -> None:
        self.folder, self.here, self.stop = folder, here, stop
        self.hangs = HangWatch([folder.beat(rank) for rank in range(here.size)], heartbeat)
        self.ended_at = math.inf

    def __call__(self) -> None:
        if self.here.is_main:
            self._lead()
        else:
            self._follow()

    def _lead(self) -> None:
        request = self.folder.asked_for()
        self.stop.set = self.stop.set or request == "stop"
        if request == "kill":
            self.folder.update_status(state="stopped", exit=130)
            leave_at_once(130)
        if found := self.hangs.hung():
            first = failure.from_silence(self.folder, *found)
            self.folder.update_status(state="failed", error=first.as_status(), exit=1)
            print(first.message, file=sys.stderr)
            leave_at_once(1)

    def _follow(self) -> None:
        if self.folder.read_status().exit is None:
            self.ended_at = math.inf
        else:
            self.ended_at = min(self.ended_at, time.monotonic())
        if time.monotonic() - self.ended_at > GRACE_SECONDS:
            print("the run has ended on rank 0", file=sys.stderr)
            leave_at_once(1)


def _record(folder: RunFolder, found: failure.Failure) -> None:
    """The first rank to fail says so in status.json; one that only lost it waits for its word, which may never come."""
    if found.consequence:
        time.sleep(2 * WORD_SECONDS)
        found.mend = "a process or a node was lost: see the logs of the others, then resume the run"
    if folder.read_status().error is None:
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
            folder.try_update_status()
            progress.update()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.update()
