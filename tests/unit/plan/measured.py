"""What was measured on GPUs (benchmarks/results.csv), as recipes and facts for a plan."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from benchmarks.shapes import SHAPES

from packtrain.config import Recipe, build_recipe
from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.resolve import resolve
from packtrain.launch.calibration import Calibration, nearest, shapes
from packtrain.launch.calibration import Measured as MeasuredRates
from packtrain.launch.model_facts import planned_model_facts
from packtrain.plan.rates import published

GIB = 2**30
LLAMA_8B = ModelFacts(8_030_261_248, 32, 4096, 14336, 128256, 8192, kv_width=1024)
LLAMA_3B = ModelFacts(3_212_749_824, 28, 3072, 8192, 128256, 8192, kv_width=1024, tied=True)
LLAMA_70B = ModelFacts(70_553_706_496, 80, 8192, 28672, 128256, 8192, kv_width=1024)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results.csv"


def gpus(count: int, model: ModelFacts, gib: float = 139.8, name: str = "NVIDIA H200", nodes: int = 1) -> Facts:
    local = count // nodes
    return Facts(count, local, "cuda", local, int(gib * GIB), True, 16, model, gpu=name, rates=published(name))


def recipe_for(facts: Facts, **sections: dict[str, Any]) -> Recipe:
    """Resolved, for rows of 4,096 tokens."""
    return resolve(asked(**sections), facts)


def asked(**sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {"model": {"path": "m"}, **sections}
    values["data"] = {"train": ["d"], "max_length": 4096, "packing": False} | sections.get("data", {})
    return build_recipe(values)


@dataclass(frozen=True)
class Measured:
    """One run. ``gib``: the allocator's peak. ``tokens_per_second``: of a GPU. ``facts``: with published rates."""

    name: str
    recipe: Recipe
    facts: Facts
    recompute: str | float
    gib: float
    tokens_per_second: float
    full_rows: bool


def measured() -> Iterator[Measured]:
    """Every run of ``packtrain train`` on one H200 whose peak was stored (benchmarks/train_speed.py)."""
    for (name, commit, configuration, _), found in _rows().items():
        if "peak memory" in found:
            how = json.loads(configuration)
            yield _measured(f"{name} ({commit})", how, found)


def calibrated(run: Measured) -> Facts:
    """The facts of a run with the rates that a stored ``plan --calibrate`` gives a plan of it."""
    wanted = shapes(run.recipe, run.facts.model)
    return replace(run.facts, rates=nearest(_calibrations(), wanted).rates(run.facts.gpu, wanted))


@cache
def _calibrations() -> tuple[Calibration, ...]:
    """Of benchmarks/calibration.py."""
    found = []
    for (_, _, configuration, date), rates in _rows().items():
        if "matmul" in rates:
            how = json.loads(configuration)
            recipe = asked(data={"max_length": how["length"]})
            at = shapes(recipe, of_shape(how["shape"]))
            made = MeasuredRates(link=None, **rates)
            found.append(Calibration(shapes=at, measured=made, num_gpus=1, host="a host", date=date, torch="2.11"))
    return tuple(found)


@cache
def _rows() -> dict[tuple[str, str, str, str], dict[str, float]]:
    """What was stored of Packtrain on one H200: (benchmark, commit, configuration, date) -> metrics."""
    runs: dict[tuple[str, str, str, str], dict[str, float]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["hardware"] == "1 x NVIDIA H200" and row["tool"] == "packtrain":
                key = row["benchmark"], row["commit"], row["configuration"], row["date"]
                runs.setdefault(key, {})[row["metric"]] = float(row["value"])
    return runs


@cache
def of_shape(shape: str) -> ModelFacts:
    """A model of benchmarks/shapes.py, as its config.json tells of it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama"} | SHAPES[shape]))
        return planned_model_facts(Path(folder))


def _model(name: str, how: dict[str, Any]) -> ModelFacts:
    """Rows of before the shape was stored say it by their names."""
    if "shape" in how:
        return of_shape(how["shape"])
    return LLAMA_3B if name.lower().startswith(("3b", "llama-3.2-3b")) else LLAMA_8B


def _measured(name: str, how: dict[str, Any], found: dict[str, float]) -> Measured:
    facts, length = gpus(1, _model(name, how)), how.get("length", 4096)
    full_rows = how["rows"] == str(length)
    data = {"packing": not full_rows, "max_length": length}
    sections: dict[str, dict[str, Any]] = {"train": {"batch_size": 4}, "data": data}
    for word in how["overrides"]:
        key, _, value = word.partition("=")
        section, _, field = key.partition(".")
        sections.setdefault(section, {})[field] = float(value) if field == "learning_rate" else yaml.safe_load(value)
    sections["train"]["micro_batch_size"] = how["micro_batch_size"]
    sections["parallel"] = {"recompute": how["recompute"]} | sections.get("parallel", {})
    recipe = recipe_for(facts, **sections)
    return Measured(name, recipe, facts, how["recompute"], found["peak memory"], found["throughput"], full_rows)
