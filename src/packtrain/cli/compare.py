"""``packtrain runs compare``: loss curves of several runs, their numbers, and the settings that differ."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from packtrain.config import Recipe, load_recipe
from packtrain.config.difference import Setting, difference
from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder, refuse_other_than_file
from packtrain.launch.registry import find_run, summarise
from packtrain.metrics.compare import COLORS, RunCurves, draw_comparison
from packtrain.metrics.curve import running_mean
from packtrain.metrics.events import latest
from packtrain.metrics.reader import read_events

if TYPE_CHECKING:
    from rich.console import Console

_CHART_HEIGHT, _PLAIN_WIDTH, _MOST = 18, 80, len(ascii_uppercase)


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs. ``recipe`` is None where it cannot be read."""

    letter: str
    name: str
    folder: RunFolder
    curves: RunCurves
    numbers: dict[str, Any]
    recipe: Recipe | None


def run_compare(names: Sequence[str], png: str | None, as_json: bool, runs_folder: str = "runs") -> None:
    """Print the comparison, and draw it where a file is given.

    Raises:
        UserError: there is no such run, there are not two, or the picture cannot be written.
    """
    runs = [_compared(letter, name, folder) for letter, name, folder in _found(names, runs_folder)]
    settings = _differing(runs)
    if png is not None:
        _draw(runs, Path(png).expanduser())
    if as_json:
        numbers = [{"name": run.name, "path": str(run.folder.path), **run.numbers} for run in runs]
        values = [{"key": setting.key, "values": list(setting.values)} for setting in settings]
        print(json.dumps({"runs": numbers, "settings": values, "png": png}, indent=2, ensure_ascii=False))
    else:
        _print(runs, settings)
        if png:
            print(f"curves: {png}")


def _found(names: Sequence[str], runs_folder: str) -> list[tuple[str, str, RunFolder]]:
    """Letter, name and folder of each run; by their paths where two have the same name."""
    folders = [find_run(name, runs_folder) for name in names]
    paths = [folder.path.resolve() for folder in folders]
    if twice := next((name for name, path in zip(names, paths, strict=True) if paths.count(path) > 1), None):
        raise UserError(twice, "is given twice", "name each run once")
    if not 2 <= len(folders) <= _MOST:
        what = f"{len(folders)} run" + "s" * (len(folders) != 1)
        raise UserError("runs compare", what, f"name 2 to {_MOST} runs; see `packtrain runs`")
    called = [folder.name for folder in folders]
    labels = called if len(set(called)) == len(called) else [str(folder.path) for folder in folders]
    return list(zip(ascii_uppercase, labels, folders, strict=False))


def _compared(letter: str, name: str, folder: RunFolder) -> ComparedRun:
    events, recipe = read_events(folder.events), None
    try:
        recipe = load_recipe(folder.recipe)
    except UserError as error:
        print(f"packtrain: warning: {error}", file=sys.stderr)
    curves = RunCurves.of(f"{letter}  {name}", events)
    return ComparedRun(letter, name, folder, curves, _numbers(folder, events, recipe), recipe)


def _numbers(folder: RunFolder, events: list[dict[str, Any]], recipe: Recipe | None) -> dict[str, Any]:
    """What the table shows of a run. A loss that is no number stays the text that it is in events.jsonl."""
    summary, steps, evals = summarise(folder), latest(events, "step"), latest(events, "eval")
    start: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "start"), {})
    finite = [event for event in evals if math.isfinite(float(event["loss"]))]
    best = min(finite, key=lambda event: float(event["loss"]), default={})
    speeds = [event["tokens_per_second"] for event in steps if "tokens_per_second" in event]
    return {
        "state": summary.state,
        "step": steps[-1]["step"] if steps else None,
        "total_steps": start.get("total_steps"),
        "train_loss": steps[-1]["loss"] if steps else None,
        "best_eval_loss": best.get("loss"),
        "best_eval_step": best.get("step"),
        "eval_loss": evals[-1]["loss"] if evals else None,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "processes": start.get("world_size"),
        "strategy": start.get("strategy") or (recipe.parallel.strategy if recipe else None),
        "precision": start.get("precision") or (recipe.train.precision if recipe else None),
    }


def _differing(runs: Sequence[ComparedRun]) -> list[Setting]:
    """The settings that differ; None for a run without a recipe."""
    found = difference([run.recipe for run in runs if run.recipe])
    spread = []
    for setting in found:
        values = iter(setting.values)
        spread.append(Setting(setting.key, tuple(next(values) if run.recipe else None for run in runs)))
    return spread


def _draw(runs: Sequence[ComparedRun], file: Path) -> None:
    refuse_other_than_file("--png", file)
    try:
        draw_comparison([run.curves for run in runs], file)
    except OSError as error:
        raise UserError("--png", f"{file} cannot be written ({error.strerror})", "give another file") from error


def _print(runs: Sequence[ComparedRun], settings: Sequence[Setting]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        _print_to(console, console.width, runs, settings)
        return
    console = Console(markup=False, highlight=False, width=sys.maxsize)  # what reads a pipe wants whole lines
    with console.capture() as captured:
        _print_to(console, _PLAIN_WIDTH, runs, settings)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print_to(console: Console, width: int, runs: Sequence[ComparedRun], settings: Sequence[Setting]) -> None:
    from rich.text import Text

    chart = _chart(runs, width, colored=console.color_system is not None)
    if chart and console.encoding.startswith("utf"):
        console.print(Text.from_ansi(chart))
    for number, run in enumerate(runs):
        console.print(Text.assemble((run.letter, _style(number)), f"  {run.name}"))
    _print_table(console, runs, "Numbers", _number_rows(runs))
    if settings:
        _print_table(console, runs, "Settings that differ", _setting_rows(runs, settings))
    elif all(run.recipe for run in runs):
        console.print("All settings are the same.")


def _print_table(console: Console, runs: Sequence[ComparedRun], title: str, rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for number, run in enumerate(runs):
        table.add_column(run.letter, overflow="fold", header_style=_style(number))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _number_rows(runs: Sequence[ComparedRun]) -> list[list[str]]:
    columns = [_cells(run.numbers) for run in runs]
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def _setting_rows(runs: Sequence[ComparedRun], settings: Sequence[Setting]) -> list[list[str]]:
    readable = [run.recipe is not None for run in runs]
    return [
        [setting.key, *(value if known else "?" for value, known in zip(setting.shown, readable, strict=True))]
        for setting in settings
    ]


def _cells(numbers: dict[str, Any]) -> dict[str, str]:
    step, speed, best = numbers["step"], numbers["tokens_per_second"], _loss(numbers["best_eval_loss"])
    return {
        "state": numbers["state"],
        "steps": "-" if step is None else f"{step}/{numbers['total_steps'] or '?'}",
        "last training loss": _loss(numbers["train_loss"]),
        "best eval loss": best if numbers["best_eval_step"] is None else f"{best} (step {numbers['best_eval_step']})",
        "last eval loss": _loss(numbers["eval_loss"]),
        "tokens/s (median)": "-" if speed is None else f"{speed:,.0f}",
        "processes": str(numbers["processes"] or "-"),
        "strategy": numbers["strategy"] or "-",
        "precision": numbers["precision"] or "-",
    }


def _loss(value: float | str | None) -> str:
    return "-" if value is None else f"{float(value):.4f}"


def _style(number: int) -> str:
    return f"bold {COLORS[number % len(COLORS)]}"


def _chart(runs: Sequence[ComparedRun], width: int, colored: bool) -> str:
    """The running means of the training losses as text; empty where no run has one. Without colours, by letters."""
    import plotext

    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(max(width, 40), _CHART_HEIGHT)
    plotext.theme("clear")
    last = 0
    for number, run in enumerate(runs):
        mean = running_mean(run.curves.train.values)
        points = [(int(x), float(y)) for x, y in zip(run.curves.train.steps, mean, strict=True) if math.isfinite(y)]
        if points:
            look = {"marker": "braille", "color": _rgb(number)} if colored else {"marker": run.letter}
            plotext.plot(*zip(*points, strict=True), **look)
            last = max(last, points[-1][0])
    if not last:
        return ""
    plotext.title("training loss, running mean")
    plotext.xlabel("optimizer step")
    plotext.xticks(sorted({max(1, round(last * part / 4)) for part in range(5)}))
    text = str(plotext.build())
    return text if colored else str(plotext.uncolorize(text))


def _rgb(number: int) -> tuple[int, ...]:
    return tuple(bytes.fromhex(COLORS[number % len(COLORS)][1:]))
