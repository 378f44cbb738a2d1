"""``packtrain eval``: what a run learned, or what a model can do on a recipe's held-out rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packtrain.config import Recipe, load_recipe
from packtrain.data.store import TokenStore
from packtrain.errors import UserError
from packtrain.evaluate.report import eval_rows, score
from packtrain.launch.registry import find_run
from packtrain.models.locate import model_folder


def run_eval(
    target: str, overrides: Sequence[str], as_json: bool, with_loss: bool = True, runs_folder: str = "runs"
) -> int:
    """Score a finished run, and beside it the model it started from, on the run's evaluation rows.

    Args:
        target: a run's name or folder.
        overrides: settings in place of the run's recipe, e.g. ``evaluate.rouge_rows=100`` or ``data.eval=[FILE]``.
    """
    folder = find_run(target, runs_folder)
    recipe = load_recipe(folder.recipe, overrides)
    if not folder.final.is_dir():
        raise UserError(folder.name, "has no final/ yet", f"finish it with `packtrain runs resume {folder.name}`")
    base = model_folder(recipe.model.path)
    rows = eval_rows(recipe, base)
    if rows is None:
        raise UserError("data.eval", "holds nothing out", "give data.eval=[FILE] on the command line")
    models = {"base": base, "trained": folder.final}
    results = {label: _score(recipe, model, base, rows, with_loss) for label, model in models.items()}
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        _show(folder.name, results)
    return 0


def _score(recipe: Recipe, model: Path, base: Path, rows: TokenStore, with_loss: bool) -> dict[str, Any]:
    found = score(recipe, model, rows, base, limit=recipe.evaluate.rouge_rows, with_loss=with_loss)
    values: dict[str, Any] = {} if found.loss is None else {"loss": found.loss, "perplexity": math.exp(found.loss)}
    return {**values, **found.rouge, "rows": len(found.answers)}


def _show(name: str, results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = [key for key in results["trained"] if key != "rows"]
    table = Table(title=f"{name}: ROUGE (F1, percent) on {results['trained']['rows']} held-out rows, loss on all")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for label, values in results.items():
        table.add_row(label, *(f"{values[c]:.1f}" if c.startswith("rouge") else f"{values[c]:.4f}" for c in columns))
    Console().print(table)
