"""``packtrain plan --calibrate``: what this machine's parts reach, beside what is published of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from packtrain.cli.plan import show_plan
from packtrain.config import Recipe, load_recipe
from packtrain.errors import UserError
from packtrain.launch.calibrate import Kept, calibrate
from packtrain.launch.machine import Machine
from packtrain.plan.rates import published

STOPPED = 130
_PARTS = {
    "matmul": ("matrix products", "TFLOP/s", 1e12),
    "attention": ("attention, forward and backward", "TFLOP/s", 1e12),
    "memory": ("GPU memory, read and written", "GB/s", 1e9),
    "link": ("sent to the other GPUs by each", "GB/s", 1e9),
    "host": ("between GPU and host memory", "GB/s", 1e9),
    "host_memory": ("the optimizer in host memory, a process", "GB/s", 1e9),
    "disk": ("a file written to disk", "GB/s", 1e9),
}


def run_calibration(recipe_path: str | None, overrides: Sequence[str], machine: Machine, as_json: bool) -> int:
    """Measure, keep, print; then the plan of the recipe, if one is given. 0, or the status of its plan.

    Raises:
        UserError: there is nothing to measure, or another machine was described.
    """
    if not machine.is_this:
        raise UserError("--calibrate", "measures this machine, and another is described", "leave the other options out")
    recipe = load_recipe(recipe_path, overrides) if recipe_path is not None else None
    kept = calibrate(recipe, lambda line: print(line, file=sys.stderr, flush=True))
    if kept is None:
        return STOPPED
    if recipe_path is None or recipe is None:
        print(json.dumps(as_dict(kept), indent=2) if as_json else _shown(kept, recipe))
        return 0
    if not as_json:
        print(_shown(kept, recipe) + "\n")
    return show_plan(recipe_path, overrides, machine, every=False, as_json=as_json)


def as_dict(kept: Kept) -> dict[str, Any]:
    """For ``--json``: the measurement, and what is published of the GPU (null: nothing)."""
    known = published(kept.gpu)
    return {
        "gpu": kept.gpu,
        "file": str(kept.file),
        **kept.calibration.model_dump(mode="json"),
        "published": asdict(known) if known else None,
    }


def _shown(kept: Kept, recipe: Recipe | None) -> str:
    made, known = kept.calibration, published(kept.gpu)
    model = "Llama 3 8B" if recipe is None else recipe.model.path
    lines = [
        f"{made.num_gpus} x {kept.gpu}, at the shapes of {model} in rows of {made.shapes.length:,} tokens",
        f"{'':40}{'measured':>10}{'published':>11}",
    ]
    for name, (what, unit, scale) in _PARTS.items():
        measured, expected = getattr(made.measured, name), getattr(known, name, 0)
        if measured is not None:
            other = f"{expected / scale:,.0f}" if expected else ""
            lines.append(f"  {what:38}{measured / scale:>10,.{0 if measured >= 10 * scale else 1}f}{other:>11} {unit}")
    return "\n".join([*lines, f"kept in {kept.file}"])
