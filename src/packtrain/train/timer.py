"""Where the time of a step goes, by the device's own clock. Nothing waits for it."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise

import torch

_Moment = float | torch.cuda.Event


class StepTimer:
    """The seconds of the parts of a step: ``forward``, ``backward``, ``clip`` (and what the ranks agree on) and
    ``update``. Collectives count where they are waited for.

    On a GPU the moments are events in its stream, read when they have passed: work is only queued, so the host's clock
    would show where it had to wait, not what took long.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: deque[list[tuple[str, _Moment]]] = deque(maxlen=2)

    def begin(self) -> None:
        """A step begins."""
        self._steps.append([("", self._now())])

    def end(self, part: str) -> None:
        """``part`` ends; it began where the part before it ended. A part may come several times."""
        self._steps[-1].append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """By part, of the newest step that the device is done with: on a GPU mostly the one before."""
        for marks in reversed(self._steps):
            last = marks[-1][1]
            if isinstance(last, float) or last.query():
                return self._parts(marks)
        return {}

    def _parts(self, marks: list[tuple[str, _Moment]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for (_, before), (part, after) in pairwise(marks):
            found[part] = found.get(part, 0.0) + _between(before, after)
        return found

    def _now(self) -> _Moment:
        if not self._on_gpu:
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment


def _between(before: _Moment, after: _Moment) -> float:
    if isinstance(before, float):
        assert isinstance(after, float)
        return after - before
    assert not isinstance(after, float)
    return float(before.elapsed_time(after)) / 1000
