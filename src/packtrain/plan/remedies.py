"""What would run where nothing that a recipe leaves open fits: one change at a time, gentle ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

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
        setting: ``key=value`` words, or a number of GPUs. total: bytes of one GPU with it.
    """

    setting: str
    total: float

    @property
    def edits(self) -> dict[str, Any]:
        """The words as dotted keys and values; empty of a number of GPUs."""
        words = [word.partition("=") for word in self.setting.split()]
        return {key: yaml.safe_load(value) for key, equals, value in words if equals}


def remedies(recipe: Recipe, facts: Facts) -> list[Remedy]:
    """Every single change that helps, of the settings and of the number of GPUs."""
    found = []
    for setting, changed, machine in _changes(recipe, facts):
        if first_error(changed, machine):
            continue
        best = rank(changed, machine)[0]
        if not best.refused:
            found.append(Remedy(setting, best.peak.total))
    return _first_of_each(found)


def _first_of_each(found: list[Remedy]) -> list[Remedy]:
    """The least of several values of one setting: longer rows, fewer GPUs come first."""
    kept: dict[str, Remedy] = {}
    for remedy in found:
        kept.setdefault(remedy.setting.rpartition("=")[0] or "gpus", remedy)
    return list(kept.values())


def _changes(recipe: Recipe, facts: Facts) -> Iterator[tuple[str, Recipe, Facts]]:
    free = recipe.model_copy(deep=True)
    free.parallel.recompute, free.train.micro_batch_size = "auto", "auto"
    if free != recipe:
        yield "parallel.recompute=auto train.micro_batch_size=auto", free, facts
    if recipe.method.type == "full":
        yield "train.optimizer=adamw_8bit", _with(free, "train", "optimizer", "adamw_8bit"), facts
        yield "parallel.offload=optimizer", _with(free, "parallel", "offload", "optimizer"), facts
        yield "method.type=lora", _with(free, "method", "type", "lora"), facts
    if recipe.method.type in ("full", "lora"):
        yield "method.type=qlora", _with(free, "method", "type", "qlora"), facts
    yield "parallel.offload=params", _with(free, "parallel", "offload", "params"), facts
    length = resolve(recipe, facts).data.max_length
    assert isinstance(length, int)
    while length // 2 >= _SHORTEST:
        length //= 2
        yield f"data.max_length={length}", _with(free, "data", "max_length", length), facts
    yield from _more_gpus(free, facts)


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
        made.train.batch_size = max(recipe.train.batch_size, count)
        yield f"{count} GPUs", made, replace(facts, processes=count, local_processes=local, num_gpus=local)
        count *= 2
