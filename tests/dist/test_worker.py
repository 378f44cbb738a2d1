"""The worker in a real process group: the rank that failed is named, not the one that lost its peer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from packtrain.config import build_recipe, dump_recipe
from packtrain.launch.folder import RunFolder, write_text
from packtrain.launch.supervisor import Outcome, supervise

pytestmark = pytest.mark.timeout(90)

WORKER = """
import os, signal, sys, time, types
import torch
from packtrain.errors import UserError
from packtrain.launch import worker

def run(folder, recipe, world, stop, beat):
    behave = (folder / "behave").read_text()
    world.sum(torch.ones(()))
    if world.rank == 1 and behave == "raise":
        raise ValueError("bad row")
    if world.rank == 1 and behave == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behave == "mistake":
        raise UserError("data.train", f"rank {world.rank} sees no rows", "give rows")
    if behave in ("raise", "kill"):
        world.sum(torch.ones(()))
    return behave != "stopped"

sys.modules["packtrain.launch.job"] = types.SimpleNamespace(run=run)
worker.main(sys.argv[1])
"""


def run(tmp_path: Path, behave: str) -> tuple[Outcome, RunFolder]:
    folder = RunFolder.create(tmp_path, "trial")
    values = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "launch": {"device": "cpu", "processes": 2, "timeout": "60s"},
    }
    write_text(folder.recipe, dump_recipe(build_recipe(values)))
    (folder.path / "behave").write_text(behave)
    (folder.path / "worker.py").write_text(WORKER)
    command = [sys.executable, str(folder.path / "worker.py"), str(folder.path)]
    return supervise(folder, command, 2), folder


def test_peer_of_a_rank_that_raises_is_not_blamed(tmp_path: Path) -> None:
    outcome, folder = run(tmp_path, "raise")
    assert outcome.failure and (outcome.failure.rank, outcome.failure.message) == (1, "ValueError: bad row")
    assert folder.error(1).exists()


def test_peer_of_a_killed_rank_is_not_blamed(tmp_path: Path) -> None:
    outcome, folder = run(tmp_path, "kill")
    assert folder.error(0).exists(), "rank 0 was to lose its peer"
    assert outcome.failure and (outcome.failure.rank, outcome.failure.kind) == (1, "signal")


def test_mistake_is_one_sentence(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "mistake")
    assert outcome.exit == 2 and outcome.failure
    assert str(outcome.failure.user_error()).startswith("data.train: rank ")


@pytest.mark.parametrize(("behave", "state", "code"), [("finish", "done", 0), ("stopped", "stopped", 130)])
def test_rank_0_says_how_it_ended(tmp_path: Path, behave: str, state: str, code: int) -> None:
    outcome, folder = run(tmp_path, behave)
    assert outcome == Outcome(state, code)
    assert folder.read_status().state == state
