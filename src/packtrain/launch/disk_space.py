"""Whether the disk can hold what a run will write, and takes it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from packtrain.config import Recipe
from packtrain.config.facts import ModelFacts
from packtrain.config.rule import Finding
from packtrain.data.cache import data_root
from packtrain.plan.disk import disk


def disk_shortage(recipe: Recipe, model: ModelFacts) -> Finding | None:
    """What a resolved recipe's run will write must fit, less what it has written already."""
    plan = disk(recipe, model)
    output = Path(recipe.output.folder).expanduser().absolute()
    written = sum(path.stat().st_size for path in (output / recipe.output.name).rglob("*") if path.is_file())
    there = existing(output)
    needed, free = plan.total - written, shutil.disk_usage(there).free
    if needed <= free:
        return None
    checkpoints = f"{plan.checkpoints} checkpoints of {size(plan.checkpoint)}, a model of {size(plan.final)}, logs"
    what = f"{there} has {size(free)} free, and the run will write {size(needed)} there ({checkpoints})"
    mend = "free some space, lower checkpoint.keep or give another folder"
    return Finding("disk", "output.folder", "error", what, mend)


def unwritable(recipe: Recipe) -> Finding | None:
    """A folder of the run, its own or that of its tokenised data, that cannot be made."""
    folders = {"output.folder": Path(recipe.output.folder).expanduser(), "data.cache": data_root(recipe.data.cache)}
    for setting, folder in folders.items():
        there = existing(folder.absolute())
        fault = None if there.is_dir() else "is a file" if there.is_file() else "is no folder"
        if fault is None and not os.access(there, os.W_OK | os.X_OK):
            fault = "cannot be written to"
        if fault:
            return Finding("folder", setting, "error", f"{there} {fault}", "give a folder you may write to")
    return None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def size(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
