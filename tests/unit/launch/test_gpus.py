"""Owners of GPUs and the queue for them, with real processes and real locks; the GPUs are made up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch import gpus
from packtrain.launch.gpus import Gpu, Reservation

GPUS = [Gpu(index, f"GPU-{index}", 0) for index in range(4)]
HOLD = """
import subprocess, sys, time
from pathlib import Path
from packtrain.launch.gpus import Gpu, Reservation
mine = Reservation(sys.argv[1], int(sys.argv[3]), Path(sys.argv[2]), lambda: [Gpu(i, f"GPU-{i}", 0) for i in range(4)])
while (claim := mine.attempt()) is None: time.sleep(0.05)
if sys.argv[4] == "worker":
    subprocess.Popen(["sleep", "60"], pass_fds=claim.files)
print([gpu.index for gpu in claim.gpus], flush=True)
time.sleep(60)
"""


def reserve(folder: Path, wanted: int | list[int], owner: str = "me", present: list[Gpu] = GPUS) -> Reservation:
    return Reservation(owner, wanted, folder, lambda: present)


def holder(folder: Path, wanted: int, owner: str = "other", how: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, owner, str(folder), str(wanted), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def test_each_gpu_has_one_owner(folder: Path) -> None:
    first = reserve(folder, 3, "first").attempt()
    assert first and [gpu.index for gpu in first.gpus] == [0, 1, 2]
    assert first.env == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2"}
    second = reserve(folder, 2)
    assert second.attempt() is None
    owned = ", ".join(f"GPU {index} is owned by first" for index in range(3))
    assert second.reason == f"for 2 free GPUs: {owned}"
    by_index = reserve(folder, [3])  # queued behind the one before, though GPU 3 is free
    assert by_index.attempt() is None and by_index.reason == "behind me in the queue"
    first.close()
    claim = second.attempt()
    assert claim and [gpu.index for gpu in claim.gpus] == [0, 1]
    taken = by_index.attempt()
    assert taken and [gpu.index for gpu in taken.gpus] == [3]
    assert not list(folder.glob("*.ticket"))


def test_memory_of_others_counts_unless_the_gpu_is_named(folder: Path) -> None:
    busy = [Gpu(0, "GPU-0", 3 << 30), Gpu(1, "GPU-1", 0)]
    claim = reserve(folder, 1, present=busy).attempt()
    assert claim and claim.gpus[0].index == 1
    waiting = reserve(folder, 1, present=busy)
    assert waiting.attempt() is None and "others have 3.0 GiB of GPU 0" in waiting.reason
    waiting.close()
    named = reserve(folder, [0], present=busy).attempt()
    assert named and named.gpus[0].index == 0


def test_an_index_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UserError, match=r"GPU 4 of 4 visible ones; choose from \[0, 1, 2, 3\]"):
        reserve(folder, [4]).attempt()


def test_a_killed_owner_leaves_no_lock(folder: Path) -> None:
    process = holder(folder, 4)
    assert said(process) == "[0, 1, 2, 3]"
    mine = reserve(folder, 1)
    assert mine.attempt() is None
    process.kill()
    process.wait()
    assert mine.attempt() is not None


def test_a_worker_that_still_lives_keeps_its_gpus(folder: Path) -> None:
    process = holder(folder, 4, how="worker")
    assert said(process) == "[0, 1, 2, 3]"
    group = os.getpgid(process.pid)
    process.kill()
    process.wait()
    mine = reserve(folder, 1)
    assert mine.attempt() is None and "owned by other" in mine.reason
    os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while (claim := mine.attempt()) is None:
        assert time.monotonic() < deadline
    claim.close()


def test_the_dead_do_not_hold_up_the_queue(folder: Path) -> None:
    owner = reserve(folder, 4).attempt()
    waiting = holder(folder, 4, "waiting")
    deadline = time.monotonic() + 20
    while not list(folder.glob("*.ticket")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    mine = reserve(folder, 1)
    assert mine.attempt() is None and mine.reason == "behind waiting in the queue"
    waiting.kill()
    waiting.wait()
    assert owner is not None
    owner.close()
    assert mine.attempt() is not None


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, ["A", "B", "C"]),
        ("2,0", ["C", "A"]),
        ("1,7,0", ["B"]),
        ("", []),
        ("B", ["B"]),
        ("MIG-x,0", ["MIG-x", "A"]),
    ],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, named: str | None, found: list[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(gpus, "_every", lambda: [("A", 0), ("B", 0), ("C", 0)])
    assert [gpu.id for gpu in gpus.present()] == found


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-1a, 1024'\necho 'GPU-2b, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.present() == [Gpu(0, "GPU-1a", 1 << 30), Gpu(1, "GPU-2b", 0)]
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(UserError, match="nvidia-smi: failed"):
        gpus.present()


def test_a_link_in_the_shared_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder.mkdir()
    (folder / "GPU-0.lock").symlink_to(victim)
    with pytest.raises(OSError):
        reserve(folder, [0]).attempt()
    assert victim.read_text() == "precious"


def test_locks_are_open_to_all_users_and_removable_by_none(folder: Path) -> None:
    os.umask(before := os.umask(0o077))
    os.umask(0o077)
    try:
        claim = reserve(folder, [0]).attempt()
    finally:
        os.umask(before)
    assert claim is not None
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert (folder / "GPU-0.lock").stat().st_mode & 0o777 == 0o666
