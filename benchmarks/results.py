"""benchmarks/results.csv: every figure with what it was measured on and the command that made it."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("results.csv")
FIELDS = [
    "date",
    "benchmark",
    "tool",
    "metric",
    "value",
    "unit",
    "hardware",
    "versions",
    "commit",
    "configuration",
    "command",
]


def hardware() -> str:
    """The GPU's name, or the processor's with its cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def versions(names: tuple[str, ...] = ("torch", "transformers", "peft")) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=FILE.parent
    )
    return done.stdout.strip() or "unknown"


def add(benchmark: str, tool: str, metrics: dict[str, tuple[float, str]], configuration: dict[str, Any], command: str,
        tool_versions: str | None = None) -> None:  # fmt: skip
    """Append one row for each of ``metrics`` (name -> value, unit)."""
    new = not FILE.exists()
    with open(FILE, "a", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, FIELDS)
        if new:
            writer.writeheader()
        for metric, (value, unit) in metrics.items():
            writer.writerow({
                "date": datetime.now(UTC).strftime("%Y-%m-%d"), "benchmark": benchmark, "tool": tool, "metric": metric,
                "value": round(value, 4), "unit": unit, "hardware": hardware(), "versions": tool_versions or versions(),
                "commit": commit(), "configuration": json.dumps(configuration, sort_keys=True), "command": command,
            })  # fmt: skip
