"""The plan of a run beside what was measured: said while it runs, and kept as measured.json. Starts without torch."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packtrain.launch.folder import RunFolder, write_json
from packtrain.metrics.events import latest
from packtrain.metrics.reader import Event, read_events

_WARM_UP = 3  # steps that compile
_GIB, _MIB = 2**30, 2**20
_RATE = "tokens_per_second"


def read_plan(path: Path) -> dict[str, Any] | None:
    """A run's plan.json; None where there is none, or none that can be read."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
        return made if made["memory"]["total_bytes"] > 0 else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def compared(event: Event, plan: dict[str, Any] | None) -> str:
    """One line for a ``memory`` event."""
    most, processes = max(event["peaks"]), len(event["peaks"])
    who = f", the most of {processes} processes" if processes > 1 else ""
    if plan is None:
        return f"memory at step {event['step']}: {_size(most)}{who}"
    planned = plan["memory"]["total_bytes"]
    terms = by_term(event, plan)
    parts = [f"{name} {_signed(pair['difference'])}" for name, pair in terms.items() if _matters(pair, planned)]
    told = "; ".join(filter(None, [apart(planned, most), ", ".join(parts)]))
    return f"memory at step {event['step']}: {_size(most)}{who}; planned {_size(planned)} ({told})"


def apart(planned: float | None, measured: float | None) -> str:
    """How far a plan was from what was measured, as a share of that; +: more was planned."""
    return f"{planned / measured - 1:+.1%}" if planned and measured else ""


def by_term(event: Event, plan: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes of rank 0, planned, measured, and their difference (+: more was planned): of what stays, term by term, and
    of the rest of the peak together.
    """
    planned, kept = plan["memory"]["terms"], event["kept"]
    found = {name: _pair(planned.get(name, 0), size) for name, size in kept.items()}
    rest = event["peaks"][0] - sum(kept.values())
    found["rest"] = _pair(sum(planned.values()) - sum(planned.get(name, 0) for name in kept), rest)
    return {name: pair for name, pair in found.items() if pair["planned"] or pair["measured"]}


def write_measured(folder: RunFolder) -> None:
    """measured.json from the run's events, once there is something to say."""
    events = read_events(folder.events)
    memory = latest(events, "memory")
    if not memory:
        return
    plan, last = read_plan(folder.plan), memory[-1]
    made: dict[str, Any] = {"step": last["step"], "peak_bytes": last["peaks"], "kept_bytes": last["kept"]}
    steps = latest(events, "step")[_WARM_UP:]
    if steps:
        made[_RATE] = round(statistics.median(step["tokens_per_second"] for step in steps), 1)
    if plan is not None:
        planned = plan["memory"]["total_bytes"]
        made["memory"] = {"planned": planned, "measured": max(last["peaks"]), "terms": by_term(last, plan)}
        if plan.get("speed") and steps:
            each = plan["speed"]["tokens_per_second"] * plan["machine"]["processes"]
            made["speed"] = {"planned": round(each, 1), "measured": made[_RATE]}
    try:
        write_json(folder.measured, made)
    except OSError as error:  # a full disk must not hide how the run ended
        print(f"packtrain: warning: {folder.measured} cannot be written ({error})", file=sys.stderr, flush=True)


def _pair(planned: float, measured: float) -> dict[str, int]:
    return {"planned": round(planned), "measured": round(measured), "difference": round(planned - measured)}


def _matters(found: dict[str, int], planned: float) -> bool:
    return abs(found["difference"]) > 0.01 * planned


def _size(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def _signed(count: float) -> str:
    return f"{'+' if count >= 0 else '-'}{_size(abs(count))}"


class Past(NamedTuple):
    """A run's plan and what was measured. Bytes of the process that used most; tokens a second of all."""

    name: str
    planned_bytes: int
    measured_bytes: int
    planned_rate: float | None
    measured_rate: float | None


def history(output_folder: str | Path) -> Iterator[Past]:
    """Of every run in the folder that has both, the newest first."""
    files = sorted(Path(output_folder).glob("*/measured.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            memory, speed = found["memory"], found.get("speed") or {}
            rates = [None if rate is None else float(rate) for rate in (speed.get("planned"), found.get(_RATE))]
            past = Past(file.parent.name, int(memory["planned"]), int(memory["measured"]), *rates)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # of a run without a plan, or damaged
        yield past
