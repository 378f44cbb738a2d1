"""What the processes of a test do: functions for ``tests.ranks.run_ranks``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from packtrain.config import Recipe, build_recipe
from packtrain.parallel.world import World


class NeverStop:
    set = False


def open_job(world: World, recipe: dict[str, Any], folder: str | None = None) -> Any:
    """A session on a recipe given as a mapping, in a run folder that all ranks share."""
    from packtrain.train.session import open_session

    if folder:
        Path(folder).mkdir(exist_ok=True)
    shared = world.broadcast(folder or (tempfile.mkdtemp() if world.is_main else None))
    return open_session(settled(build_recipe(recipe)), Path(str(shared)), world)


def settled(recipe: Recipe) -> Recipe:
    """With what DeepSpeed alone decides filled in, where it is DeepSpeed's."""
    from packtrain.config.deepspeed import settle
    from packtrain.launch.model_facts import model_facts

    parallel = recipe.parallel
    if parallel.strategy == "deepspeed":
        parallel.deepspeed_config = settle(parallel, model_facts(Path(recipe.model.path)))
    return recipe


def train_recipe(world: World, recipe: dict[str, Any]) -> tuple[list[tuple[float, float]], float | None]:
    """(loss, gradient norm) of each step, and the evaluation loss after them."""
    from packtrain.train.evaluation import evaluate
    from packtrain.train.loop import prefetched, train_step

    session = open_job(world, recipe)
    session.built.model.train()
    steps = []
    for prepared in prefetched(session):
        result = train_step(session, prepared, NeverStop())
        steps.append((result.loss, result.grad_norm))
    found = evaluate(session)
    return steps, found.loss if found else None


def steps_of(world: World, recipe: dict[str, Any]) -> list[tuple[float, float]]:
    return train_recipe(world, recipe)[0]


def train_recipes(world: World, recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several recipes one after the other in the same processes: starting them costs more than training."""
    import torch

    found = {}
    for name, recipe in recipes.items():
        torch.compiler.reset()  # blocks of one class share a limit on compilations
        found[name] = train_recipe(world, recipe)
    return found
