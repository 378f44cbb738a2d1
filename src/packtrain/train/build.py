"""The order of building, once: meta device, adapters, recompute, compile, shard, to_empty, ties, weights.

No real parameter exists before the weights stream in (optimizer and checkpoint follow in ``session.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packtrain.adapters.freeze import freeze, train_also
from packtrain.adapters.lora import add_lora, start_adapters
from packtrain.adapters.pissa import START_FILE, PissaStart, pissa_start
from packtrain.adapters.prompt import add_llama_adapter, add_prefix, start_prompts
from packtrain.config.schema import Recipe
from packtrain.data.tokenizer import added_tokens
from packtrain.errors import UserError
from packtrain.models import attention
from packtrain.models.added import AddedTokens
from packtrain.models.causal_lm import CausalLMWithLoss
from packtrain.models.files import WeightFiles
from packtrain.models.grown import grow, start_new_rows, tie
from packtrain.models.meta import load_config, meta_model, move_buffers, rebuild_buffers
from packtrain.models.names import NEW_ROWS, original_names
from packtrain.models.plan import ModelPlan, find_plan
from packtrain.models.prefix import Prefix
from packtrain.models.quantize import Quantization
from packtrain.models.quantized import quantize_linears
from packtrain.models.weights import Reader, num_parameters, num_trained, stream_weights
from packtrain.parallel import make_strategy
from packtrain.parallel.blocks import prepare_blocks
from packtrain.parallel.strategy import Strategy
from packtrain.parallel.world import World

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Built:
    """A model with its weights, spread and ready to train.

    Attributes:
        config: the transformers config.
        added: tokens whose rows the model has and its files have not; None: no such token.
        start: where PiSSA started, which its export needs.
        bytes_read: weights read from disk by this rank.
        num_quantized: linears that are stored quantised.
        num_parameters, num_trained: of the whole model.
    """

    model: CausalLMWithLoss
    plan: ModelPlan
    config: Any
    files: WeightFiles
    strategy: Strategy
    added: AddedTokens | None
    start: PissaStart | None
    bytes_read: int
    num_recomputed: int
    num_quantized: int
    num_parameters: int
    num_trained: int


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
    name = attention.choose(recipe.data.packing, world.device, config, prefix=recipe.method.type == "prefix")

    model = meta_model(config, compute, name, recipe.model.trust_remote_code)
    plan = find_plan(model, config)
    quantized = quantize(model, plan, recipe, compute)
    names = original_names(model)
    added = added_tokens(model_folder, recipe.model.add_tokens)
    if added:
        grow(model, plan, added)
    trained, prefix = add_method(model, plan, recipe, base_name(recipe, model_folder))
    strategy = make_strategy(recipe, world, compute)
    if not strategy.keeps_masters:
        widen_trained(trained, DTYPES[recipe.train.master_weights])
    compiled = recipe.parallel.compile is True
    wrapped = CausalLMWithLoss(trained, plan, name, compiled, names, prefix)
    parallel = recipe.parallel
    num_recomputed = prepare_blocks(wrapped.blocks(), parallel.recompute, compiled, parallel.offload_activations)

    def complete() -> None:
        """Restore what is lost with the meta device: shared parameters and buffers."""
        if plan.tied:
            model.tie_weights()  # type: ignore[operator]
            if added:
                tie(model, plan)
        rebuild_buffers(model)
        move_buffers(wrapped, world.device)

    counts = num_parameters(wrapped), num_trained(wrapped)
    strategy.shard(wrapped)
    start = find_start(wrapped, recipe, files, world, run_folder)
    with strategy.reader(files) as reader:
        for parameters in strategy.materialize(wrapped, complete):
            fill(wrapped, set(parameters), recipe, reader, start, added)
        bytes_read = reader.bytes_read
    strategy.ready(wrapped)
    return Built(
        wrapped, plan, config, files, strategy, added, start, bytes_read, num_recomputed, len(quantized), *counts
    )  # fmt: skip


def quantize(model: nn.Module, plan: ModelPlan, recipe: Recipe, compute: torch.dtype) -> list[str]:
    """Store the linears of the blocks quantised where the method asks for that; their names."""
    if recipe.method.type != "qlora":
        return []
    inside = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(plan.blocks + ".")]
    quantization = Quantization(recipe.method.quantize, recipe.method.double_quant)
    replaced = quantize_linears(model, inside, quantization, compute)
    if not replaced:
        raise UserError(
            "method.type", "no linear of this model has rows of a multiple of 64 to quantise", "set method.type to lora"
        )
    return replaced


def find_start(
    wrapped: CausalLMWithLoss, recipe: Recipe, files: WeightFiles, world: World, run_folder: Path
) -> PissaStart | None:
    """Where PiSSA starts, if the method asks for it. A collective."""
    method = recipe.method
    if not method.is_lora or method.start != "pissa":
        return None
    return pissa_start(wrapped, files, wrapped.plan.decoder, method, world, run_folder / START_FILE)


def fill(
    wrapped: CausalLMWithLoss, only: set[nn.Parameter], recipe: Recipe, reader: Reader, start: PissaStart | None,
    added: AddedTokens | None,
) -> None:  # fmt: skip
    """Stream the weights of the parameters ``only`` in and start what the files do not hold."""
    method, plan, seed = recipe.method, wrapped.plan, recipe.train.seed
    stream_weights(wrapped, reader, start.residual if start else None, only)
    if added:
        start_new_rows(wrapped.base, plan, added, reader, only)
    named = [(name, parameter) for name, parameter in wrapped.named_parameters() if parameter in only]
    if method.is_lora:
        start_adapters(wrapped, named, seed)
    elif method.is_adapter:
        start_prompts(named, seed)
    if start:
        start.fill(named)


def base_name(recipe: Recipe, model_folder: Path) -> str:
    """What an adapter calls its base model: a hub id as it is, a folder by its absolute path."""
    on_hub = recipe.model.path != "demo" and not Path(recipe.model.path).expanduser().is_dir()
    return recipe.model.path if on_hub else str(model_folder.absolute())


def add_method(model: nn.Module, plan: ModelPlan, recipe: Recipe, base: str) -> tuple[nn.Module, Prefix | None]:
    """Decide what is trained. Returns the model or the peft model around it, and the prefix where there is one."""
    method, prefix, trained = recipe.method, None, model
    if method.is_lora:
        trained = add_lora(model, plan, method, base)
    elif method.type == "llama_adapter":
        trained = add_llama_adapter(model, method, base)
    elif method.type == "prefix":
        trained, prefix = add_prefix(model, plan, method, base)
    elif method.type == "freeze":
        freeze(model, plan, method)
    train_also(model, plan, method.also_train)
    for name, parameter in model.named_parameters():
        if name.endswith("." + NEW_ROWS):
            parameter.requires_grad_(True)
    return trained, prefix


def widen_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Store trained parameters in ``dtype``; frozen ones stay in the compute dtype. On the meta device."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
