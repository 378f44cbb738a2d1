"""What a run will write: bytes on the disk of its run folder."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import ModelFacts
from packtrain.config.schema import Recipe
from packtrain.plan.memory import stored_state_bytes
from packtrain.plan.parameters import parameters

_LOGS = 8 << 20  # events, logs and the curve


@dataclass(frozen=True)
class DiskPlan:
    """Bytes. ``checkpoints``: how many of them exist at once, the one that is being written included."""

    checkpoint: float
    checkpoints: int
    final: float

    @property
    def total(self) -> float:
        return self.checkpoint * self.checkpoints + self.final + _LOGS


def disk(recipe: Recipe, model: ModelFacts) -> DiskPlan:
    """The most that a run folder holds; ``recipe`` is resolved."""
    trained = parameters(recipe, model).num_trained
    saving = recipe.checkpoint.every != "never"
    return DiskPlan(
        checkpoint=trained * stored_state_bytes(recipe),
        checkpoints=recipe.checkpoint.keep + 1 if saving else 1,  # a stop writes one all the same
        final=trained * 4.0 if recipe.method.is_adapter else model.num_parameters * 2.0,
    )
