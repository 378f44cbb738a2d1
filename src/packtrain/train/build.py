"""The order of building, once: meta device, adapters, recompute, compile, shard, to_empty, ties, weights.

No real parameter exists before the weights stream in (optimizer and checkpoint follow in ``session.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packtrain.adapters.freeze import freeze
from packtrain.adapters.lora import add_lora, start_adapters
from packtrain.adapters.pissa import PissaStart, pissa_start
from packtrain.config.schema import Recipe
from packtrain.models import attention
from packtrain.models.causal_lm import CausalLMWithLoss
from packtrain.models.files import WeightFiles
from packtrain.models.meta import load_config, meta_model, rebuild_buffers
from packtrain.models.plan import ModelPlan, find_plan
from packtrain.models.weights import stream_weights
from packtrain.parallel import make_strategy
from packtrain.parallel.blocks import prepare_blocks
from packtrain.parallel.strategy import Strategy
from packtrain.parallel.world import World

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Built:
    """A model with its weights, spread and ready to train.

    Attributes:
        config: the transformers config.
        start: where PiSSA started, which its export needs.
        bytes_read: weights read from disk by this rank.
    """

    model: CausalLMWithLoss
    plan: ModelPlan
    config: Any
    files: WeightFiles
    strategy: Strategy
    start: PissaStart | None
    bytes_read: int
    num_recomputed: int


def build(recipe: Recipe, model_folder: Path, world: World, run_folder: Path) -> Built:
    """Build the model that ``recipe`` (resolved) describes.

    Args:
        model_folder: where the base model lies on this machine.
        run_folder: where a PiSSA start is kept.
    """
    files = WeightFiles.open(model_folder)
    config = load_config(model_folder, recipe.model.trust_remote_code)
    compute = DTYPES[recipe.train.precision]
    attention.prefer_fast_kernels()
    name = attention.choose(recipe.data.packing, world.device, config)

    model = meta_model(config, compute, name, recipe.model.trust_remote_code)
    plan = find_plan(model, config)
    trained = add_method(model, plan, recipe, base_name(recipe, model_folder))
    widen_trained(trained, DTYPES[recipe.train.master_weights])
    compiled = recipe.parallel.compile is True
    wrapped = CausalLMWithLoss(trained, plan, name, compiled)
    num_recomputed = prepare_blocks(wrapped.blocks(), recipe.parallel.recompute, compiled)

    strategy = make_strategy(recipe.parallel, world, compute)
    strategy.shard(wrapped)
    wrapped.to_empty(device=world.device)
    if plan.tied:
        model.tie_weights()  # type: ignore[operator]
    rebuild_buffers(model)

    start = None
    if recipe.method.type == "lora" and recipe.method.start == "pissa":
        start = pissa_start(wrapped, files, plan.decoder, recipe.method, world, run_folder / "pissa_start.safetensors")
    bytes_read = stream_weights(wrapped, files, plan.decoder, start.residual if start else None)
    if recipe.method.type == "lora":
        start_adapters(wrapped, files, plan.decoder, recipe.train.seed)
        if start:
            start.fill(wrapped)
    strategy.ready(wrapped)
    return Built(wrapped, plan, config, files, strategy, start, bytes_read, num_recomputed)


def base_name(recipe: Recipe, model_folder: Path) -> str:
    """What an adapter calls its base model: a hub id as it is, a folder by its absolute path."""
    on_hub = recipe.model.path != "demo" and not Path(recipe.model.path).expanduser().is_dir()
    return recipe.model.path if on_hub else str(model_folder.absolute())


def add_method(model: nn.Module, plan: ModelPlan, recipe: Recipe, base: str) -> nn.Module:
    """Decide what is trained. Returns the model, or the peft model around it."""
    if recipe.method.type == "lora":
        return add_lora(model, plan, recipe.method, base)
    if recipe.method.type == "freeze":
        freeze(model, plan, recipe.method)
    return model


def widen_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Store trained parameters in ``dtype``; frozen ones stay in the compute dtype. On the meta device."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
