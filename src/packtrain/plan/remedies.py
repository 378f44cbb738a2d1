"""What would run where nothing that a recipe leaves open fits: one change at a time, gentle ones first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from packtrain.config.difference import difference
from packtrain.config.facts import Facts
from packtrain.config.resolve import resolve
from packtrain.config.rules import first_error
from packtrain.config.schema import Recipe
from packtrain.plan.rank import rank

_MOST_GPUS = 4096
_SHORTEST = 512


@dataclass(frozen=True)
class Remedy:
    """A change that makes a recipe fit.

    Attributes:
        setting: ``key=value`` words, or a number of GPUs and such words; all that has to change. total: bytes of one
            GPU with it.
    """

    setting: str
    total: float

    @property
    def edits(self) -> dict[str, Any]:
        """The words as dotted keys and values; empty of a number of GPUs."""
        words = [word.partition("=") for word in self.setting.split()]
        return {key: yaml.safe_load(value) for key, _, value in words} if words[0][1] else {}


def remedies(recipe: Recipe, facts: Facts) -> list[Remedy]:
    """Every change that helps, of the settings and of the number of GPUs: alone where that is enough, else with the
    recompute and the micro-batch left to Packtrain.
    """
    free = _freed(recipe)
    tries = list(_changes(recipe, facts))
    if free != recipe:
        tries = [("", free, facts), *tries, *_changes(free, facts)]
    found: dict[str, Remedy] = {}
    for name, changed, machine in tries:
        kind = name.partition("=")[0] if "GPUs" not in name else "GPUs"  # longer rows, fewer GPUs come first
        if kind in found or first_error(changed, machine):
            continue
        best = rank(changed, machine)[0]
        if not best.refused:
            found[kind] = Remedy(_words(name, recipe, changed), best.peak.total)
    return list(found.values())


def _freed(recipe: Recipe) -> Recipe:
    """What only decides where and how fast a recipe runs left to Packtrain."""
    made = recipe.model_copy(deep=True)
    made.parallel.recompute, made.train.micro_batch_size = "auto", "auto"
    return made


def _words(name: str, recipe: Recipe, changed: Recipe) -> str:
    """``name`` and, as ``key=value``, whatever else has to change."""
    values = {setting.key: setting.values[1] for setting in difference([recipe, changed])}
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    return " ".join(filter(None, [name, *(word for word in words if word != name)]))


def _changes(recipe: Recipe, facts: Facts) -> Iterator[tuple[str, Recipe, Facts]]:
    """Of one setting each, with what that setting asks of the others."""
    if facts.device == "cpu":
        yield "train.micro_batch_size=1", _with(recipe, "train", "micro_batch_size", 1), facts
        yield "parallel.recompute=full", _with(recipe, "parallel", "recompute", "full"), facts
    if recipe.method.type == "full":
        yield "train.optimizer=adamw_8bit", _with(recipe, "train", "optimizer", "adamw_8bit"), facts
        yield "parallel.offload=optimizer", _with(recipe, "parallel", "offload", "optimizer"), facts
        yield "method.type=lora", _with(recipe, "method", "type", "lora"), facts
    if recipe.method.type in ("full", "lora"):
        yield "method.type=qlora", _with(recipe, "method", "type", "qlora"), facts
    yield "parallel.offload=params", _with(recipe, "parallel", "offload", "params"), facts
    length = resolve(recipe, facts).data.max_length
    assert isinstance(length, int)
    while length // 2 >= _SHORTEST:
        length //= 2
        yield f"data.max_length={length}", _with(recipe, "data", "max_length", length), facts
    yield from _more_gpus(recipe, facts)


def _with(recipe: Recipe, section: str, name: str, value: object) -> Recipe:
    made = recipe.model_copy(deep=True)
    setattr(getattr(made, section), name, value)
    if name == "offload" or made.parallel.strategy == "single":
        made.parallel.strategy = "auto"
    return made


def _more_gpus(recipe: Recipe, facts: Facts) -> Iterator[tuple[str, Recipe, Facts]]:
    """Twice as many again and again, in nodes of eight."""
    if facts.device != "cuda":
        return
    made = recipe.model_copy(deep=True)
    made.launch.processes, made.launch.gpus = "auto", "auto"
    if made.parallel.strategy == "single":
        made.parallel.strategy = "auto"
    count = facts.processes * 2
    while count <= _MOST_GPUS:
        local = min(count, max(facts.local_processes, 8))
        larger = made.model_copy(deep=True)
        larger.train.batch_size = max(recipe.train.batch_size, count)
        yield f"{count} GPUs", larger, replace(facts, processes=count, local_processes=local, num_gpus=local)
        count *= 2
