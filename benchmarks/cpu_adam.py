"""AdamW's step in host memory: torch's fused one beside DeepSpeed's CPU Adam, on the same tensors.

    python benchmarks/cpu_adam.py [--save]

Rates hang on memory more than on arithmetic; only the ratio in one run says something.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import results
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

WEIGHTS = 50_000_000
STEPS = 5


def rate(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> float:
    """Weights a second, after one step that allocates the states."""
    parameter = torch.nn.Parameter(torch.randn(WEIGHTS))
    parameter.grad = torch.randn(WEIGHTS) * 1e-3
    optimizer = make([parameter])
    optimizer.step()
    started = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    return WEIGHTS * STEPS / (time.perf_counter() - started)


def main() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="append to results.csv")
    save = parser.parse_args().save
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch, fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        "DeepSpeedCPUAdam": lambda p: DeepSpeedCPUAdam(p, lr=1e-4),
    }
    for name, make in kinds.items():
        found = rate(make) / 1e6
        print(f"{name}: {found:,.0f} million weights a second on {torch.get_num_threads()} threads")
        if save:
            results.add(
                "AdamW in host memory", name, {"rate": (found, "million weights/s")},
                {"weights": WEIGHTS, "threads": torch.get_num_threads()}, "python benchmarks/cpu_adam.py --save",
                results.versions(("torch", "deepspeed")),
            )  # fmt: skip


if __name__ == "__main__":
    main()
