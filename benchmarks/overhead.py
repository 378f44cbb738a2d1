"""What Packtrain costs beside the model's own time, on a CPU: the loop, the event log, the start of the command.

    python benchmarks/overhead.py [--save]

The loop's share is 1 - (forward + backward + clip + update) / seconds of a step of `packtrain train`. The model is
small (two blocks of 256), so that a step takes about a tenth of a second: the smaller the model, the larger the share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import results
from shapes import byte_tokenizer, write_rows

STEPS, WARMUP = 60, 10
HELP_ROUNDS = 15
EVENTS = 20_000
LENGTH, ROWS, VOCABULARY = 256, 4, 512


def help_seconds() -> float:
    """The median of `packtrain --help`, in a process of its own each time."""
    command = [sys.executable, "-m", "packtrain", "--help"]
    taken = []
    for _ in range(HELP_ROUNDS + 1):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def event_seconds(folder: Path, event: dict) -> float:
    """Of one step event, written and flushed."""
    from packtrain.metrics.events import EventLog

    values = {key: value for key, value in event.items() if key not in ("event", "time")}
    log = EventLog(folder / "events.jsonl")
    started = time.perf_counter()
    for _ in range(EVENTS):
        log.write("step", **values)
    taken = (time.perf_counter() - started) / EVENTS
    log.close()
    return taken


def steps(folder: Path) -> list[dict]:
    """The step events of a run of the command, after the warm-up."""
    make_model(folder / "model")
    write_rows(folder / "rows.py", ROWS * (STEPS + 1), str(LENGTH), VOCABULARY)
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"train": [f"{folder}/rows.py:rows"], "eval": 0.0, "max_length": LENGTH, "packing": False},
        "train": {"max_steps": STEPS, "batch_size": ROWS, "micro_batch_size": ROWS},
        "method": {"type": "full"},
        "launch": {"device": "cpu", "processes": 1},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "never"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "packtrain", "train", str(folder / "recipe.yaml")]
    words = [f"output.folder={folder}/runs", "output.name=run"]
    subprocess.run([*command, *words], check=True, capture_output=True)
    events = [json.loads(line) for line in (folder / "runs/run/events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "step"][WARMUP:]


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="append to results.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = steps(Path(folder))
        an_event = event_seconds(Path(folder), found[-1])
    whole = statistics.median(event["seconds"] for event in found)
    waited = statistics.median(event["parts"]["data"] / event["seconds"] for event in found)
    outside = [1 - sum(s for part, s in e["parts"].items() if part != "data") / e["seconds"] for e in found]
    metrics = {
        "step": (whole * 1e3, "ms"),
        "loop beside the model": (100 * statistics.median(outside), "% of the step"),
        "waiting for data": (100 * waited, "% of the step"),
        "a step event": (an_event * 1e6, "us"),
        "packtrain --help": (help_seconds(), "s"),
    }
    for name, (value, unit) in metrics.items():
        print(f"{name:24}{value:10.3f} {unit}")
    if args.save:
        configuration = {"length": LENGTH, "rows": ROWS, "steps": STEPS}
        results.add("overhead on the CPU", "packtrain", metrics, configuration, "python benchmarks/overhead.py --save")


if __name__ == "__main__":
    main()
