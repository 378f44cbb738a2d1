"""The workers of a run on this machine, as one thing: started together, ended together. Starts without torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packtrain.inherited import STORE_FD
from packtrain.launch.folder import RunFolder
from packtrain.launch.process import SUPERVISOR_PID, Guard, WorkerProcess, listen_on_free_port

KILL_SECONDS = 5.0
_POLL_SECONDS = 0.01


class Ranks:
    """``size`` processes of one command, each with its log, and a guard over what they start."""

    def __init__(self, folder: RunFolder, command: Sequence[str], size: int) -> None:
        self.folder, self.command, self.size = folder, list(command), size
        self._workers: list[WorkerProcess] = []
        self._guard: Guard | None = None

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._workers)

    def __getitem__(self, rank: int) -> WorkerProcess:
        return self._workers[rank]

    def start(self, env: Mapping[str, str], descriptors: Sequence[int]) -> None:
        """Start them all.

        Args:
            env: what they see beside this process's environment.
            descriptors: open files that they inherit.
        """
        with listen_on_free_port() as listener:
            shared = {**os.environ, **self._shared_env(listener.getsockname()[1]), **env}
            for rank in range(self.size):
                self.folder.error(rank).unlink(missing_ok=True)
                self.folder.beat(rank).unlink(missing_ok=True)
                store = listener.fileno() if rank == 0 else -1
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), STORE_FD: str(store)}
                inherited = [*descriptors, *([store] if rank == 0 else [])]
                self._workers.append(WorkerProcess(rank, self.command, shared | own, self.folder.log(rank), inherited))
        self._guard = Guard([worker.id.pid for worker in self._workers])

    def running(self) -> bool:
        """Look at every worker; whether any still runs."""
        return None in [worker.poll() for worker in self._workers]

    def any_failed(self) -> bool:
        """Whether one was seen to have ended with a failure."""
        return any(worker.failed for worker in self._workers)

    def met_no_listener(self) -> bool:
        """Whether our SIGTERM met a worker that did not listen for it yet."""
        return any(worker.exit == -signal.SIGTERM for worker in self._workers)

    def terminate(self) -> None:
        """Ask each of them to stop."""
        for worker in self._workers:
            worker.terminate()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def dump_stacks(self) -> None:
        for worker in self._workers:
            worker.dump_stacks()

    def close(self) -> None:
        """Kill what still runs, see it dead, and take their beats away."""
        self.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if self._guard is not None:
            self._guard.close()
        for rank in range(self.size):
            self.folder.beat(rank).unlink(missing_ok=True)

    def as_status(self) -> list[dict[str, Any]]:
        """The ``ranks`` of status.json."""
        return [
            {"rank": worker.rank, "pid": worker.id.pid, "start_time": worker.id.start_time, "exit": worker.exit}
            for worker in self._workers
        ]

    def _shared_env(self, port: int) -> dict[str, str]:
        """What torch.distributed and the worker read, but for the rank."""
        cores = len(os.sched_getaffinity(0))
        return {
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // self.size)),
            "PYTHONUNBUFFERED": "1",
            SUPERVISOR_PID: str(os.getpid()),
        }
