"""Twenty starts and ends at random moments in a row: no orphan, no lock left, every status right."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.tiny import make_model, values, write_chats
from tests.trial import LIMIT, Trial, wait

from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder
from packtrain.launch.registry import kill_run, stop_run

RIGHT = {  # the state, the exit statuses of the command, the exit status in status.json
    "interrupt": ("stopped", {130}, 130),
    "terminate": ("stopped", {130, -signal.SIGTERM}, 130),
    "stop": ("stopped", {130}, 130),
    "kill": ("stopped", {130}, 130),
    "kill the supervisor": ("lost", {-signal.SIGKILL}, None),
    "kill a rank": ("failed", {1}, 1),
}


def act(what: str, process: subprocess.Popen[str], run: RunFolder) -> None:
    leader = run.read_status().supervisor_id
    assert leader is not None
    if what == "interrupt":
        os.kill(leader.pid, signal.SIGINT)
    elif what == "terminate":
        os.kill(leader.pid, signal.SIGTERM)
    elif what == "kill the supervisor":
        os.kill(leader.pid, signal.SIGKILL)
    elif what == "kill a rank":
        wait(lambda: len(run.read_status().ranks) == 2, LIMIT)
        os.kill(random.choice(run.read_status().ranks)["pid"], signal.SIGKILL)
    else:
        (stop_run if what == "stop" else kill_run)(run)


def check(what: str, process: subprocess.Popen[str], run: RunFolder, detached: bool) -> None:
    state, codes, exit_status = RIGHT[what]
    wait(lambda: run.derived_state() == state and not run.alive(), 40)
    status = run.read_status()
    assert status.exit == exit_status, status
    if not detached:
        assert process.wait(20) in codes
    with (run.path / ".leader.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is still held
    assert not list(run.logs.glob("*.beat")) or what == "kill the supervisor"
    assert not list(run.path.glob(".*.tmp"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_ends_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(20)
    recipe: dict[str, Any] = values(
        make_model(tmp_path / "model"), str(write_chats(tmp_path / "chats.jsonl", 24)),
        method={"type": "lora", "rank": 4}, parallel={"strategy": "ddp"}, launch={"processes": 2, "timeout": "60s"},
        checkpoint={"every": 5}, train={"max_steps": 100_000, "batch_size": 2, "micro_batch_size": 1},
    )  # fmt: skip
    trial = Trial(recipe, tmp_path, None)
    ends = list(RIGHT) * 3 + chance.sample(list(RIGHT), 2)
    chance.shuffle(ends)
    for what in ends:
        detached = chance.random() < 0.5
        words = ["runs", "resume", str(trial.run.path)] if trial.run.status.exists() else ["train", str(trial.recipe)]
        process = trial.start(*words, *(["--detach"] if detached else []))
        if detached:
            assert process.wait(LIMIT) == 0
        else:
            wait(partial(leads, trial.run, process.pid), LIMIT)
        time.sleep(chance.uniform(0, 9))
        act(what, process, trial.run)
        check(what, process, trial.run, detached)
        wait(lambda: trial.orphans() == [], 10)
    assert trial.events("step"), "no run came as far as a step"
    process = trial.start("runs", "resume", str(trial.run.path))
    wait(lambda: leads(trial.run, process.pid), LIMIT)
    stop_run(trial.run, LIMIT)
    assert process.wait(LIMIT) == 130 and trial.run.read_status().state == "stopped"


def leads(run: RunFolder, pid: int) -> bool:
    """Whether a command has come so far that it hears of signals."""
    try:
        status = run.read_status()
    except UserError:
        return False
    leader = status.supervisor_id
    return leader is not None and leader.pid == pid and bool(status.command) and psutil.pid_exists(pid)
