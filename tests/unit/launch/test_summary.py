from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.launch import summary
from packtrain.launch.folder import RunFolder

STEP = {"event": "step", "step": 10, "loss": 1.5}
EVAL = {"event": "eval", "step": 10, "loss": 1.75}
END = {"event": "end", "steps": 10, "seconds": 20.0, "tokens": 40_000}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create("runs", "first")


def write(folder: RunFolder, *events: dict[str, Any]) -> None:
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_done(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "find_spec", lambda module: module.endswith("chat") or None)
    write(folder, {"event": "start", "step": 0}, STEP, EVAL, END)
    folder.final.mkdir()
    (folder.path / "curve.png").touch()
    assert summary.ended(folder, "done") == [
        "done: step 10, loss 1.5000, eval loss 1.7500, 2,000 tokens/s over 20 s",
        f"curve: {folder.path}/curve.png",
        f"model: {folder.final}",
        "next:  packtrain chat first",
    ]


def test_a_resumed_run_claims_no_speed(folder: RunFolder) -> None:
    write(folder, {"event": "start", "step": 8}, STEP, END)
    assert summary.ended(folder, "done") == ["done: step 10, loss 1.5000"]


def test_stopped_elsewhere_is_resumed_by_path(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert summary.ended(folder, "stopped")[-1] == "continue it with: packtrain runs resume first"
    monkeypatch.chdir("/")
    assert summary.ended(folder, "stopped")[-1] == f"continue it with: packtrain runs resume {folder.path}"
