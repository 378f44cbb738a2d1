"""A rank's sign of life: what it is at, since when, and whether it waits for others. Starts without torch."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from packtrain.errors import UserError

BEAT_SECONDS = 1.0
WATCHED = "step"
"""The phase in which a rank must make progress. Loading, compiling and saving take as long as they take."""
_WAITING_IN = ("torch/distributed/", "packtrain/parallel/world.py", "packtrain/train/loop.py", "deepspeed/comm/")
"""Whose code waits for other ranks or for the device when it is the innermost Python frame."""
_COMPILING_IN = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
_COMPUTING_IN = ("/torch/", "/transformers/", "/peft/", "/bitsandbytes/", "/deepspeed/", "/triton/")
_WAITING_AT = "_engine_run_backward"  # the backward pass, with the collectives inside it


@dataclass(frozen=True)
class Beat:
    """What ``logs/rank-N.beat`` holds.

    Attributes:
        number: of this beat; a process that is stopped or swapped out writes no new one.
        phase: ``step`` is watched, everything else is not; nor is the first step, which compiles.
        quiet: seconds since the training thread was last heard of.
        longest: the longest that it was quiet in a step before.
        doing: ``waits`` (for other ranks or the device), ``compiles``, ``computes`` or ``elsewhere``.
        place: the innermost line of Python it is at.
    """

    number: int
    phase: str
    quiet: float
    longest: float
    doing: str
    place: str


class Pulse:
    """Called by the training thread; a thread of its own writes a beat each second, and whenever the phase changes.

    Args:
        each: called after each beat, for what else a rank must look at now and then.
    """

    def __init__(self, path: Path, each: Sequence[Callable[[], None]] = ()) -> None:
        self.path, self.each = path, each
        self._phase, self._at, self._longest = "loading", time.monotonic(), 0.0
        self._number = self._num_steps = 0
        self._thread_id = threading.get_ident()
        self._ended, self._changed = threading.Event(), threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __call__(self, phase: str | None = None) -> None:
        """Say that the training thread begins with ``phase``, or goes on with the one it is at."""
        now = time.monotonic()
        if self.phase == WATCHED and phase in (None, WATCHED):
            self._longest = max(self._longest, now - self._at)
        before = self.phase
        self._num_steps += phase == WATCHED
        self._phase, self._at = phase or self._phase, now
        if self.phase != before:  # what stops in the next moment must not be judged by what it was at before
            self._changed.set()

    @property
    def phase(self) -> str:
        return "first step" if self._phase == WATCHED and self._num_steps == 1 else self._phase

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._number += 1
            for action in (self._write_beat, *self.each):
                try:
                    action()
                except (OSError, UserError) as error:  # a full disk, a file server away: the run goes on
                    self._complain(error)
            self._changed.wait(BEAT_SECONDS)
            self._changed.clear()

    def _beat(self) -> Beat:
        quiet = time.monotonic() - self._at
        doing, place = _where(sys._current_frames().get(self._thread_id))
        return Beat(self._number, self.phase, round(quiet, 1), round(self._longest, 1), doing, place)

    def _write_beat(self) -> None:
        """Whole or not at all, but not flushed to the disk: it is worth nothing after a crash."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self._beat())))
        os.replace(temporary, self.path)

    def _complain(self, error: Exception) -> None:
        """Once: what comes each second would fill the log."""
        if not self._told:
            print(f"packtrain: warning: the heartbeat misses something ({error})", file=sys.stderr, flush=True)
        self._told = True


def read_beat(path: Path) -> Beat | None:
    """The newest beat, or None where the rank has written none, or the file server is away for a moment."""
    try:
        return Beat(**json.loads(path.read_text()))
    except OSError:
        return None


def _where(frame: FrameType | None) -> tuple[str, str]:
    """What the innermost frame of a thread says: (doing, place)."""
    if frame is None:
        return "elsewhere", ""
    code, file = frame.f_code, frame.f_code.co_filename
    place = f"{Path(file).name}:{frame.f_lineno} ({code.co_name})"
    if any(part in outer for outer in _files(frame) for part in _COMPILING_IN):
        return "compiles", place
    if code.co_name == _WAITING_AT or any(part in file for part in _WAITING_IN):
        return "waits", place
    return "computes" if any(part in file for part in _COMPUTING_IN) else "elsewhere", place


def _files(frame: FrameType) -> list[str]:
    """The files of a frame and of those that called it."""
    found, current = [], frame
    while current is not None:
        found.append(current.f_code.co_filename)
        current = current.f_back  # type: ignore[assignment]
    return found
