"""``packtrain train`` and ``packtrain runs resume``: from a recipe to a supervised run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from packtrain.config import Recipe, load_recipe
from packtrain.config.adopt import adopt
from packtrain.errors import UserError
from packtrain.launch import group, native, summary
from packtrain.launch.facts import num_processes
from packtrain.launch.folder import RunFolder
from packtrain.launch.prepare import create, named, prepare, write_recipe
from packtrain.launch.progress import open_progress
from packtrain.launch.registry import find_run
from packtrain.launch.resolve_recipe import resolve
from packtrain.launch.scores import score_final
from packtrain.launch.supervisor import Outcome, supervise, worker_command
from packtrain.metrics.reader import EventReader

RESUMABLE = ("launch.processes",)
"""What may change between two parts of one run."""


def start(recipe_path: str | Path, overrides: Sequence[str] = ()) -> int:
    """Train a recipe to its end and return the exit status. Under torchrun or srun, join their group."""
    asked = _adopt(load_recipe(recipe_path, overrides))
    recipe = _resolve(named(asked, recipe_path))
    if group.in_group():
        return _join(recipe, lambda: create(recipe, asked))
    RunFolder.unused(recipe.output.folder, recipe.output.name)  # before the data's minutes, not after
    prepare(recipe)
    return _lead(create(recipe, asked), recipe)


def resume(name_or_path: str, overrides: Sequence[str] = (), output_folder: str | Path = "runs") -> int:
    """Continue a run from its newest whole checkpoint and return the exit status."""
    folder = find_run(name_or_path, output_folder)
    if cwd := folder.read_status().cwd:
        os.chdir(cwd)  # relative paths in its recipe mean what they meant at the start
    if group.in_group():
        joined = _resumed_recipe(folder, overrides)
        return _join(joined, lambda: _reopen(folder, joined))
    _refuse_unless_ended(folder)
    recipe = _resumed_recipe(folder, overrides)
    prepare(recipe)
    return _lead(_reopen(folder, recipe), recipe)


def _refuse_unless_ended(folder: RunFolder) -> None:
    status = folder.read_status()
    if folder.alive(status):
        mend = f"watch it with `packtrain runs show {folder.name}`"
        raise UserError(folder.name, "is running already", mend)
    if status.state == "done":
        raise UserError(folder.name, "is done", "start a new run to train further")


def _resumed_recipe(folder: RunFolder, overrides: Sequence[str]) -> Recipe:
    """The recipe as resolved at the start; resolved again where the number of processes is another."""
    for word in overrides:
        if word.partition("=")[0] not in RESUMABLE:
            mend = f"only {RESUMABLE[0]} may change; for anything else start a new run"
            raise UserError(word, f"cannot change in the middle of {folder.name}", mend)
    before = load_recipe(folder.recipe)
    if not overrides and group.size() in (None, before.launch.processes):
        return before
    asked = load_recipe(folder.asked, overrides)
    asked.output.name = folder.name
    if before.parallel.strategy == "deepspeed":  # what a checkpoint holds differs by the stage
        asked.parallel.zero_stage = before.parallel.zero_stage
    return _resolve(asked)


def _reopen(folder: RunFolder, recipe: Recipe) -> RunFolder:
    _refuse_unless_ended(folder)
    write_recipe(folder, recipe)
    return folder


def _adopt(recipe: Recipe) -> Recipe:
    """With what its DeepSpeed JSON says moved into the recipe: the file may be gone when the run is resumed."""
    if recipe.parallel.deepspeed_config is None:
        return recipe  # without looking for GPUs
    return adopt(recipe, group.size() or num_processes(recipe))


def _resolve(asked: Recipe) -> Recipe:
    recipe, warnings = resolve(asked, group.size())
    if not group.quiet_rank():
        for warning in warnings:
            print(f"packtrain: warning: {warning}", file=sys.stderr)
    return recipe


def _join(recipe: Recipe, open_folder: Callable[[], RunFolder]) -> int:
    from packtrain.launch.join import join_group

    group.adopt(os.environ)
    return join_group(recipe, open_folder).exit


def _lead(folder: RunFolder, recipe: Recipe) -> int:
    """Supervise the run with its progress on stdout; the exit status."""
    assert isinstance(recipe.launch.processes, int), "resolve comes first"
    progress = open_progress(EventReader(folder.events, from_end=True))
    progress.line(f"run {folder.name} in {folder.path}")
    try:
        outcome = supervise(folder, worker_command(folder), recipe.launch.processes, watch=progress.update)
        progress.update()
    finally:
        progress.close()
        native.clean(recipe)
    if outcome.state == "done":
        score_final(folder, recipe)
    _report(folder, outcome)
    return outcome.exit


def _report(folder: RunFolder, outcome: Outcome) -> None:
    if outcome.failure is None:
        print("\n".join(summary.ended(folder, outcome.state)), flush=True)
    elif outcome.failure.kind == "user":
        folder.discard_unless_started()
        raise outcome.failure.user_error()
    else:
        print("\n".join(summary.failed(outcome.failure)), file=sys.stderr, flush=True)
