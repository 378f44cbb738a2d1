"""The script for a GPU asks for what recipes know and for what one H200 holds: its minutes are few."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.unit.plan.measured import gpus, of_shape

from packtrain.config import load_recipe
from packtrain.launch.resolve_recipe import judge
from packtrain.plan.report import plan

ROOT = Path(__file__).parents[3]
ECHO = '#!/bin/sh\nfor word; do printf "%s\\n" "$word" >> "$ASKED"; done\nprintf -- "--end\\n" >> "$ASKED"\n'


def asked(shape: str, folder: Path) -> list[list[str]]:
    """The words of each run of benchmarks/train_speed.py, which is not started."""
    for name in ("timeout", "python3"):
        (folder / name).write_text(ECHO)
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ASKED": str(folder / "asked")}
    script = ROOT / "benchmarks" / "plan_session.sh"
    subprocess.run([script, str(folder), shape], env=env, cwd=ROOT, check=True, capture_output=True)
    calls = (folder / "asked").read_text().split("--end\n")
    words = [call.splitlines() for call in calls if "benchmarks/train_speed.py" in call]
    return [call[call.index("--save") :] for call in words]


@pytest.mark.parametrize(
    ("shape", "count"), [("llama-3.2-1b", 9), ("qwen2.5-3b", 7), ("mistral-7b", 8), ("llama-3-8b", 5)]
)
def test_every_run_is_one_that_fits(shape: str, count: int, tmp_path: Path) -> None:
    runs = asked(shape, tmp_path)
    assert len(runs) == count
    for words in runs:
        settings = [word for word in words if "=" in word]
        length = int(words[words.index("--length") + 1]) if "--length" in words else 4096
        base = {
            "model": {"path": "m"}, "data": {"train": ["d"], "max_length": length, "packing": "--rows" not in words},
            "train": {"batch_size": 4}, "method": {"type": "lora"},
        }  # fmt: skip
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(base))
        recipe, facts = load_recipe(tmp_path / "r.yaml", settings), gpus(1, of_shape(shape))
        judge(recipe, facts)
        assert plan(recipe, facts).fits, shlex.join(words)
