"""The run folder: the only truth about a run. Written by its supervisor and rank 0, read by every face."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from packtrain.errors import UserError
from packtrain.launch.clock import file_age
from packtrain.launch.process import ProcessId

ACTIVE = ("queued", "starting", "running", "saving")
"""States that somebody must be alive for."""
STATES = (*ACTIVE, "done", "failed", "stopped")
LOST_AFTER_SECONDS = 120.0
"""Silence after which a run on another host is given up; on this host its process is looked at."""
Request = Literal["stop", "kill"]


@dataclass
class Status:
    """What ``status.json`` holds.

    Attributes:
        group: the batch job or torchrun group that the processes belong to; empty: the supervisor's own.
        gpus: identities of the GPUs that the run owns.
        note: what it waits for while it is queued.
        parent: the run and step that it was forked from.
    """

    name: str
    state: str = "queued"
    created: float = 0.0
    updated: float = 0.0
    supervisor: dict[str, Any] | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    cwd: str = ""
    group: str = ""
    gpus: list[str] = field(default_factory=list)
    note: str = ""
    parent: str = ""
    error: dict[str, Any] | None = None
    exit: int | None = None

    @property
    def supervisor_id(self) -> ProcessId | None:
        return ProcessId(**self.supervisor) if self.supervisor else None


def _parsed(values: Any) -> Status | None:
    """A status, or None where the values are none."""
    known = {f.name for f in fields(Status)}
    try:
        status = Status(**{key: value for key, value in values.items() if key in known})
        _ = status.supervisor_id
    except (AttributeError, TypeError):
        return None
    return status if status.state in STATES and isinstance(status.name, str) else None


class RunFolder:
    """Names and atomic writes of one run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = self.path.name
        self.recipe = self.path / "recipe.yaml"
        self.asked = self.path / "asked.yaml"  # before `auto` was resolved: for a resume on other hardware
        self.deepspeed = self.path / "deepspeed.json"  # what DeepSpeed was given, for the reader
        self.status = self.path / "status.json"
        self.events = self.path / "events.jsonl"
        self.plan = self.path / "plan.json"
        self.measured = self.path / "measured.json"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.final = self.path / "final"
        self._request = self.path / ".request"
        self._told = False

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        """Why a rank failed, or with -1 the supervisor, in its own words."""
        return self.logs / (f"rank-{rank}.error.json" if rank >= 0 else "supervisor.error.json")

    def beat(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.beat"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor of a detached run prints."""
        return self.logs / "supervisor.log"

    def ask(self, request: Request) -> None:
        """Ask whoever leads the run, on whatever host, to stop with a checkpoint or to end at once."""
        write_text(self._request, request)

    def asked_for(self) -> Request | None:
        try:
            return "kill" if self._request.read_text() == "kill" else "stop"
        except OSError:  # nobody asks, or the file server is away for a moment
            return None

    @classmethod
    def create(cls, output_folder: str | Path, name: str) -> RunFolder:
        """Make ``output_folder/name``; a run's folder is never shared or overwritten."""
        folder = cls.unused(output_folder, name)
        try:
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir()
            folder.logs.mkdir()
            folder.checkpoints.mkdir()
        except FileExistsError:
            raise folder._exists() from None
        except OSError as error:
            what = f"{folder.path} cannot be made ({error.strerror})"
            raise UserError("output.folder", what, "give a folder you may write to") from error
        now = time.time()
        own = asdict(ProcessId.of(os.getpid()))  # until its supervisor takes over
        folder._write_status(Status(name=name, created=now, updated=now, supervisor=own, cwd=os.getcwd()))
        return folder

    @classmethod
    def unused(cls, output_folder: str | Path, name: str) -> RunFolder:
        """``output_folder/name``, not made yet. Raises UserError where it exists or leaves the folder."""
        if name in ("", ".", "..") or Path(name).name != name:
            raise UserError("output.name", f"{name!r} is not a folder name", "give a name without slashes")
        folder = cls(Path(output_folder).expanduser().absolute() / name)
        if folder.path.exists():
            raise folder._exists()
        return folder

    def discard_unless_started(self) -> None:
        """Remove a run that ended before its first step: it holds nothing, and its name is free again."""
        if not self.events.exists():
            shutil.rmtree(self.path)

    def read_status(self) -> Status:
        """Raises UserError where this is no run folder."""
        try:
            values = json.loads(self.status.read_text())
        except (FileNotFoundError, NotADirectoryError):
            what = "not a run folder (no status.json)"
            raise UserError(str(self.path), what, "see `packtrain runs`") from None
        except ValueError as error:
            raise UserError(
                str(self.status), f"damaged: {error}", "restore that file; the checkpoints beside it are untouched"
            ) from error
        status = _parsed(values)
        if status is None:
            raise UserError(
                str(self.status),
                "damaged: no status in it",
                "restore that file; the checkpoints beside it are untouched",
            )
        return status

    def update_status(self, **changes: Any) -> Status:
        """Change some fields, under a lock: supervisor and rank 0 both write."""
        with self._locked():
            status = self.read_status()
            for key, value in changes.items():
                if not hasattr(status, key):
                    raise AttributeError(f"status.json has no field {key!r}")
                setattr(status, key, value)
            status.updated = time.time()
            self._write_status(status)
        return status

    def try_update_status(self, **changes: Any) -> None:
        """As ``update_status``, where a full disk must not end the run: that is said once, on stderr."""
        try:
            self.update_status(**changes)
        except OSError as error:
            if not self._told:
                print(f"packtrain: warning: {self.status} cannot be written ({error})", file=sys.stderr, flush=True)
            self._told = True

    def derived_state(self, status: Status | None = None) -> str:
        """The state, or ``lost`` where it says that somebody works on the run and nobody does."""
        status = status or self.read_status()
        if status.state not in ACTIVE or self.alive(status):
            return status.state
        return "lost"

    def alive(self, status: Status | None = None) -> bool:
        """Whether the process that leads this run still exists."""
        status = status or self.read_status()
        supervisor = status.supervisor_id
        if supervisor is None:
            # Between the folder's creation and the first status of its supervisor.
            return status.state in ACTIVE and self.silence() < LOST_AFTER_SECONDS
        if supervisor.here:
            return supervisor.alive()
        return status.state in ACTIVE and self.silence() < LOST_AFTER_SECONDS

    def led_here(self) -> bool:
        """Whether its leader is, or was, a process of this host: then it is known at once whether it lives."""
        supervisor = self.read_status().supervisor_id
        return supervisor is not None and supervisor.here

    def silence(self) -> float:
        """Seconds since status.json was written."""
        return file_age(self.status)

    @contextmanager
    def led(self) -> Iterator[None]:
        """Hold the run as its one leader: of two resumes at the same moment the second is refused."""
        with (self.path / ".leader.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                mend = f"watch it with `packtrain runs show {self.name}`"
                raise UserError(self.name, "is running already", mend) from None
            self._request.unlink(missing_ok=True)  # of the part before
            try:
                yield
            finally:
                self._request.unlink(missing_ok=True)

    def _exists(self) -> UserError:
        mend = "choose another output.name or output.folder"
        if self.status.exists():
            mend = f"choose another output.name or continue it with `packtrain runs resume {self.name}`"
        return UserError("output.name", f"run folder {self.path} exists", mend)

    def _write_status(self, status: Status) -> None:
        write_json(self.status, asdict(status))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.path / ".status.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def refuse_other_than_file(where: str, path: Path) -> None:
    """Raises UserError where ``path`` is there and no file: a device or a folder must not be replaced by one."""
    if path.exists() and not path.is_file():
        raise UserError(where, f"{path} is there and is not a file", "give another file")


def write_json(path: Path, value: Any) -> None:
    """Write a file that is, at any moment and after a power cut, the old one or the new one."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """As ``write_json``, for text. ``mode``: the file's permissions; None: as new files have them."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
