"""ROUGE of a finished run, where its recipe asks for it: on final/, as its users will load it."""

from __future__ import annotations

from packtrain.config import Recipe
from packtrain.launch.folder import RunFolder


def score_final(folder: RunFolder, recipe: Recipe) -> None:
    """Generate answers to the evaluation rows and append a ``rouge`` event to the run."""
    if "rouge" not in recipe.evaluate.metrics:
        return
    from packtrain.evaluate.report import eval_rows, score
    from packtrain.metrics.events import EventLog
    from packtrain.models.locate import model_folder

    base = model_folder(recipe.model.path)
    rows = eval_rows(recipe, base)
    if rows is None:
        return
    limit = min(recipe.evaluate.rouge_rows, len(rows))
    found = score(recipe, folder.final, rows, base, limit=limit)
    log = EventLog(folder.events)
    log.write("rouge", rows=limit, **found.rouge)
    log.close()
