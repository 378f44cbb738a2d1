"""What ends a run before it does harm, and what is only warned about."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch

from packtrain.data.batches import MicroBatch
from packtrain.parallel.world import World

STALL_SECONDS = 5.0
"""A step that waits longer for its batch is told about."""


def stalled(world: World, waited: float) -> str:
    """Which ranks waited how long for their batch. A collective."""
    waits = [(rank, float(str(seconds))) for rank, seconds in enumerate(world.gather(waited))]
    late = ", ".join(f"rank {rank} {seconds:.0f} s" for rank, seconds in waits if seconds > STALL_SECONDS)
    return f"the data came late ({late}); is the disk of the data cache slow, or the processor busy?"


class SpikeWatch:
    """Knows when a loss is far above those before it: twice their median, 0.5 nats more, and above each of them."""

    def __init__(self, window: int = 32, least: int = 8) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._least = least

    def usual_before(self, loss: float) -> float | None:
        """The median of the losses before ``loss`` where it is a spike, else None."""
        usual = median(self._losses) if len(self._losses) >= self._least else math.inf
        spike = loss > max(2 * usual, usual + 0.5) and loss > max(self._losses, default=math.inf)
        self._losses.append(loss)
        return usual if spike else None


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
