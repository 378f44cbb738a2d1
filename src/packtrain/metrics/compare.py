"""The loss curves of several runs in one picture."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.metrics.curve import Losses, new_figure, running_mean, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
"""Okabe and Ito's, which colour-blind readers tell apart, with grey for black and without the pale yellow."""
_STYLES, _MARKERS = ("-", "--", ":", "-."), "os^Dv*P"
_NAME_LENGTH = 70
_KEY = "lines: running mean of the training loss; marks: evaluations"
_FONTS = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Micro Hei",
    "Droid Sans Fallback", "Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Malgun Gothic", "Noto Sans",
)  # fmt: skip
"""Asked in turn for each character of a name, as far as they are installed."""


@dataclass(frozen=True)
class RunCurves:
    """One run's losses and what the legend calls it."""

    label: str
    train: Losses
    evals: Losses

    @classmethod
    def of(cls, label: str, events: list[dict[str, Any]]) -> RunCurves:
        return cls(label, Losses.of(events, "step"), Losses.of(events, "eval"))


def draw_comparison(runs: Sequence[RunCurves], file: Path) -> None:
    """Write a PNG: each run's training loss, faint, its running mean, and its evaluations."""
    figure, axes = new_figure(4.5 + 0.2 * len(runs))
    for number, run in enumerate(runs):
        _draw(axes, run, number)
    # Below the axes: a long name would cover the curves.
    legend = figure.legend(
        loc="outside lower left", frameon=False, fontsize=8, title=_KEY, title_fontsize=8, alignment="left"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
        text.set_fontfamily(_installed())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the run's letter still tells which it is
        save(figure, file)


def _draw(axes: Axes, run: RunCurves, number: int) -> None:
    color, style = COLORS[number % len(COLORS)], _STYLES[number // len(COLORS) % len(_STYLES)]
    marker, mean = _MARKERS[number % len(_MARKERS)], running_mean(run.train.values)
    axes.plot(*run.train, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(run.train.steps, mean, style, color=color, linewidth=2, label=_label(run))
    axes.plot(*run.evals, marker, color=color, markeredgecolor="white", markersize=8)


def _label(run: RunCurves) -> str:
    """The run's label, shortened in its middle."""
    name, half = run.label, _NAME_LENGTH // 2
    if len(name) > _NAME_LENGTH:
        name = f"{name[:half]}…{name[-half:]}"
    return name if run.train.steps.size else f"{name} (no steps)"


def _installed() -> list[str]:
    from matplotlib.font_manager import fontManager

    names = {font.name for font in fontManager.ttflist}
    return [font for font in _FONTS if font in names]
