"""``packtrain demo``: the main job on what ships with it."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from packtrain.config import Recipe, load_recipe
from packtrain.evaluate.report import Scores, eval_rows, score
from packtrain.launch.prepare import named
from packtrain.launch.resolve_recipe import resolve
from packtrain.launch.start import start
from packtrain.models.locate import model_folder

_SHOWN = 3


def run_demo() -> int:
    """Summaries before, two processes of LoRA under FSDP2, summaries after. Returns the exit status."""
    console = Console()
    console.print(
        "[bold]Packtrain demo[/]: SmolLM2-135M learns to summarise messenger dialogues, in minutes, on two cores.\n"
    )
    with as_file(files("packtrain") / "recipes" / "demo.yaml") as path:
        asked = named(load_recipe(path), path)
        recipe, _ = resolve(asked)
        name = f"output.name={recipe.output.name}"
        base = model_folder(recipe.model.path)
        before = _score(console, "before", base, recipe, base)
        status = start(path, [name])
    if status != 0:
        return status
    run = Path(recipe.output.folder) / recipe.output.name
    after = _score(console, "after", run / "final", recipe, base)
    _show(console, before, after)
    console.print(f"\nThe run: {run}. Its recipe.yaml is a good start for your own: packtrain train RECIPE.yaml")
    return 0


def _score(console: Console, label: str, folder: Path, recipe: Recipe, base: Path) -> Scores:
    rows = eval_rows(recipe, base)
    assert rows is not None
    limit = min(recipe.evaluate.rouge_rows, len(rows))
    columns = (TextColumn(f"summaries {label}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not console.is_terminal:
        console.print(f"writing {limit} summaries, {label} training ...")
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=limit)
        return score(recipe, folder, rows, base, limit=limit, progress=lambda done: bar.update(task, completed=done))


def _show(console: Console, before: Scores, after: Scores) -> None:
    examples = Table(title="Dialogues it has not seen", show_lines=True)
    for column in ("wanted", "before", "after"):
        examples.add_column(column, ratio=1)
    for old, new in list(zip(before.answers, after.answers, strict=True))[:_SHOWN]:
        examples.add_row(old.wanted, old.written, new.written)
    console.print(examples)
    scores = Table(title=f"ROUGE (F1, percent) on {len(after.answers)} dialogues")
    scores.add_column("")
    for name in after.rouge:
        scores.add_column(name, justify="right")
    for label, found in (("before", before), ("after", after)):
        scores.add_row(label, *(f"{value:.1f}" for value in found.rouge.values()))
    console.print(scores)
