"""GPU memory of a run, to first order, and the micro-batch and recompute share that fill the card.

The activation terms are fitted to measurements of Llama-3-8B's shape (docs/performance.md); the rest is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.resolve import stored_bytes
from packtrain.config.schema import Recipe

_HEADROOM = 0.88  # of the card: the rest is the allocator's, cuBLAS's and NCCL's
_TOKENS = 16_384  # of a micro-batch: matrix products are as fast as they get
_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_CHUNK = 2048  # labelled positions whose logits exist at once


@dataclass(frozen=True)
class Choice:
    micro_batch_size: int
    recompute: float


def choose(recipe: Recipe, facts: Facts) -> Choice:
    """The micro-batch and the recompute share for ``recipe``, whose other settings are resolved.

    Settings that the recipe gives are kept. Least recompute first, then the largest micro-batch.
    """
    assert isinstance(recipe.data.max_length, int)
    share_of_batch = -(-recipe.train.batch_size // facts.processes)
    wanted = max(1, min(share_of_batch, _TOKENS // recipe.data.max_length))
    given = recipe.train.micro_batch_size
    micros = [given] if given != "auto" else sorted({wanted, -(-wanted // 2), 1}, reverse=True)
    shares = _SHARES if recipe.parallel.recompute == "auto" else (recomputed_share(recipe.parallel.recompute),)
    if recipe.parallel.offload_activations and recipe.parallel.recompute == "auto":
        shares = (1.0,)
    for share in shares:
        for micro in micros:
            if total(recipe, facts, micro, share) <= _HEADROOM * facts.memory:
                return Choice(micro, share)
    return Choice(micros[-1], shares[-1])


def total(recipe: Recipe, facts: Facts, micro_batch_size: int, recompute: float) -> float:
    """Peak bytes of one GPU."""
    return states(recipe, facts) + activations(recipe, facts.model, micro_batch_size, recompute)


def states(recipe: Recipe, facts: Facts) -> float:
    """Weights, gradients and optimizer states of one GPU, in bytes."""
    if recipe.parallel.strategy == "deepspeed":
        return _zero_states(recipe, facts)
    shards = recipe.parallel.shard_size if recipe.parallel.strategy == "fsdp" else 1
    assert isinstance(shards, int)
    return _kept(recipe, facts.model) / shards + _gathered(recipe, facts.model)


def _zero_states(recipe: Recipe, facts: Facts) -> float:
    """As ``states``, under ZeRO: it keeps weights and gradients in the dtype of the arithmetic, and fp32 masters."""
    model, width, stage = facts.model, _width(recipe), recipe.parallel.zero_stage
    assert isinstance(stage, int) and isinstance(recipe.parallel.deepspeed_config, dict), "resolve comes first"
    zero = recipe.parallel.deepspeed_config["zero_optimization"]
    trained, shards = trained_parameters(recipe, model), facts.processes
    weights = _frozen_bytes(recipe, model) + trained * width
    gradients, masters = trained * width, trained * 12.0
    stepping = trained * 4.0 if stage in (1, 2) else min(trained, zero.get("sub_group_size", 0)) * 4.0
    if stage == 3:
        weights = 0 if recipe.parallel.offload == "params" else weights / shards
        weights += _passing(model, width, width)
    if stage >= 2:
        gradients /= shards
    if stage >= 1:
        masters, stepping = masters / shards, stepping / (shards if stage < 3 else 1)
    if recipe.parallel.offload != "none":
        masters = stepping = 0.0
    buckets = 2 * float(zero.get("reduce_bucket_size", 0)) * width
    return weights + gradients + masters + stepping + min(buckets, 2 * trained * width)


def _kept(recipe: Recipe, model: ModelFacts) -> float:
    """What all shards together keep on their GPUs for the whole run."""
    if recipe.parallel.offload == "params":
        return 0.0
    return _frozen_bytes(recipe, model) + trained_parameters(recipe, model) * trained_bytes(recipe)


def _frozen_bytes(recipe: Recipe, model: ModelFacts) -> float:
    trained = 0 if recipe.method.is_adapter else trained_parameters(recipe, model)
    frozen = model.num_parameters - trained
    inside = max(frozen - tables(model), 0)  # what a quantised base stores in less
    return (frozen - inside) * _width(recipe) + inside * stored_bytes(recipe)


def _passing(model: ModelFacts, stored: float, width: int) -> float:
    """Bytes of the blocks that are gathered at once, and of the tables, which stay."""
    block = max(model.num_parameters - tables(model), 0) * stored / max(model.num_blocks, 1)
    return 3 * block + tables(model) * width


def _gathered(recipe: Recipe, model: ModelFacts) -> float:
    """Weights that exist for a while in the dtype of the arithmetic."""
    width = _width(recipe)
    # A quantised weight is made anew while its linear runs.
    made = 2 * model.hidden * model.intermediate * width if recipe.method.type == "qlora" else 0
    if recipe.parallel.strategy == "fsdp":
        stored = stored_bytes(recipe) if recipe.method.is_adapter else width
        return _passing(model, stored, width) + made
    narrower = width < (4 if recipe.train.master_weights == "fp32" else 2)  # autocast keeps what it cast
    return (trained_parameters(recipe, model) * width if narrower else 0) + made


def _width(recipe: Recipe) -> int:
    return 4 if recipe.train.precision == "fp32" else 2


def tables(model: ModelFacts) -> float:
    """Parameters of the embedding and the head, of which a tied model has one."""
    return 2.0 * model.vocabulary * model.hidden


def trained_bytes(recipe: Recipe) -> float:
    """Bytes that a trained weight takes on a GPU with its gradient and its optimizer states."""
    if recipe.parallel.offload == "optimizer":
        return 2 * _width(recipe)
    return master_bytes(recipe) + stored_state_bytes(recipe)


def master_bytes(recipe: Recipe) -> int:
    """Bytes of a trained weight as it is stored, and so of its gradient."""
    return 4 if recipe.train.master_weights == "fp32" else 2


def stored_state_bytes(recipe: Recipe) -> int:
    """Bytes of a trained weight and its optimizer states: what a checkpoint holds of it."""
    state = {"adamw": 8, "adamw_bf16": 4, "adamw_8bit": 2}[recipe.train.optimizer]
    if recipe.train.optimizer == "adamw" and recipe.train.master_weights == "bf16" and recipe.train.rounding == "kahan":
        state += 2
    return master_bytes(recipe) + state


def trained_parameters(recipe: Recipe, model: ModelFacts) -> float:
    method = recipe.method
    parts = sum({"embedding": 1, "head": 1, "norm": 0}[part] for part in method.also_train)
    beside = parts * model.vocabulary * model.hidden
    if method.type == "full":
        return model.num_parameters
    if method.type == "freeze":
        return model.num_parameters * (1 - method.freeze_first / max(model.num_blocks, 1))
    if method.is_lora:
        return method.rank * model.num_blocks * (9 * model.hidden + 3 * model.intermediate) + beside
    assert isinstance(method.virtual_tokens, int), "resolve comes first"
    return method.virtual_tokens * model.num_blocks * 2 * model.hidden + beside


def activations(recipe: Recipe, model: ModelFacts, micro_batch_size: int, recompute: float) -> float:
    """Bytes kept for the backward pass, the working set of one block, and one chunk of logits."""
    assert isinstance(recipe.data.max_length, int)
    tokens = micro_batch_size * recipe.data.max_length
    width = _width(recipe)
    block = tokens * width * (3.2 * model.intermediate + 7.5 * model.hidden)
    edge = tokens * width * model.hidden
    inputs = 0.0 if recipe.parallel.offload_activations else edge
    kept = model.num_blocks * ((1 - recompute) * block + recompute * inputs) + (block if recompute else 0)
    return kept + _CHUNK * model.vocabulary * 12 + 6 * edge


def recomputed_share(recompute: str | float) -> float:
    """Selective recompute keeps about half."""
    named = {"none": 0.0, "selective": 0.5, "full": 1.0}
    return named[recompute] if isinstance(recompute, str) else float(recompute)
