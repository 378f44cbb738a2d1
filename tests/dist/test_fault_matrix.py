"""Every fault of tests/faults.py in a real run: seen in time, named, nobody left behind, and the curve goes on."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.faults import FAULTS, SAVE_EVERY, STEPS, Fault, table
from tests.tiny import make_model, values, write_chats
from tests.trial import LIMIT, ROOT, Trial, wait

from packtrain.checkpoint.folders import whole
from packtrain.launch import folder as folder_module
from packtrain.launch.folder import ACTIVE, RunFolder

BY_NAME = {fault.what: fault for fault in FAULTS}


def test_the_page_shows_the_table() -> None:
    assert table() in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    return values(
        make_model(folder / "model"), str(write_chats(folder / "chats.jsonl", 24)),
        method={"type": "lora", "rank": 4}, parallel={"strategy": "fsdp", "shard_size": "auto"},
        launch={"processes": 2, "timeout": "60s"}, checkpoint={"every": SAVE_EVERY}, evaluate={"every": "never"},
        train={"max_steps": STEPS, "batch_size": 2, "micro_batch_size": 1},
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    trial = Trial(recipe, tmp_path_factory.mktemp("undisturbed"), None)
    out, _ = trial.start().communicate(timeout=LIMIT)
    assert sorted(trial.losses()) == list(range(1, STEPS + 1)), out
    return trial.losses()


def check_after(trial: Trial, fault: Fault, seconds: float, output: str) -> None:
    """State and words, in time, and nobody left."""
    status = trial.run.read_status()
    assert seconds <= fault.seconds, output
    assert trial.run.derived_state() == fault.state, output
    said = json.dumps(status.error) + json.dumps(trial.events("warning")) + output
    assert fault.words in said and trial.files_with_secrets() == []
    wait(lambda: trial.orphans() == [], 5)


def check_resumed(trial: Trial, fault: Fault, undisturbed: dict[int, float], last_step: int) -> None:
    assert trial.run.read_status().state == "done"
    assert trial.losses() == undisturbed
    begun = trial.events("start")[-1]["step"]
    assert last_step - begun <= fault.lost, (last_step, begun)
    assert trial.orphans() == []


PLAIN = [fault.what for fault in FAULTS[:8]]


@pytest.mark.slow
@pytest.mark.parametrize("what", PLAIN)
def test_fault_of_a_process(what: str, recipe: dict[str, Any], undisturbed: dict[int, float], tmp_path: Path) -> None:
    fault = BY_NAME[what]
    trial = Trial(recipe, tmp_path, fault)
    process = trial.start()
    seconds = trial.seconds_to(fault.state)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == fault.exit, output
    check_after(trial, fault, seconds, output)
    last = max(trial.losses())
    trial.resume()
    check_resumed(trial, fault, undisturbed, last)


ON_SMALL_DISK = 'mount -t tmpfs -o size=24m small "$1" && shift && "$@"; status=$?; cp -a small/. kept/; exit $status'


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the disk is full before a save", "the disk fills up during a save"])
def test_full_disk(what: str, recipe: dict[str, Any], undisturbed: dict[int, float], tmp_path: Path) -> None:
    """On a small disk, in a mount namespace: the save fails, the older checkpoint stays, training goes on."""
    fault = BY_NAME[what]
    trial = Trial(recipe, tmp_path, fault)
    (tmp_path / "small").mkdir()
    (tmp_path / "kept").mkdir()
    words = ("train", str(trial.recipe), f"output.folder={tmp_path / 'small'}")
    process = trial.start(*words, prefix=("unshare", "-rm", "sh", "-c", ON_SMALL_DISK, "sh", str(tmp_path / "small")))
    wait(trial.mark.exists, LIMIT)
    begun = time.monotonic()
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == fault.exit, output
    trial.run = RunFolder(tmp_path / "kept" / "run")
    check_after(trial, fault, time.monotonic() - begun, output)
    assert "No space left" in output or "MiB are free" in output
    assert list(whole(trial.run.checkpoints)) == [6, 12]  # 9 failed and left 6 as it was
    assert trial.losses() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["the newest checkpoint is truncated", "a shard of the newest checkpoint is corrupted"]
)
def test_damaged_checkpoint(what: str, recipe: dict[str, Any], undisturbed: dict[int, float], tmp_path: Path) -> None:
    fault = BY_NAME[what]
    trial = Trial(recipe, tmp_path, fault)
    process = trial.start()
    seconds = trial.seconds_to(fault.state)
    output, _ = process.communicate(timeout=LIMIT)
    check_after(trial, fault, seconds, output)
    newest = trial.run.checkpoints / "step-6"
    shard = sorted(newest.glob("*.distcp"))[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:9] if "truncated" in what else content[:99] + bytes([content[99] ^ 1]) + content[100:])
    last = max(trial.losses())
    trial.resume()
    check_resumed(trial, fault, undisturbed, last)
    assert any("checkpoint passed over: step-6" in event["message"] for event in trial.events("warning"))


@pytest.mark.slow
def test_port_taken(recipe: dict[str, Any], undisturbed: dict[int, float], tmp_path: Path) -> None:
    trial = Trial(recipe, tmp_path, None)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        process = trial.start(MASTER_PORT=str(squatter.getsockname()[1]))
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    assert trial.losses() == undisturbed and trial.orphans() == []


@pytest.mark.slow
def test_node_lost(recipe: dict[str, Any], undisturbed: dict[int, float], tmp_path: Path) -> None:
    """Two agents of torchrun stand for two nodes; one is killed, and the run goes on with two processes on one node."""
    fault = BY_NAME["a node is lost (two nodes under torchrun)"]
    trial = Trial(recipe, tmp_path, fault)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = (
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-id", trial.name, "--rdzv-endpoint", f"127.0.0.1:{port}",
    )  # fmt: skip
    agents = [trial.start(prefix=torchrun) for _ in range(2)]
    seconds = trial.seconds_to(fault.state)
    output = "".join(agent.communicate(timeout=LIMIT)[0] for agent in agents)
    assert sorted(agent.returncode for agent in agents) == [-9, 1], output
    check_after(trial, fault, seconds, output)
    last = max(trial.losses())
    trial.resume()
    check_resumed(trial, fault, undisturbed, last)


@pytest.mark.slow
def test_clock_skew(
    recipe: dict[str, Any], undisturbed: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader on another host, its clock an hour ahead, sees the run alive while it is, and lost soon after."""
    fault = BY_NAME["clocks an hour apart between run and reader"]
    monkeypatch.setattr(folder_module, "LOST_AFTER_SECONDS", 6.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    trial = Trial(recipe, tmp_path, fault)
    process = trial.start(CLOCK_SKEW="-3600")
    wait(trial.run.status.exists, LIMIT)
    states = set()
    while not trial.mark.exists():
        states.add(trial.run.derived_state())
        time.sleep(0.05)
    assert states <= set(ACTIVE), states
    assert time.time() - trial.run.read_status().updated > 3000
    seconds = trial.seconds_to(fault.state)
    output, _ = process.communicate(timeout=LIMIT)
    check_after(trial, fault, seconds, output)
    monkeypatch.undo()
    last = max(trial.losses())
    shutil.rmtree(trial.run.logs)  # nothing of a resume depends on them
    trial.run.logs.mkdir()
    trial.resume()
    check_resumed(trial, fault, undisturbed, last)
