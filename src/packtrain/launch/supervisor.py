"""Starts the workers of a run, watches them, and says which rank failed first. Starts without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

from packtrain.launch import failure
from packtrain.launch.failure import Failure
from packtrain.launch.folder import RunFolder
from packtrain.launch.process import SUPERVISOR_PID, ProcessId, WorkerProcess, free_port

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 2.0
WORD_SECONDS = 1.0
"""How long the other ranks get to write down what they saw when one has failed."""
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL for the ranks that a failed one left behind."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``done``, ``stopped`` or ``failed``, and the exit status that says so."""

    state: str
    exit: int
    failure: Failure | None = None


def worker_command(folder: RunFolder) -> list[str]:
    return [sys.executable, "-m", "packtrain.launch.worker", str(folder.path)]


def supervise(
    folder: RunFolder,
    command: Sequence[str],
    processes: int,
    env: Mapping[str, str] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run ``command`` as ``processes`` ranks until all have ended; none is left behind, however this returns.

    Args:
        env: added to this process's environment for every rank.
        watch: called about ten times a second, to show progress.
    """
    return _Supervisor(folder, command, processes, dict(env or {}), watch).run()


class _Supervisor:
    def __init__(
        self,
        folder: RunFolder,
        command: Sequence[str],
        processes: int,
        env: dict[str, str],
        watch: Callable[[], None],
    ) -> None:
        self.folder, self.command, self.watch = folder, list(command), watch
        self.env = {**os.environ, **_shared_env(processes), **env}
        self.processes = processes
        self.workers: list[WorkerProcess] = []
        self.num_signals = 0
        self.num_handled = 0
        self.last_heartbeat = 0.0

    def run(self) -> Outcome:
        with self.folder.led(), self._signals():
            try:
                self._start()
                outcome = self._until_ended()
            except BaseException as error:
                self._end(Outcome("failed", 1, failure.describe(error, rank=-1)))
                raise
            self._end(outcome)
            return outcome

    def _start(self) -> None:
        own = asdict(ProcessId.of(os.getpid()))
        self.folder.update_status(
            state="starting", supervisor=own, ranks=[], command=self.command, error=None, exit=None
        )
        for rank in range(self.processes):
            self.folder.error(rank).unlink(missing_ok=True)
            env = {**self.env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.workers.append(WorkerProcess(rank, self.command, env, self.folder.log(rank)))
        self.folder.update_status(ranks=self._ranks())

    def _until_ended(self) -> Outcome:
        while True:
            self._handle_signals()
            self._heartbeat()
            self.watch()
            running = self._running()
            if self._stopped_at_birth():
                return Outcome("stopped", 130)
            if any(self._failed(worker) for worker in self.workers):
                return self._failure() if self.num_handled < 2 else Outcome("stopped", 130)
            if not running:
                return self._success()
            time.sleep(POLL_SECONDS)

    def _running(self) -> bool:
        """Look at every worker; whether any still runs."""
        return None in [worker.poll() for worker in self.workers]

    def _stopped_at_birth(self) -> bool:
        """Whether our signal met a worker that did not listen yet: the rest would wait for it in vain."""
        return self.num_handled > 0 and any(worker.exit == -signal.SIGTERM for worker in self.workers)

    def _failed(self, worker: WorkerProcess) -> bool:
        return worker.exit not in (None, 0)

    def _success(self) -> Outcome:
        # A run that rank 0 finished while the signal was under way is done, not stopped.
        state = self.folder.read_status().state
        stopped = state == "stopped" or (self.num_handled > 0 and state != "done")
        return Outcome("stopped", 130) if stopped else Outcome("done", 0)

    def _failure(self) -> Outcome:
        """Collect every rank's word for a moment, then end the rest and name the first."""
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + WORD_SECONDS
        while len(failures) < self.processes and time.monotonic() < deadline:
            for worker in self.workers:
                if worker.rank not in failures and self._failed_now(worker):
                    failures[worker.rank] = self._word(worker)
            time.sleep(POLL_SECONDS / 2)
        first = failure.first(list(failures.values()))
        self._terminate()
        return Outcome("failed", 2 if first.kind == "user" else 1, first)

    def _failed_now(self, worker: WorkerProcess) -> bool:
        worker.poll()
        return self._failed(worker) or self.folder.error(worker.rank).exists()

    def _word(self, worker: WorkerProcess) -> Failure:
        # It was seen dead by now, so it died at some time since the last look.
        at = time.time() - POLL_SECONDS
        written = failure.recorded(self.folder, worker.rank)
        return written or failure.from_exit(self.folder, worker.rank, worker.exit or 0, at)

    def _terminate(self) -> None:
        for worker in self.workers:
            worker.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while self._running() and time.monotonic() < deadline:
            self._heartbeat()
            if self.num_signals > self.num_handled:
                return  # the user does not want to wait; `_end` kills
            time.sleep(POLL_SECONDS)

    def _handle_signals(self) -> None:
        """The first signal asks the workers to save and stop; the second ends them at once."""
        if self.num_signals == self.num_handled:
            return
        self.num_handled = self.num_signals
        for worker in self.workers:
            if self.num_signals == 1:
                worker.terminate()
            else:
                worker.kill()

    def _heartbeat(self) -> None:
        if time.monotonic() - self.last_heartbeat >= HEARTBEAT_SECONDS:
            self.last_heartbeat = time.monotonic()
            self.folder.update_status()

    def _end(self, outcome: Outcome) -> None:
        for worker in self.workers:
            worker.kill()
        deadline = time.monotonic() + GRACE_SECONDS
        while self._running() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        error = outcome.failure.as_status() if outcome.failure else None
        self.folder.update_status(state=outcome.state, exit=outcome.exit, error=error, ranks=self._ranks())

    def _ranks(self) -> list[dict[str, object]]:
        return [{"rank": w.rank, "pid": w.id.pid, "start_time": w.id.start_time, "exit": w.exit} for w in self.workers]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        # Under nohup SIGHUP is ignored from the start, and stays so.
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in _STOP_SIGNALS if not (nohup and number == signal.SIGHUP)]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.num_signals += 1


def _shared_env(processes: int) -> dict[str, str]:
    """What torch.distributed and the worker read, but for the rank."""
    cores = len(os.sched_getaffinity(0))
    return {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // processes)),
        "PYTHONUNBUFFERED": "1",
        SUPERVISOR_PID: str(os.getpid()),
    }
