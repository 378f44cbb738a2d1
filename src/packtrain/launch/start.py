"""``packtrain train`` and ``packtrain runs resume``: from a recipe to a supervised run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from packtrain.config import Recipe, load_recipe
from packtrain.config.adopt import adopt
from packtrain.config.difference import difference
from packtrain.errors import UserError, listed
from packtrain.launch import group
from packtrain.launch.facts import num_processes
from packtrain.launch.folder import LOST_AFTER_SECONDS, RunFolder
from packtrain.launch.fork import adopt_checkpoint, chosen, forked_recipe, refuse_what_does_not_fit, rewind
from packtrain.launch.lead import lead, lead_detached, report
from packtrain.launch.prepare import create, named, prepare, write_recipe
from packtrain.launch.registry import find_run
from packtrain.launch.resolve_recipe import resolve

RESUMABLE = ("launch.processes", "launch.gpus")
"""What may change between two parts of one run."""
TAKE_OVER_SECONDS = LOST_AFTER_SECONDS + 15.0
"""How long `train --resume` waits for a run's last leader, on another host, to be given up."""


def start(recipe_path: str | Path, overrides: Sequence[str] = (), detach: bool = False, again: bool = False) -> int:
    """Train a recipe to its end and return the exit status. Under torchrun or srun, join their group.

    Args:
        detach: return once the run has a supervisor of its own.
        again: continue the run of this name if it exists: what a batch job says that may be started anew.
    """
    asked = adopted(load_recipe(recipe_path, overrides))
    if again and (begun := _begun(asked)):
        return _continue(begun, asked, detach)
    recipe = resolved(named(asked, recipe_path))
    if group.in_group():
        return _join(recipe, lambda: create(recipe, asked))
    RunFolder.unused(recipe.output.folder, recipe.output.name)  # before the data's minutes, not after
    prepare(recipe)
    return begin(create(recipe, asked), recipe, detach)


def resume(
    name_or_path: str,
    overrides: Sequence[str] = (),
    output_folder: str | Path = "runs",
    step: int | None = None,
    detach: bool = False,
) -> int:
    """Continue a run from its newest whole checkpoint, or from that of ``step``, and return the exit status."""
    folder = find_run(name_or_path, output_folder)
    if cwd := folder.read_status().cwd:
        os.chdir(cwd)  # relative paths in its recipe mean what they meant at the start
    joined = group.in_group()
    if not joined:
        _refuse_unless_ended(folder)
    recipe = _resumed_recipe(folder, overrides)
    if joined:
        return _join(recipe, lambda: _reopen(folder, recipe, step))
    prepare(recipe)
    return begin(_reopen(folder, recipe, step), recipe, detach)


def fork(
    name_or_path: str,
    overrides: Sequence[str] = (),
    output_folder: str | Path = "runs",
    name: str | None = None,
    step: int | None = None,
    scratch: bool = False,
    detach: bool = False,
) -> int:
    """Start a new run from a run's checkpoint with some settings changed; what differs is shown.

    Args:
        name: of the new run; None: the parent's with ``-fork``.
        step: the checkpoint; None: the newest that verifies.
        scratch: begin at step 0, from the base model.
    """
    parent = find_run(name_or_path, output_folder)
    if cwd := parent.read_status().cwd:
        os.chdir(cwd)
    if group.in_group():
        raise UserError("runs fork", "does not work under torchrun or srun", "fork with plain `packtrain runs fork`")
    checkpoint = None if scratch else chosen(parent, step)
    asked = forked_recipe(parent, overrides, name)
    changes = difference([load_recipe(parent.asked), asked])
    if checkpoint is not None:
        refuse_what_does_not_fit(checkpoint, changes)
    recipe = resolved(asked)
    RunFolder.unused(recipe.output.folder, recipe.output.name)
    prepare(recipe)
    folder = create(recipe, asked)
    origin = f"{parent.name} at {checkpoint.name}" if checkpoint else f"{parent.name}'s recipe, from step 0"
    if checkpoint is not None:
        adopt_checkpoint(folder, checkpoint)
    folder.update_status(parent=origin)
    print(f"fork of {origin}")
    for setting in changes:
        print(f"  {setting.change}")
    return begin(folder, recipe, detach)


def begin(folder: RunFolder, recipe: Recipe, detach: bool) -> int:
    """Lead a run whose folder is ready; the exit status."""
    if detach:
        lead_detached(folder)
        return 0
    return report(folder, lead(folder, recipe))


def _begun(asked: Recipe) -> RunFolder | None:
    """The run that the recipe names, if it exists."""
    if asked.output.name == "auto":
        raise UserError("--resume", "the recipe names no run", "give output.name=NAME")
    folder = RunFolder(Path(asked.output.folder).expanduser().absolute() / asked.output.name)
    return folder if folder.status.exists() else None


def _continue(folder: RunFolder, asked: Recipe, detach: bool) -> int:
    """Go on with a run whose last leader is gone, or will be given up soon; nothing to do where it is done."""
    deadline = time.monotonic() + TAKE_OVER_SECONDS
    if _led_by_another(folder) and not folder.led_here() and not group.quiet_rank():
        print(f"run {folder.name}: waiting until its leader on another host is given up", flush=True)
    while _led_by_another(folder) and not folder.led_here() and time.monotonic() < deadline:
        time.sleep(1.0)
    if folder.read_status().state == "done":
        if not group.quiet_rank():
            print(f"run {folder.name} in {folder.path} is done already")
        return 0
    changes = difference([load_recipe(folder.asked), asked])
    ignored = [setting.key for setting in changes if setting.key.partition(".")[0] not in ("launch", "output")]
    if ignored and not group.quiet_rank():
        what = f"the run goes on with its own recipe; what has changed since is left out: {', '.join(ignored)}"
        print(f"packtrain: warning: {what}", file=sys.stderr)
    return resume(str(folder.path), detach=detach)


def _led_by_another(folder: RunFolder) -> bool:
    """Whether somebody seems to lead the run who is not this batch job's own earlier start."""
    status = folder.read_status()
    return folder.alive(status) and not group.succeeds(status.group)


def _refuse_unless_ended(folder: RunFolder) -> None:
    status = folder.read_status()
    if _led_by_another(folder):
        mend = f"watch it with `packtrain runs show {folder.name}`"
        raise UserError(folder.name, "is running already", mend)
    if status.state == "done":
        raise UserError(folder.name, "is done", "start a new run to train further")


def _resumed_recipe(folder: RunFolder, overrides: Sequence[str]) -> Recipe:
    """The recipe as resolved at the start; resolved again where the number of processes is another."""
    for word in overrides:
        if word.partition("=")[0] not in RESUMABLE:
            mend = f"only {listed(RESUMABLE)} may; for anything else `packtrain runs fork {folder.name} {word}`"
            raise UserError(word, f"cannot change in the middle of {folder.name}", mend)
    before = load_recipe(folder.recipe)
    if not overrides and group.size() in (None, before.launch.processes):
        return before
    asked = load_recipe(folder.asked, overrides)
    asked.output.name = folder.name
    if before.parallel.strategy == "deepspeed":  # what a checkpoint holds differs by the stage
        asked.parallel.zero_stage = before.parallel.zero_stage
    return resolved(asked)


def _reopen(folder: RunFolder, recipe: Recipe, step: int | None) -> RunFolder:
    _refuse_unless_ended(folder)
    if step is not None:
        rewind(folder, step)
    write_recipe(folder, recipe)
    return folder


def adopted(recipe: Recipe, processes: int | None = None) -> Recipe:
    """With what its DeepSpeed JSON says moved into the recipe: the file may be gone when the run is resumed."""
    if recipe.parallel.deepspeed_config is None:
        return recipe  # without looking for GPUs
    return adopt(recipe, processes or group.size() or num_processes(recipe))


def resolved(asked: Recipe) -> Recipe:
    """The recipe without `auto`; what is unwise about it is said on stderr."""
    recipe, warnings = resolve(asked, group.size())
    if not group.quiet_rank():
        for warning in warnings:
            print(f"packtrain: warning: {warning}", file=sys.stderr)
    return recipe


def _join(recipe: Recipe, open_folder: Callable[[], RunFolder]) -> int:
    from packtrain.launch.join import join_group

    group.adopt(os.environ)
    return join_group(recipe, open_folder).exit
