from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder
from packtrain.launch.process import ProcessId
from packtrain.launch.registry import find_run, list_runs, stop_run


def test_list_is_newest_first_with_numbers(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nothing") == []
    old = RunFolder.create(tmp_path, "old")
    old.update_status(state="done", created=1.0)
    events = [{"event": "start", "total_steps": 9}, {"event": "step", "step": 4, "loss": 1.5}]
    old.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    RunFolder.create(tmp_path, "new")
    (tmp_path / "not-a-run").mkdir()
    found = list_runs(tmp_path)
    assert [run.name for run in found] == ["new", "old"]
    assert (found[1].state, found[1].step, found[1].total_steps, found[1].loss) == ("done", 4, 9, 1.5)
    assert (found[0].state, found[0].step) == ("queued", None)


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "good")
    RunFolder.create(tmp_path, "bad").status.write_text("{")
    assert {run.name: run.state for run in list_runs(tmp_path)} == {"good": "queued", "bad": "damaged"}


def test_find_by_name_and_path(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "samsum-1")
    assert find_run("samsum-1", tmp_path).path == folder.path
    assert find_run(str(folder.path)).path == folder.path
    with pytest.raises(UserError, match="did you mean 'samsum-1'"):
        find_run("samsum-2", tmp_path)


def test_stop_refuses_what_does_not_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "first")
    folder.update_status(state="done")
    with pytest.raises(UserError, match="it is done"):
        stop_run(folder)


@pytest.mark.parametrize(("at_once", "signals"), [(False, 1), (True, 2)])
def test_stop_signals_the_supervisor(tmp_path: Path, at_once: bool, signals: int) -> None:
    folder = RunFolder.create(tmp_path, "first")
    code = f"""
import signal, sys, time
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
print("ready", flush=True)
while len(seen) < {signals}: time.sleep(0.02)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline()
    folder.update_status(state="running", supervisor=asdict(ProcessId.of(child.pid)))
    stop_run(folder, at_once, wait_seconds=5)
    assert child.wait(1) == 0


def test_stop_does_not_signal_a_reused_pid(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "first")
    supervisor = {**asdict(ProcessId.of(os.getpid())), "start_time": time.time() - 1e6}
    folder.update_status(state="running", supervisor=supervisor)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("signalled"))
    try:
        with pytest.raises(UserError, match="it is lost"):
            stop_run(folder)
    finally:
        signal.signal(signal.SIGTERM, before)
