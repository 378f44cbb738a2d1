"""Under torchrun and srun: the processes find each other, share one run folder, and fail with one voice.

The process group is real; model and data are not, so that only the joining is looked at.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packtrain.config import build_recipe, dump_recipe, load_recipe
from packtrain.launch.folder import RunFolder

pytestmark = pytest.mark.timeout(90)

RANK = """
import os, sys, time, types
import torch
from packtrain.cli import app
from packtrain.errors import UserError
from packtrain.launch import join, start
from packtrain.launch import prepare as prepared

def run(folder, recipe, world, stop, beat):
    behave = os.environ["BEHAVE"]
    (folder / f"rank-{world.rank}-of-{world.size}").touch()
    assert world.sum(torch.ones(())).item() == world.size
    if behave == "fail" and world.rank == 1:
        raise ValueError("bad row")
    while behave in ("fail", "wait") and not world.any(stop.set):
        time.sleep(0.05)
    return behave == "finish"

def resolve(asked, processes):
    recipe = asked.model_copy(deep=True)
    recipe.launch.processes, recipe.launch.device = processes, "cpu"
    return recipe, ["odd; mend it."]

def prepare(recipe):
    if os.environ["BEHAVE"] == "mistake":
        raise UserError("data.train", "is empty", "give rows")

sys.modules["packtrain.launch.job"] = types.SimpleNamespace(run=run)
start.resolve, join.prepare, prepared.plan_json = resolve, prepare, lambda recipe: {}
app.main()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    values = {"model": {"path": "m"}, "data": {"train": "t"}, "launch": {"timeout": "60s"}}
    Path("trial.yaml").write_text(dump_recipe(build_recipe(values)))
    Path("rank.py").write_text(RANK)
    return tmp_path


def srun(behave: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two tasks with the variables of one step of Slurm."""
    job = str(os.getpid() + time.monotonic_ns() % 10007)
    step = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "BEHAVE": behave}
    return [
        subprocess.Popen(
            [sys.executable, "rank.py", *arguments],
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str], list[str]]:
    outputs = [process.communicate(timeout=60) for process in processes]
    return [p.returncode for p in processes], [out for out, _ in outputs], [err for _, err in outputs]


def the_run() -> RunFolder:
    (path,) = Path("runs").iterdir()
    return RunFolder(path)


def test_srun_stopped_resumed_and_done(here: Path) -> None:
    processes = srun("wait", "train", "trial.yaml")
    deadline = time.monotonic() + 40
    while not list(here.glob("runs/*/rank-1-of-2")) and time.monotonic() < deadline:
        time.sleep(0.1)
    folder = the_run()
    assert folder.read_status().state == "running" and folder.alive()
    processes[1].send_signal(signal.SIGTERM)
    codes, out, err = ended(processes)
    assert codes == [130, 130], err
    assert folder.read_status().state == "stopped" and f"runs resume {folder.name}" in out[0]
    assert err[0].count("warning: odd") == 1 and "warning: odd" not in err[1]
    assert load_recipe(folder.recipe).launch.processes == 2

    codes, _, err = ended(srun("finish", "runs", "resume", folder.name))
    assert codes == [0, 0], err
    assert (folder.read_status().state, folder.read_status().exit) == ("done", 0)

    codes, _, err = ended(srun("finish", "runs", "resume", folder.name))
    assert codes == [2, 2]
    assert "is done" in err[0] and "error" not in err[1]


def test_a_mistake_is_said_once(here: Path) -> None:
    codes, _, err = ended(srun("mistake", "train", "trial.yaml"))
    assert codes == [2, 2]
    assert "packtrain: error: data.train: is empty; give rows." in err[0] and "error" not in err[1]
    assert not Path("runs").exists()


def test_torchrun_names_the_rank_that_failed(here: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = {**os.environ, "BEHAVE": "fail"}
    done = subprocess.run(
        [*command, "rank.py", "train", "trial.yaml"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "ValueError: bad row" in done.stderr
    status = the_run().read_status()
    assert status.state == "failed" and status.error
    assert (status.error["rank"], status.error["message"]) == (1, "ValueError: bad row")
