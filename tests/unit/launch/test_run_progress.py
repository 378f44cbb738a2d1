from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from packtrain.launch.progress import Progress, TerminalProgress, open_progress
from packtrain.metrics.reader import EventReader

START = {
    "event": "start",
    "total_steps": 50,
    "parameters": 135_000_000,
    "trainable": 4_884_480,
    "strategy": "FSDP2 over 2 processes",
    "world_size": 2,
}


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 2.5, "tokens_per_second": 1234.5}


def write(path: Path, *events: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_plain_lines_are_few(tmp_path: Path) -> None:
    path, stream = tmp_path / "events.jsonl", io.StringIO()
    progress = open_progress(EventReader(path), stream)
    assert type(progress) is Progress
    write(path, START, *(step(number) for number in range(1, 51)))
    write(path, {"event": "eval", "step": 50, "loss": 2.25, "perplexity": 9.4877, "rows": 12})
    write(path, {"event": "checkpoint", "step": 50, "seconds": 0.52}, {"event": "invented_later"})
    progress.update()
    assert stream.getvalue().splitlines() == [
        "training 4.9M of 135.0M parameters, FSDP2 over 2 processes, 50 steps",
        "step 1/50  loss 2.5000  1,234 tokens/s",
        "step 21/50  loss 2.5000  1,234 tokens/s",
        "step 41/50  loss 2.5000  1,234 tokens/s",
        "step 50/50  loss 2.5000  1,234 tokens/s",
        "eval at step 50: loss 2.2500  perplexity 9.49  (12 rows)",
        "checkpoint at step 50 (0.5 s)",
    ]


def test_a_closed_pipe_ends_the_display_and_not_the_run(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    path = tmp_path / "events.jsonl"
    progress = Progress(EventReader(path), Closed())
    write(path, START, step(1))
    progress.update()
    write(path, step(2))
    progress.update()
    assert progress.gone and progress.last_step == step(2)


def test_terminal_bar(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path, stream = tmp_path / "events.jsonl", Terminal()
    progress = open_progress(EventReader(path), stream)
    assert isinstance(progress, TerminalProgress)
    write(path, START, step(7), {"event": "warning", "message": "[odd] row"})
    progress.update()
    progress.close()
    assert "7/50" in stream.getvalue() and "warning: [odd] row" in stream.getvalue()
