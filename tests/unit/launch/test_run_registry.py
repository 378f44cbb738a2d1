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
from packtrain.launch import registry
from packtrain.launch.folder import RunFolder
from packtrain.launch.process import ProcessId
from packtrain.launch.registry import delete_run, find_run, kill_run, list_runs, size_of, stop_run


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


NO_STATUS = (
    "",
    "{",
    "null",
    "[]",
    '{"state": "running"}',
    '{"name": "bad", "state": "odd"}',
    '{"name": 3, "state": "done"}',
    '{"name": "bad", "state": "done", "supervisor": {"pid": 3}}',
    '{"name": "bad", "state": "done", "supervisor": 7}',
)


@pytest.mark.parametrize("text", NO_STATUS)
def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, text: str) -> None:
    RunFolder.create(tmp_path, "good")
    RunFolder.create(tmp_path, "bad").status.write_text(text)
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


LEADER = """
import sys, time
from packtrain.launch import registry
from packtrain.launch.folder import RunFolder
folder = RunFolder(sys.argv[1])
print("ready", flush=True)
while (request := folder.asked_for()) != sys.argv[2]: time.sleep(0.02)
folder.update_status(state="stopped", exit=130)
"""


def led(folder: RunFolder, request: str) -> subprocess.Popen[bytes]:
    """A process that leads the run until it is asked for ``request``; ``never`` is a deaf one."""
    child = subprocess.Popen([sys.executable, "-c", LEADER, str(folder.path), request], stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline()
    folder.update_status(state="running", supervisor=asdict(ProcessId.of(child.pid)))
    return child


def test_stop_asks_the_leader(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "first")
    child = led(folder, "stop")
    assert stop_run(folder, wait_seconds=5) == "stopped"
    assert child.wait(1) == 0


@pytest.mark.parametrize("hears", [True, False])
def test_kill_ends_one_that_does_not_hear_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hears: bool) -> None:
    monkeypatch.setattr(registry, "KILL_SECONDS", 5.0 if hears else 0.3)
    folder = RunFolder.create(tmp_path, "first")
    child = led(folder, "kill" if hears else "never")
    assert kill_run(folder) == "stopped"
    assert child.wait(1) == (0 if hears else -signal.SIGKILL)
    assert (folder.read_status().state, folder.read_status().exit) == ("stopped", 130)


def test_a_reused_pid_is_not_the_leader(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "first")
    supervisor = {**asdict(ProcessId.of(os.getpid())), "start_time": time.time() - 1e6}
    folder.update_status(state="running", supervisor=supervisor)
    for act in (stop_run, kill_run):
        with pytest.raises(UserError, match="it is lost"):
            act(folder)
    assert folder.asked_for() is None


def test_delete(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "first")
    with pytest.raises(UserError, match="is running; stop it first"):
        delete_run(folder)
    folder.update_status(state="failed", supervisor=None)
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(UserError, match="is a link"):
        delete_run(RunFolder(tmp_path / "link"))
    (folder.path / "final").mkdir()
    (folder.path / "final" / "weights").write_bytes(bytes(1000))
    assert size_of(folder) >= 1000
    delete_run(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
