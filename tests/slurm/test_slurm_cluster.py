"""Runs on a real Slurm of two nodes: submitted, cut off in each of the ways a cluster has, and resumed to the same end.

The oracle of every loss is the same recipe, run undisturbed by `packtrain train` on this machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.slurm.cluster import Cluster, cluster
from tests.tiny import make_model, values, write_chats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 100
CUT_AT = 12
"""The step from which on a run is disturbed; it has written a checkpoint before."""
PACKTRAIN = [sys.executable, "-m", "packtrain"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as found:
        found.env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        yield found
    assert not found.processes()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several nodes")  # a space, as users' folders have
    model, data = make_model(folder / "model"), write_chats(folder / "chats.jsonl", 64)
    path = folder / "tiny.yaml"
    train = {"max_steps": STEPS, "batch_size": 16, "micro_batch_size": 2}
    recipe = values(
        model, str(data), parallel={"strategy": "ddp"}, train=train, checkpoint={"every": 10},
        launch={"processes": 1, "timeout": "60s"}, output={"folder": str(folder / "runs")},
    )  # fmt: skip
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> dict[int, float]:
    """Each step's loss in a run of two processes without Slurm."""
    words = ["train", str(recipe), "output.name=undisturbed", "launch.processes=2"]
    done = finished([*PACKTRAIN, *words], {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return losses(recipe.parent / "runs" / "undisturbed")


class Submitted:
    """``packtrain slurm --submit`` in a process of its own."""

    def __init__(self, slurm: Cluster, recipe: Path, name: str, *options: str) -> None:
        self.slurm = slurm
        self.run = recipe.parent / "runs" / name
        self.said = recipe.parent / f"{name}.said"
        command = [*PACKTRAIN, "slurm", str(recipe), f"output.name={name}", "--nodes", "2", "--submit", *options]
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(command, env=slurm.env, cwd=recipe.parent, stdout=out, stderr=out)

    @property
    def number(self) -> str:
        self.wait(lambda: "is submitted" in self.said.read_text())
        found = re.search(r"job (\d+) is submitted", self.said.read_text())
        assert found is not None
        return found.group(1)

    def wait(self, condition: Callable[[], bool], limit: float = 90) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.story()
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: max(losses(self.run), default=0) >= step)

    def state(self) -> str:
        return self.slurm("squeue", "-h", f"--jobs={self.number}", "--format=%T").strip()

    def end(self) -> int:
        try:
            return self.process.wait(150)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.story()) from None

    def story(self) -> str:
        logs = [self.said, *(self.run.parent / "slurm").glob("*.out")]
        return "\n".join(log.read_text()[-4000:] for log in logs) + self.slurm.tail()

    def restarts(self) -> int:
        found = re.search(r"Restarts=(\d+)", self.slurm("scontrol", "show", "job", self.number))
        assert found is not None
        return int(found.group(1))

    def check_resumed(self, undisturbed: dict[int, float]) -> None:
        """Done in two parts, the second from a checkpoint, on the undisturbed curve."""
        assert self.end() == 0, self.story()
        assert self.restarts() == 1
        first, second = events(self.run, "start")
        assert (first["step"], first["world_size"], second["world_size"]) == (0, 2, 2)
        assert CUT_AT - 10 <= second["step"] < STEPS
        assert losses(self.run) == pytest.approx(undisturbed, rel=1e-6)


def finished(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["event"] == kind]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


def test_two_nodes_train_as_two_processes_of_one_machine(
    slurm: Cluster, recipe: Path, undisturbed: dict[int, float]
) -> None:
    job = Submitted(slurm, recipe, "whole", "--time", "10")
    assert job.end() == 0, job.story()
    said = job.said.read_text()
    assert "RUNNING on n[1-2]" in said and "COMPLETED" in said and f"step {STEPS}/{STEPS}" in said
    assert losses(job.run) == pytest.approx(undisturbed, rel=1e-6)
    assert json.loads((job.run / "status.json").read_text())["state"] == "done"
    assert (job.run / "final" / "model.safetensors").exists()


@pytest.mark.parametrize("node", ["n2", "n1"])  # n1 runs the batch script
def test_a_node_without_power_and_the_job_resumes(
    slurm: Cluster, recipe: Path, undisturbed: dict[int, float], node: str
) -> None:
    job = Submitted(slurm, recipe, f"power-{node}")
    job.wait_for_step(CUT_AT)
    slurm.kill_node(node)
    job.wait(lambda: job.state() == "PENDING")
    slurm.start_node(node)
    job.check_resumed(undisturbed)


def test_a_node_that_slurm_gives_up_and_the_job_resumes(
    slurm: Cluster, recipe: Path, undisturbed: dict[int, float]
) -> None:
    job = Submitted(slurm, recipe, "down")
    job.wait_for_step(CUT_AT)
    slurm("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.wait(lambda: job.state() == "PENDING")
    slurm("scontrol", "update", "nodename=n2", "state=resume")
    job.check_resumed(undisturbed)


def test_the_time_limit_is_a_checkpoint_and_another_start(
    slurm: Cluster, recipe: Path, undisturbed: dict[int, float]
) -> None:
    job = Submitted(slurm, recipe, "limit")
    job.wait_for_step(CUT_AT)
    slurm("scancel", "--signal=USR1", "--batch", job.number)  # what Slurm sends for --signal=B:USR1@120
    job.check_resumed(undisturbed)
    stopped_at = events(job.run, "start")[1]["step"]
    assert stopped_at in [event["step"] for event in events(job.run, "checkpoint")]
    steps = [event["step"] for event in events(job.run, "step")]
    assert steps == list(range(1, STEPS + 1))  # nothing was computed twice


def test_a_preempted_job_saves_and_resumes_behind_the_other(
    slurm: Cluster, recipe: Path, undisturbed: dict[int, float]
) -> None:
    job = Submitted(slurm, recipe, "preempted")
    job.wait_for_step(CUT_AT)
    slurm("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.check_resumed(undisturbed)
    steps = [event["step"] for event in events(job.run, "step")]
    assert steps == list(range(1, STEPS + 1))  # a checkpoint was written in the grace time


def test_a_user_stops_the_run_and_the_job_ends(slurm: Cluster, recipe: Path) -> None:
    job = Submitted(slurm, recipe, "stopped")
    job.wait_for_step(CUT_AT)
    subprocess.run([*PACKTRAIN, "runs", "stop", str(job.run), "--no-wait"], check=True, stdout=subprocess.DEVNULL)
    assert job.end() == 130, job.story()
    assert job.restarts() == 0 and "FAILED" in job.said.read_text()


def test_srun_alone_joins_its_tasks(slurm: Cluster, recipe: Path, undisturbed: dict[int, float]) -> None:
    words = ["train", str(recipe), "output.name=srun"]
    done = finished(["srun", "--nodes=2", "--ntasks=2", *PACKTRAIN, *words], slurm.env)
    assert done.returncode == 0, done.stderr
    assert losses(recipe.parent / "runs" / "srun") == pytest.approx(undisturbed, rel=1e-6)


def test_a_mistake_in_the_recipe_is_not_tried_again(slurm: Cluster, recipe: Path) -> None:
    job = Submitted(slurm, recipe, "wrong", "data.train=nowhere.jsonl")
    assert job.end() == 1, job.story()
    said = job.said.read_text()
    assert job.restarts() == 0 and "FAILED" in said
    assert said.count("packtrain: error: nowhere.jsonl: no such file") == 1 and "Traceback" not in said
