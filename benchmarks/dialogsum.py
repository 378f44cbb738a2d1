"""Learning on data nobody here wrote: ROUGE of SmolLM2 on DialogSum's test dialogues before and after training.

    python benchmarks/dialogsum.py DATA_FOLDER [--save]

DATA_FOLDER holds dev.jsonl and test.jsonl of DialogSum (https://github.com/cylnlp/dialogsum). Trains on dev by the
recipe beside this file, then compares the untrained and the trained model on the first 50 dialogues of test.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import results

RECIPE = Path(__file__).with_suffix(".yaml")


def measure(data: Path, work: Path) -> dict[str, Any]:
    """Train and score; ROUGE before and after, in percent, and the seconds of training."""
    values = yaml.safe_load(RECIPE.read_text())
    for part in ("train", "eval"):
        for entry in values["data"][part]:
            entry["path"] = str((data / entry["path"]).absolute())
    values["output"] = {"folder": str(work / "runs"), "name": "dialogsum"}
    recipe = work / "dialogsum.yaml"
    recipe.write_text(yaml.safe_dump(values))
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "packtrain", "train", str(recipe)], check=True)
    seconds = time.perf_counter() - started
    command = [sys.executable, "-m", "packtrain", "eval", str(work / "runs" / "dialogsum"), "--json", "--no-loss"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"before": found["base"], "after": found["trained"], "seconds": seconds}


def save(found: dict[str, Any]) -> None:
    metrics = {
        f"{name} {when}": (found[when][name], "percent")
        for when in ("before", "after")
        for name in ("rouge1", "rouge2", "rougeL")
    }
    metrics["time of training"] = (found["seconds"], "s")
    results.add(
        "DialogSum, 50 test dialogues",
        "packtrain",
        metrics,
        {"recipe": RECIPE.name},
        "python benchmarks/dialogsum.py DATA_FOLDER --save",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--save", action="store_true", help="append to results.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(args.data, Path(work))
    print(json.dumps(found, indent=2))
    if args.save:
        save(found)


if __name__ == "__main__":
    main()
