"""Whether the disk of a run folder can hold what the run will write."""

from __future__ import annotations

import shutil
from pathlib import Path

from packtrain.config import Recipe
from packtrain.config.facts import ModelFacts
from packtrain.config.rule import Finding
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


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def size(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
