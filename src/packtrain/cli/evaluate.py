"""``packtrain eval``: what a run learned, or what a model can do on a recipe's held-out rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packtrain.config import Recipe, load_recipe
from packtrain.errors import UserError
from packtrain.evaluate.report import eval_rows, score
from packtrain.launch.registry import find_run
from packtrain.models.locate import model_folder


def run_eval(target: str, overrides: Sequence[str], as_json: bool) -> int:
    """Score a finished run (and, beside it, the model it started from) on the run's evaluation rows.

    Args:
        target: a run's name or folder.
        overrides: settings in place of the run's recipe, e.g. ``evaluate.rouge_rows=100`` or ``data.eval=[FILE]``.
    """
    folder = find_run(target, "runs")
    recipe = load_recipe(folder.recipe, overrides)
    if not folder.final.is_dir():
        raise UserError(folder.name, "has no final/ yet", f"finish it with `packtrain runs resume {folder.name}`")
    base = model_folder(recipe.model.path)
    results = {"base": _score(recipe, base, base), "trained": _score(recipe, folder.final, base)}
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        _show(folder.name, results)
    return 0


def _score(recipe: Recipe, folder: Path, base: Path) -> dict[str, Any]:
    rows = eval_rows(recipe, base)
    if rows is None:
        raise UserError("data.eval", "holds nothing out", "give data.eval=[FILE] on the command line")
    found = score(
        folder, rows, base, limit=recipe.evaluate.rouge_rows, precision=recipe.train.precision,
        device=recipe.launch.device, with_loss=True,
    )  # fmt: skip
    assert found.loss is not None
    return {"loss": found.loss, "perplexity": math.exp(found.loss), **found.rouge, "rows": len(found.answers)}


def _show(name: str, results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = results["trained"]["rows"]
    table = Table(title=f"{name}: loss on all held-out rows, ROUGE (F1, percent) on {rows}")
    table.add_column("")
    for column in ("loss", "perplexity", "rouge1", "rouge2", "rougeL"):
        table.add_column(column, justify="right")
    for label, values in results.items():
        numbers = [
            f"{values['loss']:.4f}",
            f"{values['perplexity']:.2f}",
            *(f"{values[k]:.1f}" for k in ("rouge1", "rouge2", "rougeL")),
        ]
        table.add_row(label, *numbers)
    Console().print(table)
