from __future__ import annotations

import pytest

from packtrain.launch import group

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def test_a_batch_script_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert not group.in_group()


def test_a_step_of_several_tasks_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not group.in_group()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert group.in_group()


def test_torchrun_of_one_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert group.in_group()


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("3,2(x2),1", [3, 2, 2, 1])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert group.tasks_per_node(text) == counts


def test_adopt_sets_what_torchrun_sets() -> None:
    env = {**STEP, "MASTER_ADDR": "10.0.0.1"}
    group.adopt(env)
    got = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    expected = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert got == {**expected, "MASTER_ADDR": "10.0.0.1"}
    assert 20000 <= int(env["MASTER_PORT"]) < 40000


def test_adopt_leaves_torchrun_alone() -> None:
    env = {**STEP, "RANK": "0", "WORLD_SIZE": "2"}
    group.adopt(env)
    assert env == {**STEP, "RANK": "0", "WORLD_SIZE": "2"}


def test_one_node_is_localhost() -> None:
    env = {**STEP, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "5"}
    group.adopt(env)
    assert env["MASTER_ADDR"] == "127.0.0.1"


def test_first_node_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "hostnames": "n1\nn2\n",
        "node": "NodeName=n1 Arch=x86_64\n   NodeAddr=10.1.2.3 NodeHostName=n1\n",
    }
    monkeypatch.setattr(group, "_scontrol", lambda _, what, __: answers[what])
    env = dict(STEP)
    group.adopt(env)
    assert env["MASTER_ADDR"] == "10.1.2.3"


@pytest.mark.parametrize(
    ("env", "identity"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "7"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2"}, "slurm-7/0"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_RESTART_COUNT": "1"}, "slurm-7/1"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}, ""),
        ({"TORCHELASTIC_RUN_ID": "x/y", "TORCHELASTIC_RESTART_COUNT": "2"}, "torchrun-x/y/2"),
    ],
)
def test_identity(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], identity: str) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    if "TORCHELASTIC_RUN_ID" in env:
        env = env | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert group.identity() == identity


@pytest.mark.parametrize(
    ("earlier", "takes_over"),
    [("slurm-7/0", True), ("slurm-7/1", False), ("slurm-8/0", False), ("", False), ("torchrun-7/0", False)],
)
def test_a_requeued_job_takes_its_own_run_over(monkeypatch: pytest.MonkeyPatch, earlier: str, takes_over: bool) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert group.succeeds(earlier) is takes_over
