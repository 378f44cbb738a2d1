"""events.jsonl: one JSON object a line, written by rank 0 and followed by everybody."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Somewhere else that events go."""

    def write(self, event: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class EventLog:
    """Appends events to a file, a line each, whole, and hands them to the sinks.

    Args:
        path: None on ranks that write nothing.
    """

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1) if path else None  # noqa: SIM115
        if path and self._file and _torn(path):
            self._file.write("\n")
        self._sinks = sinks
        self._complained = False

    def write(self, event: str, **values: Any) -> None:
        if self._file is None:
            return
        record = {"event": event, "time": round(time.time(), 3), **{k: _plain(v) for k, v in values.items()}}
        try:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk must not end a run; the next line takes this one along
            self._complain(error)
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._complain(error)
        for sink in self._sinks:
            sink.close()

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            print(f"packtrain: warning: events.jsonl cannot be written ({error})", file=sys.stderr, flush=True)
        self._complained = True


def _torn(path: Path) -> bool:
    """Whether a crash left half a line at the end."""
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def latest(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one kind by step, each step once: where a step was done again, the newer counts.

    A run that continues from a step has abandoned what came after it, whether it gets there again or not.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "start":
            begun = event.get("step", 0)
            by_step = {step: kept for step, kept in by_step.items() if step <= begun}
        if event["event"] == kind:
            by_step[event["step"]] = event
    return [by_step[step] for step in sorted(by_step)]
