"""``packtrain data RECIPE.yaml``: what the data is, before anything is trained on it."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.config import Recipe, load_recipe
from packtrain.config.resolve import auto_max_length

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from packtrain.data import DataReport, PreparedData, TokenStore
    from packtrain.data.report import DatasetReport, LengthReport

DROPPED_SHOWN = 10


def show_data(recipe_path: str, overrides: Sequence[str], rows: int = 3, json: bool = False) -> None:
    """Prepare a recipe's data and print what became of it.

    Args:
        rows: how many rows to print with their label mask.
        json: print the report for a program instead.

    Raises:
        UserError: the recipe or its data is at fault.
    """
    from rich.console import Console

    from packtrain.data import load_tokenizer, prepare_data
    from packtrain.models.locate import model_folder

    recipe = load_recipe(recipe_path, overrides)
    folder = model_folder(recipe.model.path)
    added = recipe.model.add_tokens
    length, seed = _max_length(recipe, folder), recipe.train.seed
    prepared = prepare_data(recipe.data, folder, length, seed, add_tokens=added)
    if json:
        print(json_module.dumps(prepared.report.to_json(), indent=2))
        return
    console = Console(highlight=False)
    print_report(console, prepared.report)
    _print_rows(console, prepared, load_tokenizer(folder, added), rows)


def print_report(console: Console, report: DataReport) -> None:
    """Tables of the data sets and lengths, then the dropped rows and the warnings."""
    console.print(_datasets_table(report))
    console.print(_lengths_table(report))
    for dataset in report.datasets:
        for line in _dropped(dataset):
            console.print(line, markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _max_length(recipe: Recipe, folder: Path) -> int:
    from packtrain.models.model_config import read_model_config

    if recipe.data.max_length != "auto":
        return int(recipe.data.max_length)
    return auto_max_length(read_model_config(folder / "config.json").max_position_embeddings)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*[value if isinstance(value, str) else f"{value:,}" for value in row])
    return table


def _datasets_table(report: DataReport) -> Any:
    columns = ["data set", "for", "read", "kept", "dropped", "cut", "split", "tokens cut"]
    rows = [
        [d.name, d.part, d.read, d.kept, d.num_dropped, d.truncated, d.split, d.tokens_cut] for d in report.datasets
    ]
    return _table(f"Rows (max_length {report.max_length})", columns, rows)


def _lengths_table(report: DataReport) -> Any:
    parts = {name: part for name, part in (("train", report.train), ("eval", report.eval)) if part}
    cells = [_length_cells(part) for part in parts.values()]
    rows = [[name, *(column[name] for column in cells)] for name in cells[0]]
    return _table("Lengths", ["", *parts], rows)


def _length_cells(part: LengthReport) -> dict[str, object]:
    return {
        **{f"tokens a row, {name}": value for name, value in part.percentiles.items()},
        "rows": part.rows,
        "tokens": part.tokens,
        "tokens learned": f"{part.labelled:.1%}",
        "sequences": part.sequences,
        "filled (packing efficiency)": f"{part.efficiency:.1%}",
    }


def _dropped(dataset: DatasetReport) -> Iterator[str]:
    if not dataset.num_dropped:
        return
    yield f"{dataset.name}: {dataset.num_dropped} of {dataset.read} rows dropped"
    for where, reason in dataset.dropped[:DROPPED_SHOWN]:
        yield f"  {where}: {reason}"
    if dataset.num_dropped > DROPPED_SHOWN:
        yield f"  and {dataset.num_dropped - DROPPED_SHOWN} more (--json lists 1,000). All by reason:"
        yield from (f"  {count} x {reason}" for reason, count in dataset.reasons.items())


def _print_rows(console: Console, prepared: PreparedData, tokenizer: Any, count: int) -> None:
    if count:
        console.print("\nRows: what is between ⟦ and ⟧ is learned", style="bold")
    for row in range(min(count, len(prepared.train))):
        console.print(f"\n{prepared.train.where(row)}", style="cyan", markup=False)
        console.print(masked_text(prepared.train, row, tokenizer))


def masked_text(store: TokenStore, row: int, tokenizer: Any) -> Text:
    """A row's text with its learned stretches in green and in brackets, the rest dim."""
    from rich.text import Text

    text = Text()
    pairs = zip(store.tokens(row).tolist(), store.labelled(row).tolist(), strict=True)
    for labelled, run in groupby(pairs, key=lambda pair: pair[1]):
        part = tokenizer.decode([token for token, _ in run])
        text.append(f"⟦{part}⟧" if labelled else part, style="green" if labelled else "dim")
    return text
