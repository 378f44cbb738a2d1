"""One rank of a run: ``python -m packtrain.launch.worker RUN_FOLDER``, started by the supervisor."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from packtrain.launch import failure
from packtrain.launch.folder import RunFolder
from packtrain.launch.process import StopFlag, die_with_supervisor, leave_at_once

if TYPE_CHECKING:
    from packtrain.config import Recipe
    from packtrain.parallel.world import World


def main(run_folder: str) -> None:
    """Train as the rank that the environment names; never returns."""
    die_with_supervisor()
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


def train(folder: RunFolder, recipe: Recipe, world: World, stop: StopFlag) -> str:
    """Train in this process; rank 0 keeps the state in status.json. Returns ``done`` or ``stopped``."""
    from packtrain.launch import job

    if world.rank == 0:
        folder.update_status(state="running")
    state = "done" if job.run(folder.path, recipe, world, stop) else "stopped"
    if world.rank == 0:
        folder.update_status(state=state)
    return state


def raise_at_once(folder: RunFolder, error: BaseException) -> NoReturn:
    """Write the failure down and leave without a word to the process group, which may hang."""
    rank = int(os.environ["RANK"])
    found = failure.describe(error, rank)
    failure.record(folder, found)
    print(found.message if found.kind == "user" else found.traceback, file=sys.stderr)
    leave_at_once(2 if found.kind == "user" else 1)


if __name__ == "__main__":
    main(sys.argv[1])
