"""The last lines of a run: what came out of it, or why nothing did."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packtrain.launch.folder import RunFolder
from packtrain.metrics.reader import Event, last_events

LOG_LINES = 15
_NEXT = {"chat": "packtrain.cli.chat", "eval": "packtrain.cli.evaluate"}
"""Commands that take a run, and the module without which they are not there."""


def ended(folder: RunFolder, state: str) -> list[str]:
    """What to say about a run that is done or stopped."""
    events = last_events(folder.events)
    lines = [f"{state}: {_numbers(events)}" if events else state]
    lines += [f"curve: {path}" for path in sorted(folder.path.glob("*.png"))]
    if state == "stopped":
        return [*lines, f"continue it with: packtrain runs resume {call_it(folder)}"]
    if folder.final.is_dir():
        lines.append(f"model: {folder.final}")
        commands = [name for name, module in _NEXT.items() if find_spec(module)]
        lines += [f"next:  packtrain {name} {call_it(folder)}" for name in commands]
    return lines


def failed(error: Mapping[str, Any], log_lines: int = LOG_LINES) -> list[str]:
    """What to say about a run that a rank brought down: the ``error`` of its status, and the end of its log."""
    rank, message = error["rank"], error["message"]
    who = f"rank {rank} failed: " if rank >= 0 else "the supervisor failed: "
    lines = [message if message.startswith("rank ") else who + message, *_log_tail(error["log"], log_lines)]
    return [*lines, f"mend: {error['mend']}"] if error.get("mend") else lines


def _numbers(events: dict[str, Event]) -> str:
    parts = []
    if step := events.get("step"):
        parts.append(f"step {step['step']}, loss {step['loss']:.4f}")
    if evaluation := events.get("eval"):
        parts.append(f"eval loss {evaluation['loss']:.4f}")
    if rouge := events.get("rouge"):
        parts.append(f"ROUGE-L {rouge['rougeL']:.1f} on {rouge['rows']} rows")
    end, start = events.get("end"), events.get("start", {})
    if end and end["seconds"] > 0 and start.get("step", 0) == 0:  # of a resumed run the seconds are a part
        parts.append(f"{end['tokens'] / end['seconds']:,.0f} tokens/s over {end['seconds']:.0f} s")
    return ", ".join(parts)


def _log_tail(log: str, count: int) -> list[str]:
    path = Path(log)
    if not log or not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()[-count:]
    return [*(f"  | {line}" for line in lines), f"log: {path}"]


def call_it(folder: RunFolder) -> str:
    """The shortest name that finds this run from here."""
    return folder.name if folder.path == Path("runs").absolute() / folder.name else str(folder.path)
