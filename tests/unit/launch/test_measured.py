"""A plan beside what was measured, on the terminal and in measured.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli.app import run
from packtrain.launch.folder import RunFolder
from packtrain.launch.measured import Past, by_term, compared, history, read_plan, write_measured
from packtrain.launch.progress import describe

GIB = 2**30
TERMS = {"weights": 4 * GIB, "optimizer_states": 2 * GIB, "activations": 3 * GIB, "loss": GIB}
PLAN: dict[str, Any] = {
    "machine": {"processes": 2},
    "memory": {"total_bytes": 10 * GIB, "terms": TERMS},
    "speed": {"tokens_per_second": 1000.0},
}
KEPT = {"weights": 4 * GIB, "optimizer_states": 3 * GIB, "adapters": 0}
EVENT = {"event": "memory", "step": 3, "peaks": [11 * GIB, 12 * GIB], "kept": KEPT}


def test_the_difference_is_told_by_term() -> None:
    found = by_term(EVENT, PLAN)
    assert found == {
        "weights": {"planned": 4 * GIB, "measured": 4 * GIB, "difference": 0},
        "optimizer_states": {"planned": 2 * GIB, "measured": 3 * GIB, "difference": -GIB},
        "rest": {"planned": 4 * GIB, "measured": 4 * GIB, "difference": 0},
    }
    line = compared(EVENT, PLAN)
    assert line == (
        "memory at step 3: 12.00 GiB, the most of 2 processes; planned 10.00 GiB "
        "(-16.7%; optimizer_states -1.00 GiB)"
    )  # fmt: skip
    assert describe(EVENT, PLAN) == line


def test_without_a_plan_the_peak_is_told() -> None:
    assert describe({**EVENT, "peaks": [300 * 2**20]}) == "memory at step 3: 300 MiB"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"memory": {"total_bytes": 0}}', '{"memory": 3}'])
def test_a_damaged_plan_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(tmp_path / "plan.json") is None and read_plan(tmp_path / "none.json") is None


def test_a_full_disk_does_not_hide_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, "run")
    folder.events.write_text(json.dumps(EVENT) + "\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("packtrain.launch.measured.write_json", full)
    write_measured(folder)
    assert "measured.json cannot be written" in capsys.readouterr().err


DAMAGED = (
    "{", "[]", "null", '{"memory": 3}', '{"memory": {"planned": "x", "measured": 5}}', "[" * 100_000,
    '{"memory": {"planned": [1], "measured": 0}}', '{"memory": {"planned": 1, "measured": Infinity}}',
    '{"memory": {"planned": 1, "measured": 1}, "speed": {"planned": []}}',
)  # fmt: skip


def test_measured_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path, "run")
    write_measured(folder)
    assert not folder.measured.exists()  # nothing was measured yet
    events = [{"event": "start", "step": 0}]
    rates = [1.0, 2.0, 3.0, 1800.0, 1900.0, 2000.0]
    events += [{"event": "step", "step": i, "loss": 1.0, "tokens_per_second": rate} for i, rate in enumerate(rates, 1)]
    events.append(EVENT)
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    folder.plan.write_text(json.dumps(PLAN))
    write_measured(folder)
    found = json.loads(folder.measured.read_text())
    assert found["memory"]["planned"] == 10 * GIB and found["memory"]["measured"] == 12 * GIB
    assert found["memory"]["terms"] == by_term(EVENT, PLAN)
    assert found["speed"] == {"planned": 2000.0, "measured": 1900.0}  # both processes, warm
    for number, text in enumerate(DAMAGED):
        (tmp_path / f"damaged-{number}").mkdir()
        (tmp_path / f"damaged-{number}" / "measured.json").write_text(text)
    assert list(history(tmp_path)) == [Past("run", 10 * GIB, 12 * GIB, 2000.0, 1900.0)]
    assert run(["plan", "--history", "--folder", str(tmp_path)]) == 0
    assert "-16.7%" in (told := capsys.readouterr().out) and "+5.3%" in told
    assert run(["plan"]) == 2 and "no recipe is given" in capsys.readouterr().err
