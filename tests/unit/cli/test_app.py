"""Arguments that the command line does not take: one sentence with the command, the value and the mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.cli.app import run
from packtrain.errors import first_sentence

ARGUMENTS = [
    ("plan x.yaml --gpus 0", "packtrain plan --gpus: '0' is not allowed; give a number of at least 1."),
    ("plan x.yaml --gpus -1", "packtrain plan --gpus: '-1' is not allowed; give a number of at least 1."),
    ("plan x.yaml --gpus 1.5", "packtrain plan --gpus: '1.5' is not allowed; give a whole number."),
    ("plan x.yaml --nodes many", "packtrain plan --nodes: 'many' is not allowed; give a whole number."),
    ("plan x.yaml --gups 2", "see `packtrain plan --help`."),
    ("plan x.yaml --gpus", "'--gpus' requires an argument; see `packtrain --help`."),
    ("runs logs --nonsense", "see `packtrain runs logs --help`."),
    ("plam x.yaml", "see `packtrain --help`."),
]


@pytest.mark.parametrize("line, told", ARGUMENTS)
def test_a_wrong_argument_is_one_sentence(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("packtrain: error: ") and said.count("\n") == 1 and told in said, said


@pytest.mark.parametrize("words", [["l8.yaml"], ["--gpus", "3"], ["--all"], ["--calibrate"], ["--gpu", "H100"]])
def test_the_history_takes_nothing_else(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--history", "--folder", str(tmp_path), *words]) == 2
    assert "leave out all but --folder and --json" in capsys.readouterr().err


def test_the_first_sentence_of_another_librarys_error() -> None:
    assert first_sentence(ValueError("No `x`. This may be because.\nOf that.")) == "No `x`"
    assert first_sentence(ValueError("version 1.5 is old.")) == "version 1.5 is old"
    assert first_sentence(KeyError()) == "KeyError"
