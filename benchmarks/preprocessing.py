"""Rows per second from a file of chat rows to packed sequences with answer-only labels.

    for name in trl lf; do python -m venv ~/venv-$name; ~/venv-$name/bin/pip install torch==2.13.0; done
    ~/venv-trl/bin/pip install 'trl==1.16.*'
    ~/venv-lf/bin/pip install llamafactory==0.9.5
    python benchmarks/preprocessing.py --trl-python ~/venv-trl/bin/python --lf-python ~/venv-lf/bin/python

The tools take turns; each run is a new process with an empty cache and waits until the machine is idle.
Imports are not timed. One worker of a peer is its own process, not a pool of one, which is no faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from peers.prepared import MARK

HERE = Path(__file__).parent
LENGTH = 2048
Run = dict[str, float]
Metrics = dict[str, tuple[float, str]]
Side = tuple[str, int]  # a tool's name and its number of workers
SOURCE = HERE.parent.parent / "shared/data/instruct/alpaca_en_demo.json"


@dataclass(frozen=True)
class Tool:
    """One side of the comparison: its interpreter, script, the form of its rows and the packages to name."""

    name: str
    python: str
    script: str
    form: str
    packages: tuple[str, ...]
    single: int = 0  # what the script is given for one worker


def tools(args: argparse.Namespace) -> list[Tool]:
    """Packtrain and the peers whose interpreters are given."""
    stack = ("transformers", "tokenizers", "datasets")
    found = [Tool("packtrain", sys.executable, "prepare_packtrain.py", "pairs", ("packtrain", *stack[:2]), 1)]
    if args.trl_python:
        found.append(Tool("trl", args.trl_python, "prepare_trl.py", "pairs", ("trl", *stack)))
    if args.lf_python:
        packages = ("llamafactory", *stack)
        found.append(Tool("llamafactory", args.lf_python, "prepare_llamafactory.py", "alpaca", packages))
    return found


def write_rows(source: Path, count: int, folder: Path) -> dict[str, Path]:
    """``count`` rows in both forms: the source's rows over and over, with a counter so that all differ."""
    originals = json.loads(source.read_text(encoding="utf-8"))
    files = {form: folder / f"{form}.jsonl" for form in ("alpaca", "pairs")}
    with open(files["alpaca"], "wb") as alpaca, open(files["pairs"], "wb") as pairs:
        for number in range(count):
            turn, row = divmod(number, len(originals))
            for out, values in zip((alpaca, pairs), both_forms(originals[row], turn), strict=True):
                out.write(json.dumps(values, ensure_ascii=False).encode() + b"\n")
    return files


def both_forms(row: dict[str, str], turn: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row as alpaca and as prompt and completion, the same text."""
    task = row["instruction"] + (f" (variant {turn})" if turn else "")
    given, answer = row.get("input", ""), row["output"]
    user = {"role": "user", "content": f"{task}\n{given}" if given else task}
    pair = {"prompt": [user], "completion": [{"role": "assistant", "content": answer}]}
    return {"instruction": task, "input": given, "output": answer}, pair


def wait_until_idle(load: float, limit: float = 3600) -> None:
    """Sleep until the load average of one minute is below ``load``."""
    end = time.monotonic() + limit
    while os.getloadavg()[0] >= load:
        if time.monotonic() > end:
            raise SystemExit(f"the load stayed above {load}: nothing was measured")
        time.sleep(5)


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of the runs that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def measure(tool: Tool, workers: int, model: Path, rows: Path) -> Run:
    """One run. ``cpu``: its CPU seconds, imports included; ``others``: those of other processes meanwhile."""
    with tempfile.TemporaryDirectory(prefix="preprocessing") as cache:
        given = workers if workers > 1 else tool.single
        script = str(HERE / "peers" / tool.script)
        command = [tool.python, script, str(model), str(rows), str(given), cache, str(LENGTH)]
        busy, own = busy_seconds(), own_seconds()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        cpu = own_seconds() - own
        others = busy_seconds() - busy - cpu
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        raise SystemExit(f"{tool.name}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(line.removeprefix(MARK)) | {"cpu": cpu, "others": others}


def alternate(args: argparse.Namespace, sides: list[Tool], files: dict[str, Path]) -> dict[Side, list[Run]]:
    """All runs: in each repetition every tool with every number of workers."""
    runs: dict[Side, list[Run]] = {}
    for workers in args.workers * args.repetitions:
        for tool in sides:
            wait_until_idle(args.max_load)
            run = measure(tool, workers, args.model, files[tool.form])
            runs.setdefault((tool.name, workers), []).append(run)
            print(tool.name, workers, json.dumps(run), flush=True)
    return runs


def summary(runs: list[Run], count: int) -> Metrics:
    """The median rate with its spread, and the counts, in which no two runs may differ."""
    rates = [count / run["seconds"] for run in runs]
    counts = {(run["sequences"], run["tokens"], run["labelled"]) for run in runs}
    if len(counts) > 1:
        raise SystemExit(f"two runs of one tool differ: {counts}")
    sequences, tokens, labelled = counts.pop()
    return {
        "throughput": (statistics.median(rates), "rows/s"),
        "throughput, lowest": (min(rates), "rows/s"),
        "throughput, highest": (max(rates), "rows/s"),
        "packing efficiency": (tokens / (sequences * LENGTH), "share"),
        "real tokens": (tokens, "tokens"),
        "labelled tokens": (labelled, "tokens"),
    }


def disagreements(found: dict[Side, Metrics], count: int) -> list[str]:
    """Tools whose real or labelled tokens differ from those of Packtrain.

    TRL and LLaMA-Factory also label the newline that the template writes after the end-of-turn token, one
    token a row. Packtrain's last label is the end-of-turn token, where generation stops.
    """
    ours = next(iter(found.values()))
    wrong = []
    for (name, workers), metrics in found.items():
        extra = 0 if name == "packtrain" else count
        labelled = metrics["labelled tokens"][0] - extra
        if metrics["real tokens"] != ours["real tokens"] or labelled != ours["labelled tokens"][0]:
            wrong.append(f"{name}, {workers} workers: other tokens or labels than Packtrain")
    return wrong


def tool_versions(tool: Tool) -> str:
    """The versions in the tool's own environment."""
    code = "import sys, results; print(results.versions(tuple(sys.argv[1:])))"
    command = [tool.python, "-c", code, *tool.packages]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()


def save(args: argparse.Namespace, sides: list[Tool], found: dict[Side, Metrics]) -> None:
    """Append to results.csv."""
    command = "python benchmarks/preprocessing.py " + " ".join(sys.argv[1:])
    for tool in sides:
        known = tool_versions(tool)
        for workers in args.workers:
            metrics = found[tool.name, workers]
            configuration = {"rows": args.count, "max_length": LENGTH, "workers": workers}
            configuration["repetitions"] = args.repetitions
            results.add("preprocessing", tool.name, metrics, configuration, command, known)


def parsed() -> argparse.Namespace:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--trl-python", help="the interpreter of an environment with trl 1.16")
    parser.add_argument("--lf-python", help="the interpreter of an environment with llamafactory 0.9.5")
    parser.add_argument("--rows-from", type=Path, default=SOURCE, help="a JSON list of alpaca rows")
    parser.add_argument("--count", type=int, default=100_000, help="rows")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--max-load", type=float, default=0.6, help="no run starts above this load average")
    parser.add_argument("--model", type=Path, help="a folder with a tokenizer; default: the demo model")
    parser.add_argument("--save", action="store_true", help="append to results.csv")
    args = parser.parse_args()
    if not args.model:
        from packtrain.models.demo import demo_model

        args.model = demo_model()
    return args


def main() -> None:
    args = parsed()
    sides = tools(args)
    with tempfile.TemporaryDirectory(prefix="rows") as folder:
        files = write_rows(args.rows_from, args.count, Path(folder))
        runs = alternate(args, sides, files)
    found = {side: summary(measured, args.count) for side, measured in runs.items()}
    for (name, workers), metrics in found.items():
        values = ", ".join(f"{metric} {value:.10g}" for metric, (value, _) in metrics.items())
        print(f"{name}, workers {workers}: {values}")
    print("\n".join(disagreements(found, args.count)) or "all tools agree on the tokens and the labels")
    if args.save:
        save(args, sides, found)


if __name__ == "__main__":
    main()
