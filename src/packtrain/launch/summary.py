"""The last lines of a run: what came out of it, or why nothing did."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from packtrain.launch.failure import Failure
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
        return [*lines, f"continue it with: packtrain runs resume {_call_it(folder)}"]
    if folder.final.is_dir():
        lines.append(f"model: {folder.final}")
        commands = [name for name, module in _NEXT.items() if find_spec(module)]
        lines += [f"next:  packtrain {name} {_call_it(folder)}" for name in commands]
    return lines


def failed(failure: Failure) -> list[str]:
    """What to say about a run that a rank brought down."""
    if failure.kind in ("signal", "exit"):
        return [failure.message, *_log_tail(failure.log)]
    lines = [f"rank {failure.rank} failed: {failure.message}", *_log_tail(failure.log)]
    if failure.kind == "oom":
        lines.append("mend: train.micro_batch_size=1, parallel.recompute=full or a lower data.max_length")
    return lines


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


def _log_tail(log: str) -> list[str]:
    path = Path(log)
    if not log or not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return [*(f"  | {line}" for line in lines), f"log: {path}"]


def _call_it(folder: RunFolder) -> str:
    """The shortest name that finds this run from here."""
    return folder.name if folder.path == Path("runs").absolute() / folder.name else str(folder.path)
