"""``packtrain export``: a run's adapter merged into its base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.config import Recipe, load_recipe
from packtrain.errors import UserError
from packtrain.launch.facts import visible_gpus
from packtrain.launch.registry import find_run
from packtrain.models.locate import model_folder

if TYPE_CHECKING:
    from packtrain.export.gap import Gap

_ROWS, _LENGTH = 8, 512  # of data that the two models are compared on


def run_export(target: str, to: str | None, compare: bool, as_json: bool, runs_folder: str = "runs") -> int:
    """Merge the adapter of a finished run and say how far the merged model is from the trained one.

    Args:
        target: a run's name or folder.
        to: the folder to write; None: ``merged/`` in the run folder.
        compare: load both models and compare their logits.
    """
    from packtrain.export.merge import merge

    folder = find_run(target, runs_folder)
    recipe = load_recipe(folder.recipe)
    if not folder.final.is_dir():
        raise UserError(folder.name, "has no final/ yet", f"finish it with `packtrain runs resume {folder.name}`")
    if not recipe.method.is_lora:
        what = f"was trained by method {recipe.method.type}, which has nothing to merge"
        raise UserError(folder.name, what, f"use {folder.final} as it is")
    base = model_folder(recipe.model.path)
    place = Path(to).expanduser() if to else folder.path / "merged"
    if to and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError("--to", f"{place} exists already", "name a folder that does not")
    count = merge(recipe, folder.final, base, place)
    gap = _gap(recipe, folder.path, base, place) if compare else None
    if as_json:
        print(json.dumps({"folder": str(place), "changed": count, "gap": vars(gap) if gap else None}, indent=2))
    else:
        print(f"merged {count} weights into {place}" + (f"; {gap}" if gap else ""))
    return 0


def _gap(recipe: Recipe, run: Path, base: Path, merged: Path) -> Gap:
    from packtrain.data import prepare_data
    from packtrain.export.gap import first_rows, logit_gap
    from packtrain.parallel.world import join, leave

    assert isinstance(recipe.data.max_length, int), "a run's recipe is resolved"
    data = prepare_data(
        recipe.data, base, recipe.data.max_length, recipe.train.seed, add_tokens=recipe.model.add_tokens
    )  # fmt: skip
    rows = first_rows(data.eval or data.train, _ROWS, _LENGTH)
    trained_here = recipe.launch.device == "cpu" or visible_gpus() > 0
    world = join(recipe.launch.device if trained_here else "cpu", 60)
    try:
        return logit_gap(recipe, run, base, merged, world, rows)
    finally:
        leave()
