"""Every setting that could run a recipe, the fastest that fits first, and why the others do not.

What the recipe gives is kept; what it leaves to ``auto`` is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packtrain.config.facts import Facts
from packtrain.config.resolve import resolve
from packtrain.config.rules import first_error
from packtrain.config.schema import Recipe
from packtrain.plan.host import host, host_fits
from packtrain.plan.memory import TERMS, Peak, peak, recomputed_share
from packtrain.plan.speed import Speed, speed

_TOKENS = 16_384  # of a micro-batch: matrix products are as fast as they get
_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_CONTEXT = 1.0 * 2**30  # what CUDA, its libraries and NCCL keep outside of torch's allocator
_PACKED = 0.95  # of the rest: blocks of memory do not pack without gaps
_KEPT_BY_MALLOC = 0.6  # of the host's: glibc gives little back of what was freed (docs/planning.md)


def usable(facts: Facts) -> float:
    """Bytes of one GPU that a plan may fill; on the CPU of a process's share of the host."""
    if facts.device == "cpu":
        return facts.memory * _KEPT_BY_MALLOC / facts.local_processes
    return (facts.memory - _CONTEXT) * _PACKED


@dataclass(frozen=True)
class Candidate:
    """One way to run a recipe.

    Attributes:
        recipe: resolved. refused: why it cannot run; empty: it can.
        speed: None where the machine's rates are not known.
    """

    recipe: Recipe
    peak: Peak
    speed: Speed | None
    refused: str

    @property
    def order(self) -> tuple[bool, bool, float, float]:
        """Those that fit, fastest first; those that need too much, smallest first; those that break a rule."""
        if self.refused:
            return True, not self.peak.terms, self.peak.total, 0.0
        rate = self.speed.tokens_per_second if self.speed else 0.0
        return False, False, -rate, self.peak.total


def rank(recipe: Recipe, facts: Facts) -> list[Candidate]:
    """The best of each strategy, shard size and micro-batch, fastest first, those that cannot run last."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for spread in _spreads(recipe, facts):
        resolved = resolve(spread, facts)
        if broken := first_error(spread, facts):
            reason = f"{broken.message}; {broken.mend}"
            best[_key(resolved, 0)] = Candidate(resolved, Peak("", {}), None, reason)
            continue
        for micro in micro_batches(resolved, facts):
            best[_key(resolved, micro)] = _fastest(resolved, facts, micro)
    return sorted(best.values(), key=lambda candidate: candidate.order)


def micro_batches(recipe: Recipe, facts: Facts) -> list[int]:
    """Rows of a forward pass that are worth a try, the largest first."""
    assert isinstance(recipe.data.max_length, int)
    given = recipe.train.micro_batch_size
    if given != "auto":
        return [given]
    share = -(-recipe.train.batch_size // facts.processes)
    wanted = max(1, min(share, _TOKENS // recipe.data.max_length))
    return sorted({wanted, -(-wanted // 2), 1}, reverse=True)


def _key(recipe: Recipe, micro: int) -> tuple[Any, ...]:
    parallel = recipe.parallel
    return parallel.strategy, parallel.shard_size, parallel.zero_stage, parallel.offload, micro


def _fastest(resolved: Recipe, facts: Facts, micro: int) -> Candidate:
    """The least recompute that fits: it only ever costs time."""
    made = resolved.model_copy(deep=True)
    made.train.micro_batch_size = micro
    for recompute in _recomputes(resolved):
        share = recomputed_share(recompute)
        one = peak(made, facts, micro, share)
        fits = one.total <= usable(facts)
        if fits:
            break
    made.parallel.recompute = recompute
    refused = _short_of_host(made, one, facts) if fits else _too_much(one, facts)
    return Candidate(made, one, speed(made, facts, micro, share), refused)


def _short_of_host(recipe: Recipe, one: Peak, facts: Facts) -> str:
    found = host(recipe, facts, one)
    if host_fits(facts, found):
        return ""
    needed, there = max(found.training, found.loading) / 2**30, facts.host_memory / 2**30
    return f"over {there:.1f} GiB of host memory by {needed - there:.1f}"


def _recomputes(recipe: Recipe) -> tuple[Any, ...]:
    if recipe.parallel.recompute != "auto":
        return (recipe.parallel.recompute,)
    return (1.0,) if recipe.parallel.offload_activations else _SHARES


def _too_much(one: Peak, facts: Facts) -> str:
    largest = max(one.terms, key=lambda name: one.terms[name])
    needed, there = one.total / 2**30, usable(facts) / 2**30
    return f"over {there:.1f} GiB by {needed - there:.1f}; {one.terms[largest] / 2**30:.1f} are {TERMS[largest]}"


def _spreads(recipe: Recipe, facts: Facts) -> Iterator[Recipe]:
    """The recipe with each strategy and shard size that it leaves open."""
    for strategy in _strategies(recipe, facts):
        for size in _shard_sizes(recipe, facts, strategy):
            made = recipe.model_copy(deep=True)
            made.parallel.strategy, made.parallel.shard_size = strategy, size
            yield made


def _strategies(recipe: Recipe, facts: Facts) -> list[Any]:
    if recipe.parallel.strategy != "auto":
        return [recipe.parallel.strategy]
    if recipe.parallel.offload != "none" or recipe.parallel.shard_size != "auto":
        return ["fsdp"]
    return ["ddp", "fsdp"] if facts.processes > 1 else ["single", "fsdp"]


def _shard_sizes(recipe: Recipe, facts: Facts, strategy: str) -> list[Any]:
    """All processes; and, on several nodes, those of one node."""
    given, local = recipe.parallel.shard_size, facts.local_processes
    if strategy != "fsdp" or given != "auto":
        return [given]
    divides = facts.processes % local == 0 and 1 < local < facts.processes
    return [facts.processes, local] if divides else [facts.processes]
