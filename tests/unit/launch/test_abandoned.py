"""A compilation that was killed hangs no later one; one that goes on is not disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from packtrain.launch.abandoned import extensions_folder, remove_abandoned_locks
from packtrain.launch.native import build

HOLDS = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """torch's lock, where it keeps one."""
    (tmp_path / "py311_cpu" / "some_op").mkdir(parents=True)
    return tmp_path / "py311_cpu" / "some_op" / "lock"


def hold(lock: Path) -> subprocess.Popen[str]:
    """A process that holds the lock as a compilation does."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_the_lock_of_a_killed_compilation_goes(lock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = hold(lock)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lock.exists()
    remove_abandoned_locks(tmp_path, patience=1.0)
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().err


def test_a_lock_that_is_held_stays(lock: Path, tmp_path: Path) -> None:
    process = hold(lock)
    try:
        os.utime(lock, (0, 0))
        remove_abandoned_locks(tmp_path, patience=1.0)
        assert lock.exists()
    finally:
        process.kill()
        process.wait()


def test_a_young_lock_of_another_host_is_waited_for(lock: Path, tmp_path: Path) -> None:
    lock.touch()
    released = threading.Timer(1.0, lock.unlink)
    released.start()
    began = time.monotonic()
    remove_abandoned_locks(tmp_path, patience=60.0)
    assert 0.8 < time.monotonic() - began < 30


def test_no_folder_no_locks(tmp_path: Path) -> None:
    remove_abandoned_locks(tmp_path / "none")


def test_the_folder_is_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert str(extensions_folder().resolve()) == get_default_build_root()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert extensions_folder() == tmp_path


def test_a_build_looks_for_them_first(monkeypatch: pytest.MonkeyPatch, lock: Path, tmp_path: Path) -> None:
    from packtrain.config import build_recipe
    from packtrain.launch import native

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_BUILD", "")
    lock.touch()
    os.utime(lock, (0, 0))
    section = {"strategy": "deepspeed"}
    build(
        build_recipe(
            {"model": {"path": "m"}, "data": {"train": ["d"]}, "launch": {"device": "cpu"}, "parallel": section}
        )
    )
    assert not lock.exists()
