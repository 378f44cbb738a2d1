"""What ``auto`` becomes. The resolved recipe is what a run folder keeps."""

from __future__ import annotations

from typing import Literal

from packtrain.config.deepspeed import settle
from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe

_LONGEST = 4096
_CPU_TOKENS = 4096  # of one micro-batch on the CPU: more gains no speed there


def resolve(recipe: Recipe, facts: Facts) -> Recipe:
    """A copy of ``recipe`` in which every ``auto`` has its value, but for the two that a GPU's memory decides.

    ``train.micro_batch_size`` and ``parallel.recompute`` of a run on GPUs are left to ``packtrain.plan``.
    """
    recipe = recipe.model_copy(deep=True)
    recipe.launch.device = facts.device  # type: ignore[assignment]
    recipe.launch.processes = facts.processes
    if recipe.launch.gpus == "auto":
        recipe.launch.gpus = facts.local_processes if facts.device == "cuda" else 0
    _resolve_method(recipe, facts)
    _resolve_data(recipe, facts)
    if recipe.train.precision == "auto":
        recipe.train.precision = "bf16" if facts.bf16 else "fp32"
    _resolve_parallel(recipe, facts)
    if facts.device == "cpu":
        _resolve_for_cpu(recipe, facts)
    return recipe


def auto_max_length(model_limit: int | None) -> int:
    """What ``data.max_length: auto`` is, in tokens, for a model of so many positions (None: it does not say)."""
    return min(_LONGEST, model_limit or _LONGEST)


def _resolve_data(recipe: Recipe, facts: Facts) -> None:
    if recipe.data.max_length == "auto":
        recipe.data.max_length = auto_max_length(facts.model.max_length)
        if recipe.method.type == "prefix" and facts.model.max_length:  # which takes positions too
            assert isinstance(recipe.method.virtual_tokens, int)
            recipe.data.max_length = min(recipe.data.max_length, facts.model.max_length - recipe.method.virtual_tokens)
    if recipe.data.workers == "auto":
        recipe.data.workers = facts.num_cores


def _resolve_method(recipe: Recipe, facts: Facts) -> None:
    method = recipe.method
    if method.virtual_tokens == "auto":
        method.virtual_tokens = 10 if method.type == "llama_adapter" else 30
    if method.adapter_blocks == "auto":
        method.adapter_blocks = min(30, facts.model.num_blocks)


def _resolve_parallel(recipe: Recipe, facts: Facts) -> None:
    parallel = recipe.parallel
    if parallel.strategy == "auto":
        parallel.strategy = _strategy(recipe, facts)
    if parallel.strategy == "deepspeed":
        parallel.zero_stage = zero_stage(recipe, facts)
        parallel.deepspeed_config = settle(parallel, facts.model)
    else:
        parallel.zero_stage = 0
    if parallel.shard_size == "auto":
        parallel.shard_size = facts.processes if parallel.strategy == "fsdp" else 1
    if parallel.compile == "auto":
        possible = facts.host is None or facts.host.builds_kernels
        parallel.compile = facts.device == "cuda" and parallel.zero_stage != 3 and possible


def zero_stage(recipe: Recipe, facts: Facts) -> Literal[0, 1, 2, 3]:
    """ZeRO-3 gathers each block's parameters twice a step: only where whole ones would take half of the memory."""
    if recipe.parallel.zero_stage != "auto":
        return recipe.parallel.zero_stage
    if recipe.parallel.offload == "params" or recipe.parallel.offload_dir:
        return 3
    if facts.model.num_experts:
        return 2
    return 2 if recipe.method.is_adapter and _copies_fit(recipe, facts) else 3


def _strategy(recipe: Recipe, facts: Facts) -> Literal["single", "ddp", "fsdp"]:
    """A copy each where the whole model leaves half of the memory free: adapters cost little to average."""
    if recipe.parallel.offload != "none":
        return "fsdp"
    if facts.processes == 1:
        return "single"
    if recipe.parallel.shard_size != "auto" or not recipe.method.is_adapter or recipe.method.also_train:
        return "fsdp"
    return "ddp" if _copies_fit(recipe, facts) else "fsdp"


def _copies_fit(recipe: Recipe, facts: Facts) -> bool:
    """Whether a whole model on each process leaves half of the memory free."""
    copies = 1 if facts.device == "cuda" else facts.processes
    return facts.model.num_parameters * stored_bytes(recipe) * copies < facts.memory / 2


def stored_bytes(recipe: Recipe) -> float:
    """Bytes of a frozen weight inside the blocks."""
    if recipe.method.type == "qlora":
        scales = 1 / 64 if recipe.method.double_quant else 4 / 64
        return (0.5 if recipe.method.quantize == "nf4" else 1.0) + scales
    return 4 if recipe.train.precision == "fp32" else 2


def _resolve_for_cpu(recipe: Recipe, facts: Facts) -> None:
    if recipe.parallel.recompute == "auto":
        recipe.parallel.recompute = "full" if recipe.parallel.offload_activations else "none"
    if recipe.train.micro_batch_size == "auto":
        assert isinstance(recipe.data.max_length, int)
        share = -(-recipe.train.batch_size // facts.processes)
        recipe.train.micro_batch_size = max(1, min(share, _CPU_TOKENS // recipe.data.max_length))
