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
from shapes import shape_of, write_rows

WARMUP = 4
OF_SPEED = (
    ("planned_tokens_per_second", "planned throughput", "tokens/s per GPU"),
    ("mfu", "MFU of the published peak", "of 1"),
    ("mfu_of_matmul_rate", "MFU of the matmul rate", "of 1"),
)


def recipe(model: Path, data: str, length: int, steps: int, packing: bool) -> dict:
    return {
        "model": {"path": str(model)},
        "data": {"train": [data], "eval": 0.0, "max_length": length, "packing": packing},
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
        yaml.safe_dump(
            recipe(args.model, f"{work}/rows.py:rows", args.length, args.steps, args.rows != str(args.length))
        )
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
    planned = plan(work / "runs/run/recipe.yaml")
    shutil.rmtree(work)
    seconds = statistics.median(e["seconds"] for e in steps)
    tokens = statistics.median(e["tokens"] for e in steps)
    return {
        "tokens_per_second_per_gpu": tokens / seconds / start["world_size"],
        "step_seconds": seconds,
        "peak_gib": steps[-1]["memory"] / 2**30,
        "planned_gib": planned["memory"]["total_bytes"] / 2**30,
        **speed_figures(planned, tokens / seconds / start["world_size"]),
        "parts": {part: statistics.median(e["parts"][part] for e in steps) for part in steps[-1]["parts"]},
        "host_gib": host.peak / 2**30,
        "load_seconds": start["seconds"],
        "loss": steps[-1]["loss"],
        "micro_batch_size": resolved["train"]["micro_batch_size"],
        "recompute": resolved["parallel"]["recompute"],
        "strategy": start["strategy"],
    }


def plan(resolved: Path) -> dict:
    """What `packtrain plan --json` says of the run as it was."""
    command = [sys.executable, "-m", "packtrain", "plan", str(resolved), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def speed_figures(planned: dict, rate: float) -> dict[str, float]:
    """The planned rate, and the FLOPs that the method needs (what is computed again is not counted) over two rates."""
    if planned["speed"] is None:
        return {}
    from packtrain.plan.rates import peak_flops

    work = rate * planned["needed_flops_per_token"]
    found = {"planned_tokens_per_second": planned["speed"]["tokens_per_second"]}
    if peak := peak_flops(planned["machine"]["gpu"]):
        found["mfu"] = work / peak
    return found | {"mfu_of_matmul_rate": work / planned["rates"]["matmul"]}


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
            **{f"time of {part}": (seconds, "s") for part, seconds in found["parts"].items()},
        }
        for key, metric, unit in OF_SPEED:
            if key in found:
                metrics[metric] = (found[key], unit)
        configuration = {k: found[k] for k in ("micro_batch_size", "recompute", "strategy")} | {
            "overrides": args.overrides,
            "rows": args.rows,
            "length": args.length,
            "shape": shape_of(args.model),
        }
        results.add(
            args.save, "packtrain", metrics, configuration, "python benchmarks/train_speed.py " + " ".join(sys.argv[1:])
        )


if __name__ == "__main__":
    main()
