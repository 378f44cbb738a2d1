"""The parts of a step and their seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from packtrain.train import timer
from packtrain.train.timer import StepTimer


def clocked(monkeypatch: pytest.MonkeyPatch, *moments: float) -> StepTimer:
    ticks: Iterator[float] = iter(moments)
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(ticks))
    return StepTimer(torch.device("cpu"))


def test_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = clocked(monkeypatch, 10.0, 11.0, 13.0, 14.0, 17.0, 17.5, 18.0)
    assert found.seconds() == {}
    found.begin()
    for part in ("forward", "backward", "forward", "backward", "clip", "update"):
        found.end(part)
    assert found.seconds() == {"forward": 2.0, "backward": 5.0, "clip": 0.5, "update": 0.5}


def test_the_newest_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = clocked(monkeypatch, 0.0, 1.0, 100.0, 103.0)
    found.begin()
    found.end("forward")
    found.begin()
    found.end("forward")
    assert found.seconds() == {"forward": 3.0}


class Event:
    """A moment on a GPU, in milliseconds, which may not have come yet."""

    def __init__(self, at: float, passed: bool) -> None:
        self.at, self.passed = at, passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        assert self.passed and other.passed, "it would be waited for"
        return other.at - self.at


def test_on_a_gpu_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [Event(0, True), Event(2000, True), Event(3000, True), Event(5000, False)]
    found = StepTimer(torch.device("cuda"))
    monkeypatch.setattr(found, "_now", lambda: moments.pop(0))
    found.begin()
    found.end("forward")
    assert found.seconds() == {"forward": 2.0}
    late = moments[1]
    found.begin()
    found.end("forward")
    assert found.seconds() == {"forward": 2.0}  # the newer step is still under way
    late.passed = True
    assert found.seconds() == {"forward": 2.0}  # 5000 - 3000
