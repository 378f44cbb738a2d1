"""Tokens per second and peak memory of `packtrain train` on a random-weight model.

    python benchmarks/train_speed.py MODEL_FOLDER --rows 4096 [key.path=value ...]

Runs the command itself, reads its events, and prints (with --save: stores) the median after the warm-up steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import results
from shapes import write_rows

WARMUP = 4


def recipe(model: Path, data: str, length: int, steps: int) -> dict:
    return {
        "model": {"path": str(model)},
        "data": {"train": [data], "eval": 0.0, "max_length": length},
        "train": {"max_steps": steps, "batch_size": 4, "warmup": 0, "schedule": "constant"},
        "method": {"type": "lora", "rank": 16},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "never"},
    }


def run(args: argparse.Namespace) -> dict:
    work = Path(tempfile.mkdtemp(prefix="speed"))
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    write_rows(work / "rows.py", args.count, args.rows, vocabulary)
    (work / "speed.yaml").write_text(
        yaml.safe_dump(recipe(args.model, f"{work}/rows.py:rows", args.length, args.steps))
    )
    command = [
        sys.executable,
        "-m",
        "packtrain",
        "train",
        str(work / "speed.yaml"),
        f"output.folder={work}/runs",
        "output.name=run",
    ]
    with HostMemory() as host:
        done = subprocess.run([*command, *args.overrides], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(args.overrides)}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        )
    events = [json.loads(line) for line in (work / "runs/run/events.jsonl").read_text().splitlines()]
    start = next(e for e in events if e["event"] == "start")
    steps = [e for e in events if e["event"] == "step"][WARMUP:]
    resolved = yaml.safe_load((work / "runs/run/recipe.yaml").read_text())
    foreseen = foreseen_memory(work / "runs/run/recipe.yaml")
    shutil.rmtree(work)
    seconds = statistics.median(e["seconds"] for e in steps)
    tokens = statistics.median(e["tokens"] for e in steps)
    return {
        "tokens_per_second_per_gpu": tokens / seconds / start["world_size"],
        "step_seconds": seconds,
        "peak_gib": steps[-1]["memory"] / 2**30,
        "planned_gib": foreseen / 2**30,
        "host_gib": host.peak / 2**30,
        "load_seconds": start["seconds"],
        "loss": steps[-1]["loss"],
        "micro_batch_size": resolved["train"]["micro_batch_size"],
        "recompute": resolved["parallel"]["recompute"],
        "strategy": start["strategy"],
    }


def foreseen_memory(resolved: Path) -> float:
    """What the plan says of a process's peak, in bytes."""
    from packtrain.config import load_recipe
    from packtrain.launch.facts import gather_facts
    from packtrain.plan.savings import planned

    recipe = load_recipe(resolved)
    return planned(recipe, gather_facts(recipe, recipe.launch.processes))


class HostMemory:
    """The most that the machine's used memory grew meanwhile, in bytes: nothing else should run on it."""

    def __enter__(self) -> HostMemory:
        self.peak, self._ended = 0, threading.Event()
        self._before = psutil.virtual_memory().available
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self.peak = max(self.peak, self._before - psutil.virtual_memory().available)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rows", default="4096", help="tokens of a row, a number or an expression over `random`")
    parser.add_argument("--length", type=int, default=4096, help="data.max_length")
    parser.add_argument("--count", type=int, default=160, help="rows")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--save", metavar="NAME", help="append to results.csv under this name")
    args = parser.parse_intermixed_args()
    found = run(args)
    print("RESULT", json.dumps({"overrides": args.overrides, "rows": args.rows, **found}), flush=True)
    if args.save:
        metrics = {
            "throughput": (found["tokens_per_second_per_gpu"], "tokens/s per GPU"),
            "peak memory": (found["peak_gib"], "GiB"),
            "planned memory": (found["planned_gib"], "GiB"),
            "host memory": (found["host_gib"], "GiB"),
        }
        configuration = {k: found[k] for k in ("micro_batch_size", "recompute", "strategy")} | {
            "overrides": args.overrides,
            "rows": args.rows,
        }
        results.add(
            args.save, "packtrain", metrics, configuration, "python benchmarks/train_speed.py " + " ".join(sys.argv[1:])
        )


if __name__ == "__main__":
    main()
