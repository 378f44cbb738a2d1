"""What `packtrain plan --calibrate` measures of this machine at a model's shapes.

    python benchmarks/calibration.py MODEL_FOLDER --save "8B calibration"

Runs the command itself; with --save each rate is stored.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import results
from shapes import shape_of

PARTS = ("matmul", "attention", "memory", "host", "host_memory", "disk")


def calibrate(model: Path, length: int) -> dict:
    """The command's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "r.yaml"
        recipe.write_text(
            yaml.safe_dump({"model": {"path": str(model)}, "data": {"train": ["none.jsonl"], "max_length": length}})
        )
        command = [sys.executable, "-m", "packtrain", "plan", str(recipe), "--calibrate", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--length", type=int, default=4096, help="data.max_length")
    parser.add_argument("--save", metavar="NAME", help="append to results.csv under this name")
    args = parser.parse_args()
    found = calibrate(args.model, args.length)
    print(json.dumps(found), flush=True)
    if args.save:
        metrics = {
            part: (found["rates"][part], "FLOP/s" if part in ("matmul", "attention") else "bytes/s") for part in PARTS
        }
        configuration = {"shape": shape_of(args.model), "length": args.length}
        command = "python benchmarks/calibration.py " + " ".join(sys.argv[1:])
        results.add(args.save, "packtrain", metrics, configuration, command)


if __name__ == "__main__":
    main()
