"""Host memory of one node, in bytes: anonymous memory, which no other process shares."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import Facts
from packtrain.config.resolve import stored_bytes
from packtrain.config.schema import Recipe
from packtrain.plan.activations import width
from packtrain.plan.memory import Peak, sharding, state_bytes
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
    if offload == "none":
        return HostPlan(base + processes * _PIECE, base)
    offloaded = found.num_trained * (8 + state_bytes(recipe))  # fp32 weights and gradients
    if recipe.parallel.strategy == "deepspeed":
        offloaded *= _DEEPSPEED_COPIES
    weights = 0.0
    if offload == "params":
        weights = found.frozen.total * stored_bytes(recipe) + found.trained.total * width(recipe)
    there = base + processes * (offloaded / spread.states + weights / spread.weights)
    if recipe.parallel.offload_dir:
        there -= processes * found.num_trained * 4 * 3 / spread.states
    return HostPlan(max(there, base + processes * _PIECE), there)
