"""Which one setting would free most memory: what a run that ran out of it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe
from packtrain.plan.memory import recomputed_share, total


@dataclass(frozen=True)
class Saving:
    """``setting``: ``key=value`` as on the command line. ``freed``: bytes of one process, planned."""

    setting: str
    freed: float


def planned(recipe: Recipe, facts: Facts) -> float:
    """Peak bytes of one process under a resolved recipe."""
    assert isinstance(recipe.train.micro_batch_size, int), "resolve comes first"
    return total(recipe, facts, recipe.train.micro_batch_size, recomputed_share(recipe.parallel.recompute))


def savings(recipe: Recipe, facts: Facts) -> list[Saving]:
    """Every setting that would free memory by itself, the one that frees most first."""
    now = planned(recipe, facts)
    found = []
    for key, value in _candidates(recipe, facts):
        section, name = key.split(".")
        changed = recipe.model_copy(deep=True)
        setattr(getattr(changed, section), name, value)
        found.append(Saving(f"{key}={value}", now - planned(changed, facts)))
    return sorted((saving for saving in found if saving.freed > 0), key=lambda saving: -saving.freed)


def _candidates(recipe: Recipe, facts: Facts) -> Iterator[tuple[str, Any]]:
    parallel, train = recipe.parallel, recipe.train
    assert isinstance(recipe.data.max_length, int) and isinstance(train.micro_batch_size, int)
    if train.micro_batch_size > 1:
        yield "train.micro_batch_size", 1
    if recomputed_share(parallel.recompute) < 1:
        yield "parallel.recompute", "full"
    if recipe.data.max_length > 512:
        yield "data.max_length", recipe.data.max_length // 2
    if parallel.strategy in ("fsdp", "deepspeed") and parallel.offload == "none" and facts.device == "cuda":
        yield "parallel.offload", "optimizer"
    if train.optimizer == "adamw" and not recipe.method.is_adapter:
        yield "train.optimizer", "adamw_8bit"
    if recipe.method.type == "lora":
        yield "method.type", "qlora"
    if recipe.method.type == "full":
        yield "method.type", "lora"
