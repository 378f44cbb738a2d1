"""Starts the workers of a run, watches them, and says which rank failed first. Starts without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from packtrain.launch import failure
from packtrain.launch.failure import Failure
from packtrain.launch.folder import RunFolder
from packtrain.launch.gpus import Claim, Reservation
from packtrain.launch.out_of_memory import memory_advice
from packtrain.launch.process import ProcessId, WorkerProcess, keep_files_private
from packtrain.launch.ranks import Ranks
from packtrain.launch.watch import HangWatch

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 2.0
WORD_SECONDS = 1.0
"""How long the other ranks get to write down what they saw when one has failed."""
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL for the ranks that a failed one left behind."""
SILENT_SECONDS = 5.0
"""A rank without a beat for so long is the one that the others lost, where they only say that they lost one."""
STACKS_SECONDS = 0.5
"""How long the ranks get to write where they are when one hangs."""
QUEUE_SECONDS = 2.0
"""Between two looks at the GPUs of a run that waits for them."""
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
    watch: Callable[[], None] = lambda: None,
    reservation: Reservation | None = None,
    on_wait: Callable[[str], None] = lambda reason: None,
    heartbeat: float = float("inf"),
) -> Outcome:
    """Run ``command`` as ``processes`` ranks until all have ended; none is left behind, however this returns.

    Args:
        watch: called about ten times a second, to show progress.
        reservation: the GPUs that the run waits for first, and owns until its last process has ended.
        on_wait: called with what it waits for, whenever that changes.
        heartbeat: seconds without a sign of life after which a rank is taken for hung (see ``HangWatch``).
    """
    return _Supervisor(folder, command, processes, watch, reservation, on_wait, heartbeat).run()


class _Supervisor:
    def __init__(
        self,
        folder: RunFolder,
        command: Sequence[str],
        processes: int,
        watch: Callable[[], None],
        reservation: Reservation | None,
        on_wait: Callable[[str], None],
        heartbeat: float,
    ) -> None:
        self.folder, self.watch = folder, watch
        self.reservation, self.on_wait = reservation, on_wait
        self.ranks = Ranks(folder, command, processes)
        self.hangs = HangWatch([folder.beat(rank) for rank in range(processes)], heartbeat)
        self.claim = Claim([], [])
        self.num_signals = 0
        self.num_handled = 0
        self.last_heartbeat = 0.0
        self.last_look = 0.0
        self.oom_kills = failure.oom_kills()

    def run(self) -> Outcome:
        with self.folder.led(), self._signals():
            keep_files_private()
            try:
                outcome = self._stopped_in_queue() or self._work()
            except BaseException as error:
                self._end(Outcome("failed", 1, failure.describe(error, rank=-1)))
                raise
            self._end(outcome)
            return outcome

    def _stopped_in_queue(self) -> Outcome | None:
        """Wait for the GPUs; None where they are ours or none are needed."""
        own = asdict(ProcessId.of(os.getpid()))
        state = "queued" if self.reservation else "starting"
        cleared: dict[str, Any] = {"ranks": [], "gpus": [], "error": None, "exit": None, "note": "", "group": ""}
        self.folder.update_status(state=state, supervisor=own, command=self.ranks.command, **cleared)
        while self.reservation is not None:
            claim = self.reservation.attempt()
            if claim is not None:
                self.claim, self.reservation = claim, None
                self.folder.update_status(state="starting", gpus=[gpu.id for gpu in claim.gpus], note="")
            elif not self._wait_in_queue(self.reservation.reason):
                return Outcome("stopped", 130)
        return None

    def _wait_in_queue(self, reason: str) -> bool:
        """Let some time pass; False where the user does not want to wait any longer."""
        if self.folder.read_status().note != reason:
            self.folder.update_status(note=reason)
            self.on_wait(reason)
        until = time.monotonic() + QUEUE_SECONDS
        while time.monotonic() < until:
            self._hear()
            if self.num_signals:
                return False
            self._heartbeat()
            self.watch()
            time.sleep(POLL_SECONDS)
        return True

    def _work(self) -> Outcome:
        self.ranks.start(self.claim.env if self.claim.gpus else {}, self.claim.files)
        self.folder.update_status(ranks=self.ranks.as_status())
        return self._until_ended()

    def _until_ended(self) -> Outcome:
        while True:
            self._hear()
            self._handle_signals()
            self._heartbeat()
            self.watch()
            running = self.ranks.running()
            if self.num_handled > 0 and self.ranks.met_no_listener():  # the rest would wait for it in vain
                return Outcome("stopped", 130)
            if self.ranks.any_failed():
                return self._failure() if self.num_handled < 2 else Outcome("stopped", 130)
            if not running:
                return self._success()
            if hung := self._hung():
                return hung
            time.sleep(POLL_SECONDS)

    def _hung(self) -> Outcome | None:
        if time.monotonic() - self.last_look < 1.0:
            return None
        self.last_look = time.monotonic()
        found = self.hangs.hung()
        if found is None:
            return None
        self.ranks.dump_stacks()
        time.sleep(STACKS_SECONDS)
        first = failure.from_silence(self.folder, *found)
        self.ranks[first.rank].kill()  # it would not listen, and may be stopped
        self._terminate()
        return Outcome("failed", 1, first)

    def _success(self) -> Outcome:
        # A run that rank 0 finished while the signal was under way is done, not stopped.
        state = self.folder.read_status().state
        stopped = state == "stopped" or (self.num_handled > 0 and state != "done")
        return Outcome("stopped", 130) if stopped else Outcome("done", 0)

    def _failure(self) -> Outcome:
        """Collect every rank's word for a moment, then end the rest and name the first."""
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + WORD_SECONDS
        while len(failures) < self.ranks.size and time.monotonic() < deadline:
            for worker in self.ranks:
                if worker.rank not in failures and self._failed_now(worker):
                    failures[worker.rank] = self._word(worker)
            time.sleep(POLL_SECONDS / 2)
        first = failure.first(list(failures.values()))
        if first.consequence and (silent := self.hangs.silent(SILENT_SECONDS)):
            first = failure.from_silence(self.folder, *silent)  # the others waited for it until they gave up
            self.ranks[first.rank].kill()
        self._terminate()
        return Outcome("failed", 2 if first.kind == "user" else 1, first)

    def _failed_now(self, worker: WorkerProcess) -> bool:
        worker.poll()
        return worker.failed or self.folder.error(worker.rank).exists()

    def _word(self, worker: WorkerProcess) -> Failure:
        # It was seen dead by now, so it died at some time since the last look.
        at = time.time() - POLL_SECONDS
        written = failure.recorded(self.folder, worker.rank)
        return written or self._silent(worker, at)

    def _silent(self, worker: WorkerProcess, at: float) -> Failure:
        oom_killed = failure.oom_kills() > self.oom_kills
        found = failure.from_exit(self.folder, worker.rank, worker.exit or 0, at, oom_killed)
        if found.kind == "oom":
            found.mend = memory_advice(self.folder)
        return found

    def _terminate(self) -> None:
        self.ranks.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while self.ranks.running() and time.monotonic() < deadline:
            self._heartbeat()
            if self.num_signals > self.num_handled:
                return  # the user does not want to wait; `_end` kills
            time.sleep(POLL_SECONDS)

    def _hear(self) -> None:
        """What `runs stop` and `runs kill` ask for counts as the first and the second signal."""
        request = self.folder.asked_for()
        if request is not None:
            self.num_signals = max(self.num_signals, 2 if request == "kill" else 1)

    def _handle_signals(self) -> None:
        """The first signal asks the workers to save and stop; the second ends them at once."""
        if self.num_signals == self.num_handled:
            return
        self.num_handled = self.num_signals
        if self.num_signals == 1:
            self.ranks.terminate()
        else:
            self.ranks.kill()

    def _heartbeat(self) -> None:
        if time.monotonic() - self.last_heartbeat >= HEARTBEAT_SECONDS:
            self.last_heartbeat = time.monotonic()
            self.folder.try_update_status()

    def _end(self, outcome: Outcome) -> None:
        self.ranks.close()
        if self.reservation is not None:
            self.reservation.close()
        self.claim.close()
        error = outcome.failure.as_status() if outcome.failure else None
        ended = {"state": outcome.state, "exit": outcome.exit, "error": error}
        self.folder.try_update_status(**ended, ranks=self.ranks.as_status(), gpus=[], note="")

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
