"""Tokens a second of one process: arithmetic at the machine's rates, and what memory and links add to it.

A roofline by parts (Williams et al., https://doi.org/10.1145/1498765.1498785): each part of a step takes its FLOPs or
its bytes over a rate, and parts do not overlap but for collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import Facts, ModelFacts, Rates
from packtrain.config.resolve import stored_bytes
from packtrain.config.schema import Recipe
from packtrain.parallel.limits import UNREDUCED_LIMIT
from packtrain.plan.activations import block, query_width, width
from packtrain.plan.memory import master_bytes, sharding
from packtrain.plan.parameters import Parameters, block_linears, parameters, table

ATTENTION_BACKWARD = 2.5
"""Of the forward pass's FLOPs: scores are made again (Dao, https://arxiv.org/abs/2307.08691, section 3)."""
HOST_UPDATE_BYTES = 32
"""Bytes, read and written, of a weight in an AdamW step in host memory."""
_HOST_STEPS = 2.07
"""What an optimizer in host memory takes, in such steps: gradients are summed, measured and clipped there, and weights
cast. Fitted to two runs of 3B (ZeRO)."""
_PASSES = 10.7
"""How often what a block keeps is written or read by all that is no matrix product, fitted to one run (8B LoRA)."""
_LAUNCH = 0.31e-3
"""Seconds a block and micro-batch for which the GPU has no work yet."""
_HIDDEN = 0.9
"""The share of the arithmetic that collectives may take without being seen."""
_UPDATE_BYTES = {"adamw": 40.0, "adamw_bf16": 60.0, "adamw_8bit": 280.0}
"""Bytes, read and written, of a trained weight in clipping and the optimizer's step."""


@dataclass(frozen=True)
class Flops:
    """Of one token: matrix products, and attention that is causal."""

    linears: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        return self.linears + self.head + self.attention


@dataclass(frozen=True)
class Speed:
    """Of one process. Seconds are those of an optimizer step.

    Attributes:
        tokens_per_second: at full rows, all positions labelled.
        sent: bytes that one process sends in a step.
    """

    tokens_per_second: float
    step_seconds: float
    flops: Flops
    seconds: dict[str, float]
    sent: float
    source: str


def flops(recipe: Recipe, model: ModelFacts, recompute: float) -> Flops:
    """FLOPs of a token at full rows; what is computed again is not counted by ``recompute=0``."""
    found = parameters(recipe, model)
    assert isinstance(recipe.data.max_length, int)
    flowing = max(model.num_blocks - found.first_trained, 0) / max(model.num_blocks, 1)
    frozen_passes = 2 + 2 * flowing + 2 * recompute * flowing
    every = found.trained.linears + found.frozen.linears
    linears = every * frozen_passes + 2 * found.trained.linears + (6 + 2 * recompute) * found.adapters
    queries = query_width(block_linears(model), model)
    attention = causal_attention(queries, recipe.data.max_length, model.sliding_window) * model.num_blocks
    attention *= 1 + flowing * (ATTENTION_BACKWARD + recompute)
    return Flops(linears, table(model) * (6 if found.head_trained else 4), attention)


def causal_attention(query_width: int, length: int, window: int | None) -> float:
    """FLOPs of a token in one block's forward pass, in rows of ``length`` tokens."""
    whole = 2.0 * length * query_width
    return whole * min(1.0, 2 * window / length) if window and window < length else whole


def speed(recipe: Recipe, facts: Facts, micro: int, recompute: float) -> Speed | None:
    """Of a resolved recipe; None where the machine's rates are not known."""
    assert isinstance(recipe.data.max_length, int)
    rates = facts.rates
    if rates is None:
        return None
    model, found = facts.model, parameters(recipe, facts.model)
    rows = -(-recipe.train.batch_size // facts.processes)
    micros = -(-rows // micro)
    tokens = rows * recipe.data.max_length
    useful = recipe.train.batch_size / facts.processes * recipe.data.max_length  # a rank short of rows works in vain
    work = flops(recipe, model, recompute)
    one = block(recipe, model, wide_stream=False)
    flowing = max(model.num_blocks - found.first_trained, 0)
    passes = _PASSES * (1 + recompute / 3) * flowing + _PASSES / 3 * (model.num_blocks - flowing)
    seconds = {
        "matrix products": tokens * (work.linears + work.head) / rates.matmul,
        "attention": tokens * work.attention / rates.attention,
        "element-wise": tokens * passes * one.kept / rates.memory,
        "weights": _weight_bytes(recipe, model, found, micros, recompute) / rates.memory,
        "optimizer": _update_seconds(recipe, facts, found, rates),
        "launch": micros * _LAUNCH * model.num_blocks,
    }
    busy = sum(seconds.values())
    sent, across = _sent(recipe, facts, found, micros)
    moving = sent / rates.link if not across else sent / rates.network
    moving += _offloaded(recipe, facts, found, micros) / rates.host
    seconds["links"] = max(moving - _HIDDEN * busy, 0.05 * moving)
    whole = busy + seconds["links"]
    return Speed(useful / whole, whole, work, seconds, sent, rates.source)


def _weight_bytes(recipe: Recipe, model: ModelFacts, found: Parameters, micros: int, recompute: float) -> float:
    """Bytes that a step reads and writes to cast, gather, make or sum weights and gradients."""
    size = width(recipe)
    total = 0.0
    if recipe.method.type == "qlora":  # made in the forward and in the backward pass
        total += found.frozen.linears * (stored_bytes(recipe) + size) * (2 + recompute)
    trained = found.num_trained
    if recipe.parallel.strategy in ("single", "ddp"):
        total += trained * (master_bytes(recipe) + size) if master_bytes(recipe) > size else 0.0
    elif recipe.parallel.strategy == "fsdp":
        stored = stored_bytes(recipe) if recipe.method.type == "qlora" else size
        total += 2 * (4 * stored * (found.trained.total + found.frozen.total) + 2 * trained * master_bytes(recipe))
        total += trained * (size + 8)
    else:
        total += trained * 2 * size
    return micros * total + (micros - 1) * 3 * master_bytes(recipe) * trained  # added to the gradient before


def _update_seconds(recipe: Recipe, facts: Facts, found: Parameters, rates: Rates) -> float:
    spread = sharding(recipe, facts)
    if recipe.parallel.offload != "none":  # in host memory, at about its rate
        return found.num_trained / spread.states * _HOST_STEPS * HOST_UPDATE_BYTES / rates.host_memory
    return found.num_trained / spread.states * _UPDATE_BYTES[recipe.train.optimizer] / rates.memory


def _offloaded(recipe: Recipe, facts: Facts, found: Parameters, micros: int) -> float:
    """Bytes between a GPU and host memory in a step."""
    spread, size = sharding(recipe, facts), width(recipe)
    if recipe.parallel.offload == "none":
        return 0.0
    moved = found.num_trained * (size + 4) / max(spread.gradients, 1)
    if recipe.parallel.offload == "params":
        weights = found.frozen.total * stored_bytes(recipe) + found.trained.total * size
        moved += 2 * micros * weights / max(spread.weights, 1)
    return moved


def _sent(recipe: Recipe, facts: Facts, found: Parameters, micros: int) -> tuple[float, bool]:
    """(bytes that a process sends in a step, whether they cross nodes): the counts of parallel/traffic.py."""
    processes, size = facts.processes, width(recipe)
    across = facts.processes > facts.local_processes
    if processes == 1:
        return 0.0, False
    gradients = found.num_trained * 4.0
    copies = recipe.parallel.strategy == "deepspeed" and recipe.parallel.zero_stage != 3
    if recipe.parallel.strategy == "ddp" or copies:
        return 2 * gradients * (processes - 1) / processes, across
    shards = recipe.parallel.shard_size if recipe.parallel.strategy == "fsdp" else processes
    assert isinstance(shards, int), "resolve comes first"
    inside = found.frozen.linears * stored_bytes(recipe)
    gathered = inside + (found.frozen.total - found.frozen.linears + found.num_trained) * size
    share = (shards - 1) / shards
    reductions = micros if gradients > UNREDUCED_LIMIT else 1
    sent = (2 * micros * gathered + reductions * gradients) * share
    replicas = processes // shards
    sent += 2 * gradients / shards * (replicas - 1) / replicas
    return sent, across and shards > facts.local_processes
