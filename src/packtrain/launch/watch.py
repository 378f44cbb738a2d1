"""Finds the rank that hangs, from what all ranks beat. Starts without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.launch.pulse import WATCHED, Beat, read_beat

SLOWER = 5.0
"""A rank may be quiet for so many times its longest pause in a step: a step that is always long is no hang."""
_PATIENCE = 3.0
"""Outside of steps a rank may miss beats for so many limits: a long call there may keep Python's one lock."""


@dataclass
class _Seen:
    beat: Beat
    at: float


@dataclass
class HangWatch:
    """Looks at the beats of some ranks.

    The reader's own clock counts from when a beat *changed*, so the clocks of other nodes do not matter.

    Args:
        paths: the file of each rank's beats.
        limit: seconds without a beat, or without progress inside a step, after which a rank is taken for hung.
    """

    paths: Sequence[Path]
    limit: float
    clock: Callable[[], float] = time.monotonic
    _seen: dict[int, _Seen] = field(default_factory=dict)

    def hung(self) -> tuple[int, str] | None:
        """The rank that hangs and how it shows, or None."""
        now = self.clock()
        for rank, path in enumerate(self.paths):
            self._look(rank, read_beat(path), now)
        for rank, seen in self._seen.items():
            if now - seen.at > self.limit * (1 if seen.beat.phase == WATCHED else _PATIENCE):
                return rank, f"gave no sign of life for {now - seen.at:.0f} s"
        return self._stuck() if len(self._seen) == len(self.paths) else None

    def silent(self, seconds: float) -> tuple[int, str] | None:
        """The rank whose last beat is oldest, where that is longer ago than ``seconds``."""
        now = self.clock()
        rank = min(self._seen, key=lambda rank: self._seen[rank].at, default=None)
        if rank is None or now - self._seen[rank].at < seconds:
            return None
        return rank, f"gave no sign of life for {now - self._seen[rank].at:.0f} s"

    def _look(self, rank: int, beat: Beat | None, now: float) -> None:
        if beat is None:  # not started, or ended
            self._seen.pop(rank, None)
        elif rank not in self._seen or self._seen[rank].beat.number != beat.number:
            self._seen[rank] = _Seen(beat, now)

    def _stuck(self) -> tuple[int, str] | None:
        """The one rank that neither goes on nor waits, while every other one waits for it."""
        beats = {rank: seen.beat for rank, seen in self._seen.items()}
        busy = [rank for rank, beat in beats.items() if beat.phase != WATCHED or beat.doing != "waits"]
        if len(busy) != 1:
            return None
        rank, beat = busy[0], beats[busy[0]]
        alone = len(beats) == 1 and beat.doing == "computes"  # nobody waits for it: it may be slow
        if (
            beat.phase != WATCHED
            or beat.doing == "compiles"
            or alone
            or beat.quiet <= max(self.limit, SLOWER * beat.longest)
        ):
            return None
        return rank, f"made no progress for {beat.quiet:.0f} s, at {beat.place}"
