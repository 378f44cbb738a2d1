"""Host memory of one node, in bytes: anonymous memory, which no other process shares."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import Facts
from packtrain.config.resolve import stored_bytes
from packtrain.config.schema import Recipe
from packtrain.plan.activations import width
from packtrain.plan.memory import Peak, peak, recomputed_share, sharding, state_bytes
from packtrain.plan.parameters import parameters

_PROCESS = 2.8 * 2**30
"""Python, torch and CUDA's side on the host."""
_PIECE = 256 << 20
"""Of the weights that are on their way, at most (benchmarks/loading.py measured 13 to 110 MiB)."""
_DEEPSPEED_COPIES = 1.5
"""DeepSpeed pins buffers of powers of two, and keeps 16-bit copies beside them."""


@dataclass(frozen=True)
class HostPlan:
    """Bytes of a node. ``loading``: while the weights are read. ``training``: at most, afterwards."""

    loading: float
    training: float


def host(recipe: Recipe, facts: Facts, one: Peak) -> HostPlan:
    """Of a resolved recipe whose processes have the peak ``one`` each."""
    processes, found = facts.local_processes, parameters(recipe, facts.model)
    if facts.device == "cpu":
        kept = sum(one.terms[name] for name in ("weights", "quantised_weights", "adapters", "master_weights"))
        return HostPlan(processes * (kept + one.terms["workspace"] + _PIECE), processes * one.total)
    base = processes * _PROCESS
    spread, offload = sharding(recipe, facts), recipe.parallel.offload
    activations = processes * _offloaded_activations(recipe, facts, one)
    if offload == "none":
        return HostPlan(base + processes * _PIECE, base + activations)
    offloaded = found.num_trained * (8 + state_bytes(recipe))  # fp32 weights and gradients
    if recipe.parallel.strategy == "deepspeed":
        offloaded *= _DEEPSPEED_COPIES
    weights = 0.0
    if offload == "params":
        weights = found.frozen.total * stored_bytes(recipe) + found.trained.total * width(recipe)
    there = base + activations + processes * (offloaded / spread.states + weights / spread.weights)
    if recipe.parallel.offload_dir:
        there -= processes * found.num_trained * 4 * 3 / spread.states
    return HostPlan(max(there, base + processes * _PIECE), there)


def host_fits(facts: Facts, found: HostPlan) -> bool:
    """Whether a node has that much; one of which nothing is known has."""
    return not facts.host_memory or max(found.training, found.loading) <= facts.host_memory


def _offloaded_activations(recipe: Recipe, facts: Facts, one: Peak) -> float:
    """Of one process: what a GPU would keep, did it not lie in host memory."""
    micro = recipe.train.micro_batch_size
    if not recipe.parallel.offload_activations:
        return 0.0
    assert isinstance(micro, int), "resolve comes first"
    kept = recipe.model_copy(deep=True)
    kept.parallel.offload_activations = False
    there = peak(kept, facts, micro, recomputed_share(recipe.parallel.recompute)).terms
    return max(there.get("activations", 0.0) - one.terms.get("activations", 0.0), 0.0)
