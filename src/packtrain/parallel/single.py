"""One process, nothing spread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.parallel.strategy import Strategy

if TYPE_CHECKING:
    from packtrain.models.causal_lm import CausalLMWithLoss


class Single(Strategy):
    def shard(self, model: CausalLMWithLoss) -> None:
        """Nothing to spread."""
