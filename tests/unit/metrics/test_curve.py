from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.metrics.compare import COLORS, RunCurves, draw_comparison
from packtrain.metrics.curve import Losses, draw_curve, running_mean
from packtrain.metrics.events import latest


def step(number: int, loss: float | str, kind: str = "step") -> dict[str, Any]:
    return {"event": kind, "step": number, "loss": loss}


def start(number: int) -> dict[str, Any]:
    return {"event": "start", "step": number, "total_steps": 9}


def test_a_resume_abandons_what_came_after_its_step() -> None:
    first = [start(0), step(1, 1.0), step(2, 2.0), step(2, 2.5, "eval"), step(3, 3.0), step(4, 4.0, "eval")]
    events = [*first, start(2), step(3, 3.5)]
    assert [(e["step"], e["loss"]) for e in latest(events, "step")] == [(1, 1.0), (2, 2.0), (3, 3.5)]
    assert [(e["step"], e["loss"]) for e in latest(events, "eval")] == [(2, 2.5)]
    assert latest([*events, start(0)], "step") == []


def test_losses_that_are_no_numbers_are_gaps() -> None:
    found = Losses.of([step(1, 2.0), step(2, "nan"), step(3, "inf"), step(4, 1.0)], "step")
    assert found.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(found.values, [2.0, np.nan, np.nan, 1.0])
    mean = running_mean(found.values)
    assert np.isnan(mean).tolist() == [False, True, True, False]
    # decay 3/4: the first value weighs 3/16, the second 1/4
    assert mean[3] == pytest.approx((2.0 * 3 / 16 + 1.0 / 4) / (3 / 16 + 1 / 4))


def test_every_run_of_a_comparison_is_seen(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    falling = [step(n, 3 / n) for n in range(1, 50)] + [step(n, 3 / n, "eval") for n in (10, 40)]
    rising = [step(n, "nan" if n > 40 else 0.05 * n) for n in range(1, 90)]
    runs = [
        RunCurves.of("A  " + "x" * 200, falling),
        RunCurves.of("B  学习率 $a_b$ _c", rising),
        RunCurves.of("C  nothing", []),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no glyph of a name may end in a warning
        draw_comparison(runs, tmp_path / "curves.png")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    pixels = (image.imread(tmp_path / "curves.png")[..., :3] * 255).round().astype(int)
    for color in COLORS[:3]:
        wanted = list(bytes.fromhex(color[1:]))
        assert (np.abs(pixels - wanted).max(axis=-1) <= 2).sum() > 30, f"nothing is drawn in {color}"
    assert pixels.shape[1] == 960, "a long name widens nothing"


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "curve.png").mkdir()
    with pytest.raises(OSError):
        draw_curve([step(1, 1.0)], tmp_path / "curve.png", "run")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
