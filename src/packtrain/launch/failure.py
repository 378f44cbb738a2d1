"""Why a rank failed: what it wrote down itself, or what its exit status says; and which rank failed first."""

from __future__ import annotations

import errno
import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder, write_json
from packtrain.launch.secrets import redact

_PEER_IS_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
    "store->",
    "tcpstore",
    "timed out",
    "timeout",
)
"""What torch.distributed says at the ranks that only waited for the one that failed."""


@dataclass
class Failure:
    """One rank's failure. ``kind``: user, bug, oom, disk, hang, exit (no word from the worker) or signal."""

    rank: int
    kind: str
    message: str
    time: float
    log: str = ""
    where: str = ""
    what: str = ""
    mend: str = ""
    traceback: str = ""
    consequence: bool = False

    def as_status(self) -> dict[str, Any]:
        """The ``error`` of status.json."""
        status = {"rank": self.rank, "kind": self.kind, "message": self.message, "log": self.log}
        return status | ({"mend": self.mend} if self.mend and self.kind != "user" else {})

    def user_error(self) -> UserError:
        return UserError(self.where, self.what, self.mend)


def describe(error: BaseException, rank: int) -> Failure:
    """The failure that an exception is."""
    text = redact("".join(traceback.format_exception(error)))
    failure = Failure(rank, "bug", redact(_headline(error)), time.time(), traceback=text)
    failure.consequence = _from_peer(error)
    if isinstance(error, UserError):
        failure.kind, failure.message = "user", redact(str(error))
        failure.where, failure.what, failure.mend = map(redact, (error.where, error.what, error.mend))
    elif _is_out_of_memory(error):
        failure.kind = "oom"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        failure.kind, failure.mend = "disk", "free some space there, then resume the run"
    return failure


def record(folder: RunFolder, failure: Failure) -> None:
    write_json(folder.error(failure.rank), asdict(failure))


def recorded(folder: RunFolder, rank: int) -> Failure | None:
    """What the worker of this rank wrote before it died, if anything."""
    path = folder.error(rank)
    if not path.exists():
        return None
    failure = Failure(**json.loads(path.read_text()))
    failure.log = str(folder.log(rank))
    return failure


def oom_kills() -> int:
    """How many processes the kernel has killed so far because memory ran out, on this host or in this container."""
    counts = [0]
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        if path.is_file():
            counts += [int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill ")]
    return sum(counts)


def from_exit(folder: RunFolder, rank: int, status: int, at: float, oom_killed: bool = False) -> Failure:
    """The failure of a worker that ended without a word.

    Args:
        oom_killed: whether the kernel killed a process for want of memory since the run began.
    """
    log = str(folder.log(rank))
    if status >= 0:
        return Failure(rank, "exit", f"rank {rank} ended with exit status {status}", at, log)
    name = signal.Signals(-status).name
    if name == "SIGKILL" and oom_killed:
        return Failure(rank, "oom", f"rank {rank} was killed by the kernel: the host ran out of memory", at, log)
    return Failure(rank, "signal", f"rank {rank} was killed by {name}", at, log)


def from_silence(folder: RunFolder, rank: int, how: str) -> Failure:
    """The failure of a rank that hangs."""
    return Failure(rank, "hang", f"rank {rank} hangs: it {how}", time.time(), str(folder.log(rank)))


def first(failures: list[Failure]) -> Failure:
    """The one that the others follow from: a rank that lost its peer never counts before that peer."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def _is_out_of_memory(error: BaseException) -> bool:
    """On a GPU torch has a type for it, on the CPU its allocator says it in a RuntimeError."""
    cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return cpu or type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)


def _headline(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _from_peer(error: BaseException) -> bool:
    if isinstance(error, UserError) or not isinstance(error, RuntimeError | OSError):
        return False
    module = type(error).__module__
    text = str(error).lower()
    return module == "torch.distributed" or any(phrase in text for phrase in _PEER_IS_GONE)
