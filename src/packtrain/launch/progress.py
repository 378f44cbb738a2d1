"""What a run looks like from outside: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from packtrain.launch.measured import compared, read_plan
from packtrain.metrics.reader import Event, EventReader

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_SECONDS = 10.0
PLAIN_STEPS = 20


class Progress:
    """Follows the events of a run and shows them. Base class: plain lines."""

    def __init__(self, reader: EventReader, stream: TextIO) -> None:
        self.reader, self.stream = reader, stream
        self.total_steps = 0
        self.last_step: Event | None = None
        self.last_eval: Event | None = None
        self.gone = False
        self._shown_step = 0
        self._shown_time = 0.0

    def update(self) -> None:
        """Show what is new. Nobody reading any more (``| head``) ends the display, never the run."""
        for event in self.reader.poll():
            self._note(event)
            if self.gone:
                continue
            try:
                self._show(event)
            except BrokenPipeError:
                self.gone = True

    def close(self) -> None:
        """Take the display down."""

    def line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def _note(self, event: Event) -> None:
        if event["event"] == "start":
            self.total_steps = event.get("total_steps") or 0
        elif event["event"] == "step":
            self.last_step = event
        elif event["event"] == "eval":
            self.last_eval = event

    def _show(self, event: Event) -> None:
        if event["event"] == "step":
            self._step(event)
        elif text := describe(event, self._plan):
            self.line(text)

    @cached_property
    def _plan(self) -> dict[str, Any] | None:
        return read_plan(self.reader.path.with_name("plan.json"))

    def _step(self, event: Event) -> None:
        now, step = time.monotonic(), event["step"]
        due = step - self._shown_step >= PLAIN_STEPS or now - self._shown_time >= PLAIN_SECONDS
        if due or step == self.total_steps:
            self._shown_step, self._shown_time = step, now
            self.line(f"step {step}/{self.total_steps or '?'}  {_numbers(event)}")


class TerminalProgress(Progress):
    """A bar with the latest numbers; evaluations and checkpoints scroll by above it."""

    def __init__(self, reader: EventReader, stream: TextIO) -> None:
        super().__init__(reader, stream)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def line(self, text: str) -> None:
        if self._bar is None:
            super().line(text)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def _step(self, event: Event) -> None:
        if self._bar is None:
            self._open()
        assert self._bar is not None and self._task is not None
        self._bar.update(self._task, completed=event["step"], total=self.total_steps or None, numbers=_numbers(event))

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("left"),
            console=Console(file=self.stream),
        )
        self._task = self._bar.add_task("train", numbers="")
        self._bar.start()


def open_progress(reader: EventReader, stream: TextIO | None = None) -> Progress:
    """The display that fits the stream, stdout unless given."""
    stream = stream or sys.stdout
    return TerminalProgress(reader, stream) if stream.isatty() else Progress(reader, stream)


def describe(event: Event, plan: dict[str, Any] | None = None) -> str:
    """One line for an event that is not a step; empty for those with nothing to say.

    Args:
        plan: of the run, beside which its memory is told.
    """
    kind = event["event"]
    if kind == "start" and "trainable" in event:
        trainable = f"{_short(event['trainable'])} of {_short(event['parameters'])} parameters"
        sent = f"; {event['traffic']}" if event.get("traffic") and event["world_size"] > 1 else ""
        return f"training {trainable}, {event['strategy']}, {event['total_steps']} steps{sent}"
    if kind == "eval":
        perplexity = f"  perplexity {float(event['perplexity']):.2f}" if event.get("perplexity") is not None else ""
        loss, rows = float(event["loss"]), event.get("rows", "?")
        return f"eval at step {event['step']}: loss {loss:.4f}{perplexity}  ({rows} rows)"
    if kind == "checkpoint":
        return f"checkpoint at step {event['step']} ({event.get('seconds', 0):.1f} s)"
    if kind == "memory":
        return compared(event, plan)
    if kind == "warning":
        return f"warning: {event['message']}"
    return ""


def _numbers(step: Event) -> str:
    speed = f"  {step['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in step else ""
    return f"loss {float(step['loss']):.4f}{speed}"


def _short(count: int) -> str:
    """1234567 as 1.2M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
