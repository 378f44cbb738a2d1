"""GPU memory of a run, to first order, and the micro-batch and recompute share that fill the card.

The activation terms are fitted to measurements of Llama-3-8B's shape (docs/performance.md); the rest is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import Facts, ModelFacts
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
    shares = _SHARES if recipe.parallel.recompute == "auto" else (_share(recipe.parallel.recompute),)
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
    sharded = recipe.parallel.strategy == "fsdp"
    shards = recipe.parallel.shard_size if sharded else 1
    assert isinstance(shards, int)
    width = 2 if recipe.train.precision == "bf16" else 4
    master = 4 if recipe.train.master_weights == "fp32" else 2
    trained = trained_parameters(recipe, facts.model)
    frozen = facts.model.num_parameters if recipe.method.type == "lora" else facts.model.num_parameters - trained
    kept = frozen * width + trained * (2 * master + 8)
    block = facts.model.num_parameters / max(facts.model.num_blocks, 1)
    gathered = 3 * block * width if sharded else (trained * width if width < master else 0)
    return kept / shards + gathered


def trained_parameters(recipe: Recipe, model: ModelFacts) -> float:
    method = recipe.method
    if method.type == "full":
        return model.num_parameters
    if method.type == "freeze":
        return model.num_parameters * (1 - method.freeze_first / max(model.num_blocks, 1))
    return method.rank * model.num_blocks * (9 * model.hidden + 3 * model.intermediate)


def activations(recipe: Recipe, model: ModelFacts, micro_batch_size: int, recompute: float) -> float:
    """Bytes kept for the backward pass, the working set of one block, and one chunk of logits."""
    assert isinstance(recipe.data.max_length, int)
    tokens = micro_batch_size * recipe.data.max_length
    width = 2 if recipe.train.precision == "bf16" else 4
    block = tokens * width * (3.2 * model.intermediate + 7.5 * model.hidden)
    edge = tokens * width * model.hidden
    kept = model.num_blocks * ((1 - recompute) * block + recompute * edge) + (block if recompute else 0)
    return kept + _CHUNK * model.vocabulary * 12 + 6 * edge


def _share(recompute: str | float) -> float:
    """Selective recompute keeps about half."""
    named = {"none": 0.0, "selective": 0.5, "full": 1.0}
    return named[recompute] if isinstance(recompute, str) else float(recompute)
