"""Learning-rate schedules against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from packtrain.config.schema import TrainSection
from packtrain.train.schedule import factor


def curve(total: int = 100, **settings: Any) -> list[float]:
    section = TrainSection(**settings)
    return [factor(section, step, total) for step in range(total)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0.1, 10])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str, warmup: float) -> None:
    found = curve(schedule=schedule, warmup=warmup)
    assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(found) == 1.0


def test_cosine_and_linear_fall_to_the_minimum() -> None:
    cosine = curve(schedule="cosine", warmup=0, min_learning_rate=0.1)
    assert cosine[50] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert cosine == sorted(cosine, reverse=True) and cosine[-1] < 0.101
    linear = curve(schedule="linear", warmup=0)
    assert linear == pytest.approx([1 - i / 100 for i in range(100)])


def test_wsd_stays_and_falls_in_the_last_share() -> None:
    found = curve(schedule="wsd", warmup=0, decay=0.2)
    assert found[:80] == [1.0] * 80
    assert found[80:] == pytest.approx([(100 - i) / 21 for i in range(80, 100)])


def test_constant_stays() -> None:
    assert curve(schedule="constant", warmup=0) == [1.0] * 100
