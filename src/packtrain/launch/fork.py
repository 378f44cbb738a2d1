"""Going back to an older checkpoint of a run, and forking a run: a new one that starts from its checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from packtrain.checkpoint.folders import faults, newest, whole
from packtrain.config import Recipe, load_recipe
from packtrain.config.difference import Setting
from packtrain.errors import UserError, listed
from packtrain.launch.folder import RunFolder

_STANDS_ON = {"model", "data", "method", "train.optimizer", "train.master_weights", "train.rounding"}
"""Sections and settings that decide what a checkpoint holds, or which rows its step comes to next."""
_FREE = {"data.workers", "data.cache", "data.packing", "method.dropout", "method.alpha", "method.lora_plus"}


def rewind(folder: RunFolder, step: int) -> None:
    """Make the checkpoint of ``step`` the newest: later ones are set aside under another name, not deleted."""
    chosen(folder, step)
    for later, path in whole(folder.checkpoints).items():
        if later > step:
            os.rename(path, _unused(path.with_name(f"{path.name}.aside")))


def chosen(folder: RunFolder, step: int | None) -> Path | None:
    """The checkpoint of ``step``, or the newest that verifies; None where the run has none yet.

    Raises:
        UserError: there is none of that step, or it is damaged.
    """
    if step is None:
        return newest(folder.checkpoints)[0]
    there = whole(folder.checkpoints)
    if step not in there:
        mend = f"choose from {listed(map(str, there))}" if there else "leave --step out: it starts anew"
        raise UserError(f"--step {step}", f"{folder.name} has no checkpoint of that step", mend)
    if fault := faults(there[step]):
        raise UserError(f"--step {step}", fault, "choose another one, or leave --step out")
    return there[step]


def forked_recipe(parent: RunFolder, overrides: Sequence[str], name: str | None) -> Recipe:
    """The parent's recipe as it was asked for, with what is to be changed and a name of its own."""
    if name == "":
        raise UserError("--name", "is empty", "give a name")
    named = [] if name is None else [f"output.name={name}"]
    asked = load_recipe(parent.asked, [*overrides, *named])
    if not any(word.startswith("output.name=") for word in (*overrides, *named)):
        output = Path(asked.output.folder).expanduser().absolute()
        asked.output.name = _unused(output / f"{parent.name[:90]}-fork").name
    return asked


def refuse_what_does_not_fit(checkpoint: Path, changes: Sequence[Setting]) -> None:
    """Raises UserError where a setting is changed that decides what a checkpoint holds, or its place in the data."""
    for setting in changes:
        section = setting.key.partition(".")[0]
        if setting.key in _STANDS_ON or (section in _STANDS_ON and setting.key not in _FREE):
            what = f"{' -> '.join(setting.shown)} does not fit {checkpoint.name}, which was trained with the former"
            raise UserError(setting.key, what, "leave it, or fork with --scratch, from step 0")


def adopt_checkpoint(folder: RunFolder, checkpoint: Path) -> None:
    """Give a new run a checkpoint of another one: whole or not at all, and by links where the disk has them."""
    target = folder.checkpoints / checkpoint.name
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.copytree(checkpoint, temporary, copy_function=_link_or_copy)
    os.rename(temporary, target)


def _link_or_copy(source: str, target: str) -> None:
    """Files of a checkpoint are never written to again, so two runs may share them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _unused(path: Path) -> Path:
    """``path``, or it with the first number that makes it new."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
