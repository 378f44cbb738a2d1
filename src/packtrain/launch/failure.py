"""Why a rank failed: what it wrote down itself, or what its exit status says; and which rank failed first."""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder, write_json

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
    """One rank's failure. ``kind``: user, bug, oom, exit (no word from the worker) or signal."""

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
        return {"rank": self.rank, "kind": self.kind, "message": self.message, "log": self.log}

    def user_error(self) -> UserError:
        return UserError(self.where, self.what, self.mend)


def describe(error: BaseException, rank: int) -> Failure:
    """The failure that an exception is."""
    text = "".join(traceback.format_exception(error))
    failure = Failure(rank, "bug", _headline(error), time.time(), traceback=text)
    failure.consequence = _from_peer(error)
    if isinstance(error, UserError):
        failure.kind, failure.message = "user", str(error)
        failure.where, failure.what, failure.mend = error.where, error.what, error.mend
    elif type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        failure.kind = "oom"
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


def from_exit(folder: RunFolder, rank: int, status: int, at: float) -> Failure:
    """The failure of a worker that ended without a word."""
    log = str(folder.log(rank))
    if status >= 0:
        return Failure(rank, "exit", f"rank {rank} ended with exit status {status}", at, log)
    name = signal.Signals(-status).name
    hint = " (out of host memory? see dmesg)" if name == "SIGKILL" else ""
    return Failure(rank, "signal", f"rank {rank} was killed by {name}{hint}", at, log)


def first(failures: list[Failure]) -> Failure:
    """The one that the others follow from: a rank that lost its peer never counts before that peer."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def _headline(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _from_peer(error: BaseException) -> bool:
    if isinstance(error, UserError) or not isinstance(error, RuntimeError | OSError):
        return False
    module = type(error).__module__
    text = str(error).lower()
    return module == "torch.distributed" or any(phrase in text for phrase in _PEER_IS_GONE)
