"""`packtrain train` and `runs resume` as a user types them: real workers, a tiny model, everything on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.tiny import make_model, values, write_chats

from packtrain.config import load_recipe

STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("command") / "model")


def write_recipe(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    data = write_chats(folder / "chats.jsonl", 24)
    sections.setdefault("output", {"folder": str(folder / "runs"), "name": "run"})
    recipe = values(
        model, str(data), method={"type": "lora", "rank": 4}, data={"eval": 0.2, "packing": True},
        parallel={"strategy": "fsdp", "shard_size": "auto"}, launch={"processes": 2},
        train={"max_steps": STEPS, "batch_size": 2, "micro_batch_size": 1}, evaluate={"every": 4}, **sections,
    )  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def packtrain(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packtrain", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env={**os.environ, **(env or {})}
    )


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


def test_a_whole_run_with_its_sinks(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model, log={"to": ["tensorboard", "wandb"]})
    done = packtrain("train", str(recipe), env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    assert f"step {STEPS}/{STEPS}" in done.stdout and str(run / "final") in done.stdout
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    for step in events(run, "step"):
        assert set(step["parts"]) == {"data", "forward", "backward", "clip", "update"}
        assert 0 < sum(step["parts"].values()) <= step["seconds"] + 1e-5
    assert [e["step"] for e in events(run, "eval")] == [4, 8]
    assert all(e["rows"] == 5 for e in events(run, "eval"))
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert list((run / "tensorboard").glob("events.*")) and list((run / "wandb").glob("offline-run-*"))
    resolved = (run / "recipe.yaml").read_text()
    assert load_recipe(run / "recipe.yaml").parallel.shard_size == 2
    assert yaml.safe_load(resolved)["train"]["precision"] == "fp32"
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= {
        p.name for p in (run / "final").iterdir()
    }
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-6", "step-8"]
    again = packtrain("runs", "resume", str(run))
    assert again.returncode == 2 and "is done" in again.stderr


def test_interrupted_and_resumed_is_the_same_curve(model: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = packtrain("train", str(write_recipe(tmp_path / "whole", model)))
    assert whole.returncode == 0, whole.stderr
    recipe = write_recipe(tmp_path / "parts", model)
    run = tmp_path / "parts" / "runs" / "run"
    process = subprocess.Popen([sys.executable, "-m", "packtrain", "train", str(recipe)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (run / "events.jsonl").exists() or not events(run, "step"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    resumed = packtrain("runs", "resume", str(run))
    assert resumed.returncode == 0, resumed.stderr
    assert losses(run) == losses(tmp_path / "whole" / "runs" / "run")


@pytest.mark.parametrize("changed", ["data", "base model"])
def test_other_data_or_base_model_under_a_checkpoint_is_refused(tmp_path: Path, changed: str) -> None:
    model = make_model(tmp_path / "model")
    recipe = write_recipe(tmp_path, model, checkpoint={"every": 1})
    assert packtrain("train", str(recipe)).returncode == 0
    run = tmp_path / "runs" / "run"
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
    if changed == "data":
        write_chats(tmp_path / "chats.jsonl", 24, seed=9)
    else:
        make_model(model, initializer_range=0.03)
    refused = packtrain("runs", "resume", str(run))
    assert refused.returncode == 2
    assert f"other {changed}" in refused.stderr and "Traceback" not in refused.stderr


def test_a_detached_run_outlives_its_terminal(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model)
    words = f"{sys.executable} -m packtrain train {recipe} --detach && kill -HUP 0"
    shell = subprocess.run(["sh", "-c", words], capture_output=True, text=True, start_new_session=True, check=False)
    assert shell.returncode == -signal.SIGHUP and "detached" in shell.stdout
    run = tmp_path / "runs" / "run"
    leader = json.loads((run / "status.json").read_text())["supervisor"]["pid"]
    assert os.getsid(leader) == leader
    followed = packtrain("runs", "logs", str(run), "--follow")
    assert followed.returncode == 0 and f"step {STEPS}/{STEPS}" in followed.stdout
    assert f"done: step {STEPS}" in followed.stdout
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    again = packtrain("train", str(recipe), "--resume", "train.learning_rate=0.5")
    assert again.returncode == 0 and "is done already" in again.stdout
    nameless = packtrain("train", str(recipe), "--resume", "output.name=auto")
    assert nameless.returncode == 2 and "--resume: the recipe names no run" in nameless.stderr
