"""The loss curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from packtrain.metrics.events import Tail


def draw_curve(events: list[dict[str, Any]], file: Path, title: str) -> None:
    """Write a PNG: the training loss of each step, its running mean, and the evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, evals = Tail.latest(events, "step"), Tail.latest(events, "eval")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if steps:
        x = np.array([e["step"] for e in steps])
        y = np.array([float(e["loss"]) for e in steps])
        axes.plot(x, y, color="#9db4c0", linewidth=1, label="training loss")
        axes.plot(x, _smoothed(y), color="#253237", linewidth=2, label="running mean")
    if evals:
        axes.plot(
            [e["step"] for e in evals],
            [float(e["loss"]) for e in evals],
            "o-",
            color="#e07a5f",
            label="evaluation loss",
        )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per labelled token)", title=title)
    axes.grid(alpha=0.3)
    if steps or evals:
        axes.legend()
    figure.savefig(file)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Exponential mean over about a twentieth of the run, without the bias of its start."""
    decay = 1 - 1 / max(len(values) / 20, 4)
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return np.array(out)
