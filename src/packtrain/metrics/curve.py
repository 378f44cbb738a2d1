"""The loss curve of a run as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packtrain.metrics.events import latest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Losses(NamedTuple):
    """Losses by step; one that is no number is NaN."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, events: list[dict[str, Any]], kind: str) -> Losses:
        """Those of the events of one kind, ``step`` or ``eval``."""
        found = latest(events, kind)
        values = np.array([float(event["loss"]) for event in found])
        values[~np.isfinite(values)] = np.nan
        return cls(np.array([event["step"] for event in found]), values)


def draw_curve(events: list[dict[str, Any]], file: Path, title: str) -> None:
    """Write a PNG: the training loss of each step, its running mean, and the evaluations."""
    figure, axes = new_figure()
    train, evals = Losses.of(events, "step"), Losses.of(events, "eval")
    if train.steps.size:
        axes.plot(*train, color="#9db4c0", linewidth=1, label="training loss")
        axes.plot(train.steps, running_mean(train.values), color="#253237", linewidth=2, label="running mean")
    if evals.steps.size:
        axes.plot(*evals, "o-", color="#e07a5f", label="evaluation loss")
    axes.set_title(title)
    if train.steps.size or evals.steps.size:
        axes.legend()
    save(figure, file)


def new_figure(height: float = 4.5) -> tuple[Figure, Axes]:
    """An empty figure with labelled axes, for losses by step; ``height`` in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel="optimizer step", ylabel="loss (nats per labelled token)")
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Figure, file: Path) -> None:
    """Write a PNG that is, at any moment, the old one or the new one."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def running_mean(values: np.ndarray) -> np.ndarray:
    """Exponential mean over about a twentieth of the run, without the bias of its start; NaN where a value is."""
    decay = 1 - 1 / max(len(values) / 20, 4)
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        if np.isnan(value):
            out.append(value)
            continue
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return np.array(out)
