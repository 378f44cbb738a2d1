"""The steps between a recipe and a run folder that `train`, `resume` and a joined group share."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from packtrain.config import Recipe, dump_recipe
from packtrain.config.deepspeed import engine_config
from packtrain.errors import UserError
from packtrain.launch import group, native
from packtrain.launch.disk_space import disk_shortage, unwritable
from packtrain.launch.facts import gather_facts
from packtrain.launch.folder import RunFolder, write_json, write_text
from packtrain.launch.model_facts import model_facts
from packtrain.launch.secrets import refuse_secrets
from packtrain.models.locate import model_folder
from packtrain.plan.report import plan_resolved


def named(recipe: Recipe, recipe_path: str | Path) -> Recipe:
    """The recipe with a name for its run: ``samsum-20261130-181512`` from samsum.yaml, where it is auto."""
    recipe = recipe.model_copy(deep=True)
    if recipe.output.name == "auto":
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_path).stem).strip("._-")[:70] or "run"
        base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        name, number = base, 1
        while (Path(recipe.output.folder).expanduser() / name).exists():
            number += 1
            name = f"{base}-{number}"
        recipe.output.name = name
    return recipe


def prepare(recipe: Recipe) -> None:
    """Fetch the model if it must be fetched, see that the disk can hold the run, and bring the data into the cache."""
    from packtrain.data import prepare_data

    folder = model_folder(recipe.model.path)
    _refuse_full_disk(recipe, folder)
    assert isinstance(recipe.data.max_length, int), "resolve comes first"
    native.build(recipe)
    shown = _RowCount(sys.stderr)
    length, seed = recipe.data.max_length, recipe.train.seed
    data = prepare_data(recipe.data, folder, length, seed, shown, recipe.model.add_tokens)
    shown.close()
    if not group.quiet_rank():
        for note in data.report.notes():
            print(f"packtrain: data: {note}", file=sys.stderr)
    rows, processes = len(data.train), recipe.launch.processes
    assert isinstance(processes, int), "resolve comes first"
    if rows < processes:
        what = f"{rows} rows for {processes} processes"
        raise UserError("data.train", what, f"give more rows, or set launch.processes to at most {rows}")


def _refuse_full_disk(recipe: Recipe, model: Path) -> None:
    """Before anything is prepared."""
    if short := unwritable(recipe) or disk_shortage(recipe, model_facts(model)):
        raise UserError(short.setting, short.message, short.mend)


class _RowCount:
    """One line with the rows prepared so far: redrawn on a terminal, every ten seconds in a log."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.seconds = 0.2 if stream.isatty() else 10.0
        self.last = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self.last >= self.seconds:
            self.last = now
            text = f"preparing the data: {done:,} of {total:,} rows" if total else f"preparing the data: {done:,} rows"
            print(f"\r{text}" if self.stream.isatty() else text, end=self._end, file=self.stream, flush=True)

    def close(self) -> None:
        if self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream, flush=True)

    @property
    def _end(self) -> str:
        return "" if self.stream.isatty() else "\n"


def create(recipe: Recipe, asked: Recipe) -> RunFolder:
    """The run's folder with both recipes in it; the last thing that the user's input can make fail."""
    refuse_secrets(dump_recipe(asked))
    plan = plan_json(recipe)
    folder = RunFolder.create(recipe.output.folder, recipe.output.name)
    write_text(folder.asked, dump_recipe(asked))
    write_recipe(folder, recipe, plan)
    return folder


def write_recipe(folder: RunFolder, recipe: Recipe, plan: dict[str, Any] | None = None) -> None:
    """The resolved recipe; beside it the plan for it, and what DeepSpeed is given."""
    write_json(folder.plan, plan if plan is not None else plan_json(recipe))
    write_text(folder.recipe, dump_recipe(recipe))
    if recipe.parallel.strategy == "deepspeed":
        assert isinstance(recipe.launch.processes, int), "resolve comes first"
        write_json(folder.deepspeed, engine_config(recipe, recipe.launch.processes))


def plan_json(recipe: Recipe) -> dict[str, Any]:
    """What a run is foreseen to need, for the reader and for a comparison with what it will have needed."""
    assert isinstance(recipe.launch.processes, int), "resolve comes first"
    return plan_resolved(recipe, gather_facts(recipe, recipe.launch.processes)).to_json()
