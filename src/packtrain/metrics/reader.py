"""Reading ``events.jsonl`` while somebody else is still writing it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_NEEDED = {
    "step": ("step", "loss"),
    "eval": ("step", "loss"),
    "checkpoint": ("step",),
    "warning": ("message",),
    "memory": ("step", "peaks", "kept"),
}
"""What an event of a kind is nothing without."""
_HEAD_BYTES = 4 * 1024
_TAIL_BYTES = 64 * 1024


class EventReader:
    """Hands out each event once, in order; what is not a whole line yet waits for the next call."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self.path = path
        self.num_damaged = 0
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def poll(self) -> list[Event]:
        """The events that were completed since the last call; none where there is no file yet."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        events, num_damaged = _parse(whole.splitlines())
        self.num_damaged += num_damaged
        return events


def read_events(path: Path) -> list[Event]:
    """Every whole event so far."""
    return EventReader(path).poll()


def last_events(path: Path) -> dict[str, Event]:
    """The newest event of each kind, from both ends of a file that may be long: `start` is at its head."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - _TAIL_BYTES)
        file.seek(0)
        lines = file.read(min(start, _HEAD_BYTES)).splitlines()[:-1]
        file.seek(start)
        tail = file.read().splitlines()
    events, _ = _parse(lines + (tail[1:] if start else tail))
    return {event["event"]: event for event in events}


def _parse(lines: Iterable[bytes]) -> tuple[list[Event], int]:
    """Events, and how many lines were none: a crash in the middle of a line leaves one."""
    events: list[Event] = []
    num_damaged = 0
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            num_damaged += 1
            continue
        if _is_event(event):
            events.append(event)
        else:
            num_damaged += 1
    return events, num_damaged


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return False
    return all(key in value for key in _NEEDED.get(value["event"], ()))
