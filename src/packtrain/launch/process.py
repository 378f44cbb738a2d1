"""Processes of a run: who is alive, who dies with whom, and who was asked to stop. Starts without torch."""

from __future__ import annotations

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

from packtrain.inherited import die_with

SUPERVISOR_PID = "PACKTRAIN_SUPERVISOR_PID"
DUMP_STACKS = signal.SIGUSR1
"""At this signal a worker prints where its threads are; it goes on."""


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
    die_with(int(os.environ[SUPERVISOR_PID]))


def die_with_agent() -> None:
    """The same under torchrun, whose agent started this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())


def listen_on_free_port() -> socket.socket:
    """A socket that listens on a free TCP port of 127.0.0.1: whoever inherits it has the port for sure."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def keep_files_private() -> None:
    """New files are writable by their owner only, whatever the umask was."""
    os.umask(os.umask(0o022) | 0o022)


class WorkerProcess:
    """One rank, in a session of its own, its output in its log."""

    def __init__(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> None:
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
                pass_fds=pass_fds,
            )
        self.id = ProcessId.of(self._process.pid)

    @property
    def failed(self) -> bool:
        """Whether it was seen to have ended with a failure."""
        return self.exit not in (None, 0)

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

    def dump_stacks(self) -> None:
        """Have the worker write where each of its threads is to its log."""
        if self.poll() is None:
            self._process.send_signal(DUMP_STACKS)


class Guard:
    """A shell that kills the workers' groups when this process is gone, however it went.

    The kernel ends the workers themselves (``die_with_supervisor``), but not what they have started.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        script = 'read -r _; for group; do kill -s KILL -- "-$group" 2>/dev/null; done'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script, "guard", *map(str, groups)], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """Dismiss it, once the workers have ended: their numbers may be others' soon."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
