from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.folder import LOST_AFTER_SECONDS, RunFolder, write_json
from packtrain.launch.process import ProcessId, keep_files_private


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "first")


def test_create_writes_a_queued_status(folder: RunFolder) -> None:
    status = folder.read_status()
    assert (status.name, status.state, status.cwd) == ("first", "queued", os.getcwd())
    assert folder.logs.is_dir() and folder.checkpoints.is_dir() and not folder.final.exists()


def test_create_refuses_an_existing_run(folder: RunFolder) -> None:
    before = folder.status.read_bytes()
    with pytest.raises(UserError, match="packtrain runs resume first"):
        RunFolder.create(folder.path.parent, "first")
    assert folder.status.read_bytes() == before


def test_create_does_not_offer_to_resume_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(UserError) as error:
        RunFolder.create(tmp_path, "notes")
    assert "resume" not in str(error.value)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "../elsewhere"])
def test_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="not a folder name"):
        RunFolder.create(tmp_path / "runs", name)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_output_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"output\."):
        RunFolder.create(tmp_path / "runs", "first")


def test_no_update_is_lost_between_two_writers(folder: RunFolder) -> None:
    def heartbeat() -> None:
        for _ in range(30):
            folder.update_status()

    thread = threading.Thread(target=heartbeat)
    thread.start()
    for step in range(30):
        folder.update_status(exit=step)
    thread.join()
    assert folder.read_status().exit == 29


def test_update_refuses_unknown_fields(folder: RunFolder) -> None:
    with pytest.raises(AttributeError, match="speed"):
        folder.update_status(speed=3)


def test_status_of_a_newer_version_is_read(folder: RunFolder) -> None:
    write_json(folder.status, {**asdict(folder.read_status()), "invented_later": 1})
    assert folder.read_status().name == "first"


def test_damaged_and_missing_status_are_sentences(folder: RunFolder, tmp_path: Path) -> None:
    folder.status.write_text('{"name": "fi')
    with pytest.raises(UserError, match="damaged"):
        folder.read_status()
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder(tmp_path / "nothing").read_status()


def test_write_leaves_old_or_new_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_running_with_its_supervisor_alive(folder: RunFolder) -> None:
    folder.update_status(state="running", supervisor=asdict(ProcessId.of(os.getpid())))
    assert folder.derived_state() == "running" and folder.alive()


def test_reused_pid_is_lost(folder: RunFolder) -> None:
    other = {**asdict(ProcessId.of(os.getpid())), "start_time": 1.0}
    folder.update_status(state="saving", supervisor=other)
    assert folder.derived_state() == "lost"


def test_zombie_is_lost_and_a_finished_state_stays(folder: RunFolder) -> None:
    child = subprocess.Popen(["sleep", "30"])
    folder.update_status(state="running", supervisor=asdict(ProcessId.of(child.pid)))
    assert folder.derived_state() == "running"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert folder.derived_state() == "lost"
    child.wait()
    assert folder.derived_state() == "lost"
    folder.update_status(state="stopped")
    assert folder.derived_state() == "stopped"


def test_on_another_host_silence_counts(folder: RunFolder) -> None:
    elsewhere = {**asdict(ProcessId.of(os.getpid())), "host": f"not-{socket.gethostname()}"}
    status = folder.update_status(state="running", supervisor=elsewhere)
    write_json(folder.status, {**asdict(status), "updated": time.time() - 1e6})  # that host's clock is wrong
    assert folder.derived_state() == "running"
    long_ago = time.time() - LOST_AFTER_SECONDS - 1
    os.utime(folder.status, (long_ago, long_ago))
    assert folder.derived_state() == "lost"


def test_requests_are_heard_by_the_next_look_and_forgotten_by_the_next_leader(folder: RunFolder) -> None:
    assert folder.asked_for() is None
    folder.ask("stop")
    assert folder.asked_for() == "stop"
    folder.ask("kill")
    assert folder.asked_for() == "kill"
    with folder.led():
        assert folder.asked_for() is None


def test_a_full_disk_is_said_once(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("packtrain.launch.folder.write_json", full)
    folder.try_update_status(state="running")
    folder.try_update_status(state="running")
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_others_can_never_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keep_files_private()
        folder = RunFolder.create(tmp_path / "runs", "run")
        folder.ask("stop")
        paths = [folder.path, *folder.path.rglob("*")]
    finally:
        os.umask(before)
    assert len(paths) >= 5 and not any(path.stat().st_mode & 0o022 for path in paths)
