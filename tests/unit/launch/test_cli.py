"""The command line as a user meets it: exit statuses, one sentence for a mistake, and a quick start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packtrain import __version__
from packtrain.cli import app
from packtrain.cli.runs import age
from packtrain.launch.folder import RunFolder

HEAVY = {"torch", "transformers", "rich.progress", "numpy", "packtrain.config.schema"}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create("runs", "first")
    error = {"rank": 1, "kind": "bug", "message": "ValueError: x", "log": ""}
    folder.update_status(state="failed", supervisor=None, error=error)
    folder.events.write_text('{"event": "step", "step": 3, "loss": 1.25, "tokens_per_second": 90}\n')
    folder.log(0).write_text("hello from rank 0\n")
    return tmp_path / "runs"


def modules_after(*arguments: str) -> set[str]:
    code = "import sys; from packtrain.cli.app import run; run(sys.argv[1:]); print('\\n', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["runs", "--help"], ["--version"]])
def test_help_starts_nothing_heavy(arguments: list[str]) -> None:
    assert not modules_after(*arguments) & HEAVY


def test_listing_runs_starts_nothing_heavy(runs: Path) -> None:
    assert not modules_after("runs") & HEAVY
    assert not modules_after("runs", "show", "first") & HEAVY


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"packtrain {__version__}\n"
    assert app.run([]) == 0
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["train"],
        ["train", "missing.yaml"],
        ["train", "--odd", "recipe.yaml"],
        ["data", "missing.yaml", "--rows", "-1"],
        ["runs", "show", "nobody"],
        ["runs", "logs", "first", "--rank", "7"],
        ["runs", "stop", "first"],
        ["runs", "kill", "first"],
        ["runs", "resume", "first", "--step", "4"],
        ["runs", "fork", "first", "--step", "4"],
        ["runs", "delete", "first"],
        ["runs", "resume", "first", "train.epochs=9"],
    ],
)
def test_a_mistake_is_one_line_and_2(runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("packtrain: error: ")
    assert err.count("\n") == 1 and err.endswith(".\n")


def test_a_done_run_is_not_resumed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(runs / "first").update_status(state="done", supervisor=None)
    assert app.run(["runs", "resume", "first"]) == 2
    assert "first: is done" in capsys.readouterr().err


def test_only_local_rank_0_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert app.run(["train", "missing.yaml"]) == 2
    assert capsys.readouterr().err == ""


def test_interrupt_is_130_and_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("packtrain.launch.start.start", interrupted)
    assert app.run(["train", "recipe.yaml"]) == 130
    monkeypatch.setattr("packtrain.launch.start.start", broken)
    with pytest.raises(ZeroDivisionError):
        app.run(["train", "recipe.yaml"])


def test_status_of_a_run_is_the_status_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("packtrain.launch.start.start", lambda *given: seen.append(given) or 1)
    assert app.run(["train", "a.yaml", "train.epochs=1", "launch.processes=2"]) == 1
    assert app.run(["train", "a.yaml", "-d", "--resume"]) == 1
    assert seen == [("a.yaml", ["train.epochs=1", "launch.processes=2"], False, False), ("a.yaml", [], True, True)]


def test_closed_pipe_is_quiet(runs: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "packtrain.cli", "runs"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 1 and done.stderr == b""


def test_runs_list_show_logs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["runs"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "STATE", "STEP", "LOSS", "AGE"]
    assert row.split()[:4] == ["first", "failed", "3/?", "1.2500"]
    assert app.run(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == 1.25
    assert app.run(["runs", "show", "first"]) == 0
    assert "rank 1 failed: ValueError: x" in capsys.readouterr().out
    assert app.run(["runs", "show", "first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["error"]["rank"] == 1
    assert app.run(["runs", "logs", "first", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "hello from rank 0\n"
    assert app.run(["runs", "logs", "first"]) == 0
    assert capsys.readouterr().out == "step 3/?  loss 1.2500  90 tokens/s\n"
    assert app.run(["runs", "--folder", "elsewhere"]) == 0
    assert capsys.readouterr().out == "no runs in elsewhere\n"


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (59, "59s"), (90, "2m"), (7200, "2h"), (2e5, "2d")])
def test_age(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_no_mistake_tells_a_secret(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sEcReT123456")
    assert app.run(["train", "hf_sEcReT123456.yaml"]) == 2
    assert "<HF_TOKEN>.yaml" in capsys.readouterr().err


def test_nothing_but_a_file_is_written_over(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create("runs", "second")
    os.mkfifo("pipe")
    assert app.run(["runs", "compare", "first", "second", "--png", "pipe"]) == 2
    assert app.run(["runs", "compare", "first", "second", "--png", ""]) == 2
    err = capsys.readouterr().err
    assert "--png: pipe is there and is not a file; give another file." in err
    assert Path("pipe").is_fifo()


def test_delete_takes_each_run_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["runs", "delete", "first", "runs/first", "--yes"]) == 0
    assert capsys.readouterr().out == "first: deleted\n" and not (runs / "first").exists()
