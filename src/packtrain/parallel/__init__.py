"""How a model is spread over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from packtrain.config.schema import Recipe
    from packtrain.parallel.strategy import Strategy
    from packtrain.parallel.world import World


def make_strategy(recipe: Recipe, world: World, compute_dtype: torch.dtype) -> Strategy:
    """The strategy a resolved recipe names."""
    section = recipe.parallel
    if section.strategy == "fsdp":
        from packtrain.parallel.fsdp import FullyShard

        assert isinstance(section.shard_size, int)
        return FullyShard(world, compute_dtype, section.shard_size, section.offload)
    if section.strategy == "deepspeed":
        from packtrain.config.deepspeed import engine_config
        from packtrain.parallel.zero.strategy import Zero

        return Zero(world, compute_dtype, engine_config(recipe, world.size))
    if section.strategy == "ddp":
        from packtrain.parallel.ddp import Replicated

        return Replicated(world, compute_dtype)
    from packtrain.parallel.single import Single

    return Single(world, compute_dtype)
