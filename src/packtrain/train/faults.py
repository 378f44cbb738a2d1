"""What ends a run before it does harm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from packtrain.data.batches import MicroBatch
from packtrain.parallel.world import World


class NonFiniteError(Exception):
    """A loss or gradient norm that is not a number, seen before the update.

    The last checkpoint is as good as it was: the weights were not touched.
    """

    @classmethod
    def check(
        cls,
        world: World,
        step: int,
        loss: float,
        norm: float,
        own_loss: torch.Tensor,
        micro_batches: Sequence[MicroBatch],
    ) -> None:
        """Raise on every rank, naming the step, the ranks whose own loss is at fault, and their rows."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        rows = sorted({int(i) for micro in micro_batches for i in micro.row_ids})
        found = world.gather((bool(torch.isfinite(own_loss)), rows))
        culprits = [f"rank {r}, rows {_short(part[1])}" for r, part in enumerate(found) if not part[0]]  # type: ignore[index]
        where = "; ".join(culprits) or "the loss is finite on every rank, the gradient is not"
        raise cls(
            f"step {step + 1}: loss {loss}, gradient norm {norm} ({where}). The weights were not updated; "
            "lower train.learning_rate, or look at these rows with `packtrain data`."
        )


def _short(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
