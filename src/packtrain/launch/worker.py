"""One rank of a run: ``python -m packtrain.launch.worker RUN_FOLDER``, started by the supervisor."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from packtrain.launch import failure
from packtrain.launch.folder import RunFolder
from packtrain.launch.out_of_memory import memory_advice
from packtrain.launch.process import DUMP_STACKS, StopFlag, die_with_supervisor, keep_files_private, leave_at_once
from packtrain.launch.pulse import Pulse

if TYPE_CHECKING:
    from packtrain.config import Recipe
    from packtrain.parallel.world import World


def main(run_folder: str) -> None:
    """Train as the rank that the environment names; never returns."""
    die_with_supervisor()
    keep_files_private()
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS)
    stop = StopFlag()
    stop.listen()
    folder = RunFolder(run_folder)
    try:
        work(folder, stop)
    except BaseException as error:  # noqa: BLE001 - the end of a rank: recorded, then it leaves
        raise_at_once(folder, error)
    leave_at_once(0)


def work(folder: RunFolder, stop: StopFlag) -> None:
    """Join the process group, train, leave."""
    from packtrain.config import load_recipe
    from packtrain.config.schema import seconds
    from packtrain.parallel import world

    recipe = load_recipe(folder.recipe)
    here = world.join(recipe.launch.device, seconds(recipe.launch.timeout))
    train(folder, recipe, here, stop)
    world.leave()


def train(
    folder: RunFolder, recipe: Recipe, world: World, stop: StopFlag, each: Sequence[Callable[[], None]] = ()
) -> str:
    """Train in this process; rank 0 keeps the state in status.json. Returns ``done`` or ``stopped``.

    Args:
        each: what this rank also does about once a second, beside training.
    """
    from packtrain.launch import job

    actions = list(each)
    pulse = Pulse(folder.beat(world.rank), actions)
    if world.is_main:
        folder.update_status(state="running")
        actions.append(_StateKeeper(folder, pulse))
    with pulse:
        state = "done" if job.run(folder.path, recipe, world, stop, pulse) else "stopped"
    if world.is_main:
        folder.update_status(state=state)
    return state


class _StateKeeper:
    """Shows in status.json whether the run is ``saving``."""

    def __init__(self, folder: RunFolder, pulse: Pulse) -> None:
        self.folder, self.pulse = folder, pulse
        self.shown = "running"

    def __call__(self) -> None:
        state = "saving" if self.pulse.phase == "saving" else "running"
        if state != self.shown:
            self.folder.try_update_status(state=state)
            self.shown = state


def raise_at_once(folder: RunFolder, error: BaseException) -> NoReturn:
    """Write the failure down and leave without a word to the process group, which may hang."""
    rank = int(os.environ["RANK"])
    found = failure.describe(error, rank)
    if found.kind == "oom":
        found.mend = memory_advice(folder)
    try:
        failure.record(folder, found)
    except OSError as problem:  # a full disk: the log is all there is
        print(f"packtrain: {folder.error(rank)} cannot be written ({problem})", file=sys.stderr)
    print(found.message if found.kind == "user" else found.traceback, file=sys.stderr)
    leave_at_once(2 if found.kind == "user" else 1)


if __name__ == "__main__":
    main(sys.argv[1])
