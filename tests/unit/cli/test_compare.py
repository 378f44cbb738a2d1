from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli.compare import run_compare
from packtrain.config import build_recipe, dump_recipe
from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder


def make_run(root: Path, name: str, losses: list[float | str], state: str, rate: float = 1e-4) -> RunFolder:
    folder = RunFolder.create(root, name)
    values = {"model": {"path": "demo"}, "data": {"train": "samsum_mini"}, "train": {"learning_rate": rate}}
    folder.recipe.write_text(dump_recipe(build_recipe(values)))
    folder.update_status(state=state)
    start = {"event": "start", "step": 0, "total_steps": 40, "world_size": 2, "strategy": "ddp", "precision": "bf16"}
    events: list[dict[str, Any]] = [start] if losses else []
    for number, loss in enumerate(losses, 1):
        events.append({"event": "step", "step": number, "loss": loss, "tokens_per_second": 100.0 * number})
        if number % 10 == 0:
            events.append({"event": "eval", "step": number, "loss": loss})
    if events:
        folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path, "done", [4 - n / 20 for n in range(40)], "done")
    make_run(tmp_path, "实验", [3.0] * 10 + [2.0] * 10 + ["nan"] * 10, "running", rate=5e-5)
    make_run(tmp_path, "never", [], "failed")
    return tmp_path


NAMES = ["done", "实验", "never"]


def test_numbers_and_settings(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_compare(NAMES, None, as_json=True, runs_folder=str(runs))
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    done, nan, never = found["runs"]
    assert (done["state"], done["step"], done["total_steps"], done["train_loss"]) == ("done", 40, 40, 2.05)
    assert (done["best_eval_loss"], done["best_eval_step"], done["tokens_per_second"]) == (2.05, 40, 2050.0)
    assert (nan["train_loss"], nan["eval_loss"], nan["best_eval_loss"]) == ("nan", "nan", 2.0)
    assert (nan["best_eval_step"], nan["strategy"], nan["precision"]) == (20, "ddp", "bf16")
    assert (never["state"], never["step"], never["train_loss"], never["strategy"]) == ("failed", None, None, "auto")
    assert found["settings"] == [{"key": "train.learning_rate", "values": [1e-4, 5e-5, 1e-4]}]


def test_plain_text_without_a_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_compare(NAMES, None, as_json=False, runs_folder=str(runs))
    lines = capsys.readouterr().out.splitlines()
    assert not any("\x1b" in line or line != line.rstrip() for line in lines)
    cells = {line.split("  ")[1].strip(): line.split() for line in lines if line.startswith("  ")}
    assert cells["steps"][1:] == ["40/40", "30/40", "-"]
    assert cells["last training loss"][-3:] == ["2.0500", "nan", "-"]
    assert cells["train.learning_rate"][1:] == ["0.0001", "5e-05", "0.0001"]
    chart = [line.partition("┤")[2] or line.partition("│")[2] for line in lines if line.endswith("│")]
    assert len(chart) == 13
    # A falls from the left to the right edge; B starts at 3 and ends, where its losses do, in the left half.
    assert chart[0].startswith("A") and "A" in chart[-1][-3:] + chart[-2][-3:]
    assert max(line.rfind("B") for line in chart) < 40
    assert not any("C" in line for line in chart)


def test_a_terminal_gets_colours_and_its_own_width(runs: Path) -> None:
    code = f"from packtrain.cli.compare import run_compare; run_compare({NAMES!r}, None, False, {str(runs)!r})"
    env = os.environ | {"COLUMNS": "60", "TERM": "xterm-256color", "FORCE_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    text = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    from rich.cells import cell_len
    from rich.text import Text

    assert "\x1b[" in text and "⠤" in text
    assert max(cell_len(line) for line in Text.from_ansi(text).plain.splitlines()) == 60


def test_a_recipe_that_is_missing_hides_nothing_else(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "never" / "recipe.yaml").unlink()
    run_compare(NAMES, None, as_json=False, runs_folder=str(runs))
    shown = capsys.readouterr()
    assert "no such file" in shown.err
    assert next(line.split() for line in shown.out.splitlines() if "learning_rate" in line)[-1] == "?"


def test_no_events_at_all_and_no_torch(runs: Path) -> None:
    make_run(runs, "nor-this", [], "failed")
    code = (
        "import sys; from packtrain.cli.compare import run_compare; "
        f"run_compare(['never', 'nor-this'], {str(runs / 'c.png')!r}, False, {str(runs)!r}); "
        "assert 'torch' not in sys.modules"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "All settings are the same." in text and (runs / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("names", "png", "sentence"),
    [
        (["done"], None, "1 run; name 2 to 26 runs"),
        (["done", "done"], None, "done: is given twice"),
        (["done", "dine"], None, "did you mean 'done'"),
        (["done", "never"], "nowhere/c.png", "--png: nowhere/c.png cannot be written"),
    ],
)
def test_mistakes_are_sentences(runs: Path, names: list[str], png: str | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run_compare(names, png, as_json=False, runs_folder=str(runs))
