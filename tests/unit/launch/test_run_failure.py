from __future__ import annotations

import errno
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch import failure
from packtrain.launch.folder import RunFolder
from packtrain.launch.summary import failed


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "first")


@pytest.mark.parametrize(
    ("error", "kind", "message", "consequence"),
    [
        (UserError("a.b", "is 3", "give 2"), "user", "a.b: is 3; give 2.", False),
        (ValueError("bad\nmore"), "bug", "ValueError: bad", False),
        (KeyError(), "bug", "KeyError", False),
        (MemoryError("host"), "oom", "MemoryError: host", False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom", None, False),
        (OSError(errno.ENOSPC, "No space left on device"), "disk", None, False),
        (RuntimeError("[gloo] Connection reset by peer"), "bug", None, True),
        (ConnectionResetError(104, "Connection reset by peer"), "bug", None, True),
        (ValueError("connection reset by peer"), "bug", None, False),
    ],
)
def test_describe(error: BaseException, kind: str, message: str | None, consequence: bool) -> None:
    found = failure.describe(error, rank=3)
    assert (found.rank, found.kind, found.consequence) == (3, kind, consequence)
    assert message is None or found.message == message


def test_recorded_comes_back(folder: RunFolder) -> None:
    assert failure.recorded(folder, 1) is None
    failure.record(folder, failure.describe(UserError("a.b", "is 3", "give 2"), 1))
    found = failure.recorded(folder, 1)
    assert found and str(found.user_error()) == "a.b: is 3; give 2." and found.log == str(folder.log(1))


def test_bug_shows_the_end_of_its_log(folder: RunFolder) -> None:
    folder.log(1).write_text("".join(f"line {number}\n" for number in range(40)))
    failure.record(folder, failure.describe(ValueError("bad row"), 1))
    found = failure.recorded(folder, 1)
    assert found
    lines = failed(found.as_status())
    assert lines[0] == "rank 1 failed: ValueError: bad row"
    assert lines[1:-1] == [f"  | line {number}" for number in range(25, 40)]
    assert lines[-1] == f"log: {folder.log(1)}"


def test_a_kill_by_the_kernel_is_told_from_others(folder: RunFolder) -> None:
    assert failure.from_exit(folder, 1, -9, 0.0).kind == "signal"
    found = failure.from_exit(folder, 1, -9, 0.0, oom_killed=True)
    assert (found.kind, found.message) == ("oom", "rank 1 was killed by the kernel: the host ran out of memory")
    assert failure.from_exit(folder, 1, -15, 0.0, oom_killed=True).kind == "signal"


def test_the_mend_comes_last(folder: RunFolder) -> None:
    found = failure.describe(OSError(errno.ENOSPC, "No space left on device", "x"), 0)
    lines = failed(found.as_status())
    assert lines[0].startswith("rank 0 failed: OSError") and lines[-1].startswith("mend: free some space")
