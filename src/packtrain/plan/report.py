"""A plan as a whole: what a recipe becomes on a machine, what it needs, how fast it is, and what else could run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe
from packtrain.plan.disk import DiskPlan, disk
from packtrain.plan.host import HostPlan, host, host_fits
from packtrain.plan.memory import TERMS, Peak, peak, recomputed_share
from packtrain.plan.parameters import parameters
from packtrain.plan.rank import Candidate, rank, usable
from packtrain.plan.remedies import Remedy, remedies
from packtrain.plan.speed import Speed, flops, speed

SHOWN = ("strategy", "shard_size", "zero_stage", "offload", "recompute", "compile")
"""Of the parallel section, what a plan states."""


@dataclass(frozen=True)
class Plan:
    """What a recipe will be and need.

    Attributes:
        recipe: resolved. candidates: what else could run, where that was asked for.
        remedies: what would fit, where nothing does.
    """

    recipe: Recipe
    facts: Facts
    peak: Peak
    host: HostPlan
    disk: DiskPlan
    speed: Speed | None
    candidates: list[Candidate]
    remedies: list[Remedy]

    @property
    def limit(self) -> float:
        return usable(self.facts)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.limit and self.host_fits

    @property
    def host_fits(self) -> bool:
        return host_fits(self.facts, self.host)

    def to_json(self) -> dict[str, Any]:
        recipe, found = self.recipe, parameters(self.recipe, self.facts.model)
        made: dict[str, Any] = {
            "machine": {
                "device": self.facts.device, "gpu": self.facts.gpu, "processes": self.facts.processes,
                "processes_per_node": self.facts.local_processes, "memory_bytes": self.facts.memory,
                "usable_bytes": round(self.limit), "host_memory_bytes": self.facts.host_memory,
            },
            "settings": settings(recipe),
            "parameters": {"model": self.facts.model.num_parameters, "trained": round(found.num_trained)},
            "memory": {
                "fits": self.peak.total <= self.limit,
                "moment": self.peak.moment,
                "total_bytes": round(self.peak.total),
                "terms": {name: round(size) for name, size in self.peak.terms.items()},
            },
            "host": {name: round(size) for name, size in asdict(self.host).items()} | {"fits": self.host_fits},
            "disk": {name: round(size) for name, size in asdict(self.disk).items()}
            | {"total": round(self.disk.total)},
            "rates": asdict(self.facts.rates) if self.facts.rates else None,
            "speed": _speed(self.speed),
            "needed_flops_per_token": round(flops(recipe, self.facts.model, recompute=0.0).total),
        }  # fmt: skip
        if self.candidates:
            made["candidates"] = [_candidate(one) for one in self.candidates]
        if self.remedies:
            made["remedies"] = [asdict(remedy) for remedy in self.remedies]
        return made


def plan_resolved(recipe: Recipe, facts: Facts) -> Plan:
    """What a recipe without ``auto`` needs."""
    micro, share = recipe.train.micro_batch_size, recomputed_share(recipe.parallel.recompute)
    assert isinstance(micro, int), "resolve comes first"
    one = peak(recipe, facts, micro, share)
    rate = speed(recipe, facts, micro, share)
    return Plan(recipe, facts, one, host(recipe, facts, one), disk(recipe, facts.model), rate, [], [])


def plan(recipe: Recipe, facts: Facts) -> Plan:
    """What ``auto`` makes of a recipe, with all else that could run; what would help where nothing fits.

    The recipe breaks no rule on this machine (``config.rules.check``).
    """
    candidates = rank(recipe, facts)
    helping = remedies(recipe, facts) if candidates[0].refused else []
    return replace(plan_resolved(candidates[0].recipe, facts), candidates=candidates, remedies=helping)


def settings(recipe: Recipe) -> dict[str, Any]:
    """What a plan decides or stands on."""
    return {
        "method": recipe.method.type,
        **{name: getattr(recipe.parallel, name) for name in SHOWN},
        "micro_batch_size": recipe.train.micro_batch_size,
        "batch_size": recipe.train.batch_size,
        "max_length": recipe.data.max_length,
        "optimizer": recipe.train.optimizer,
        "precision": recipe.train.precision,
    }


def _speed(found: Speed | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "tokens_per_second": round(found.tokens_per_second, 1),
        "step_seconds": round(found.step_seconds, 4),
        "seconds": {name: round(seconds, 5) for name, seconds in found.seconds.items()},
        "flops_per_token": {**{k: round(v) for k, v in asdict(found.flops).items()}, "total": round(found.flops.total)},
        "sent_bytes": round(found.sent),
        "assumes": found.source,
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "settings": settings(one.recipe),
        "total_bytes": round(one.peak.total),
        "tokens_per_second": round(one.speed.tokens_per_second, 1) if one.speed else None,
        "refused": one.refused,
    }


def named_terms(terms: dict[str, float]) -> list[tuple[str, float]]:
    """(what it is, bytes) of the terms that are there."""
    return [(TERMS[name], terms[name]) for name in TERMS if terms.get(name, 0) > 0]
