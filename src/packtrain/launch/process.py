"""Processes of a run: who is alive, who dies with whom, and who was asked to stop. Starts without torch."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

SUPERVISOR_PID = "PACKTRAIN_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessId:
    """A process that a reused pid cannot be mistaken for."""

    pid: int
    start_time: float
    host: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        return cls(pid, psutil.Process(pid).create_time(), socket.gethostname())

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """Whether it still runs on this host; a zombie that nobody reaped is dead."""
        try:
            process = psutil.Process(self.pid)
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return False
            # The boot time that psutil adds is rounded to seconds and follows the clock.
            return abs(process.create_time() - self.start_time) < 5.0
        except psutil.NoSuchProcess:
            return False


def leave_at_once(status: int) -> NoReturn:
    """End this process, whose work is done and written, without the interpreter's own end.

    A process group's threads may still run then, and a thread that is there when libraries are torn down aborts the
    process with a status that says nothing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class StopFlag:
    """Set by SIGTERM or SIGINT; the trainer looks at it between steps."""

    def __init__(self) -> None:
        self.set = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.set = True


def die_with_supervisor() -> None:
    """Ask the kernel for SIGKILL at the supervisor's death, whatever kills it."""
    expected = int(os.environ[SUPERVISOR_PID])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # It may have died between fork and the line above: then the kernel has nothing left to tell us.
    if os.getppid() != expected:
        os._exit(1)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class WorkerProcess:
    """One rank, in a session of its own, its output in its log."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.rank = rank
        self.exit: int | None = None
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.id = ProcessId.of(self._process.pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs.

        The group is killed before the leader is reaped: until then nobody else can be given its number.
        """
        if self.exit is None:
            ended = os.waitid(os.P_PID, self.id.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self.kill()
                self.exit = self._process.wait()
        return self.exit

    def terminate(self) -> None:
        """Ask the worker, and only it, to stop: its helpers are its own to end."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the worker with its whole process group. Safe until ``poll`` has returned a status."""
        if self.exit is None:
            os.killpg(self.id.pid, signal.SIGKILL)
