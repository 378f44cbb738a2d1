"""The group that torchrun or srun has made: whether there is one, and its variables. Starts without torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import MutableMapping

from packtrain.errors import UserError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def in_group() -> bool:
    """Whether torchrun or a step of srun with several tasks started this process.

    SLURM_NTASKS and SLURM_PROCID will not do: a batch script has them too, and it is alone.
    """
    return all(name in os.environ for name in _TORCHRUN) or _in_slurm_step()


def size() -> int | None:
    """The number of processes of the group over all nodes, or None outside of one."""
    if not in_group():
        return None
    return int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_STEP_NUM_TASKS"])


def identity() -> str:
    """The batch job or torchrun group that this process belongs to, and which of its starts; empty outside of one."""
    if not in_group():
        return ""
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"slurm-{job}/{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else f"torchrun-{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def succeeds(earlier: str) -> bool:
    """Whether this process belongs to a later start of the job ``earlier``, whose processes are gone for sure."""
    job, _, start = identity().rpartition("/")
    earlier_job, _, earlier_start = earlier.rpartition("/")
    return job != "" and job == earlier_job and int(start) > int(earlier_start)


def quiet_rank() -> bool:
    """Whether another process of this node says the same: one of each node prints the user's mistake."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0" and in_group()


def adopt(env: MutableMapping[str, str]) -> None:
    """In a step of srun, set the variables that torchrun would have set for torch.distributed."""
    if "RANK" in env:
        return
    node, job, step = int(env["SLURM_NODEID"]), int(env["SLURM_JOB_ID"]), int(env.get("SLURM_STEP_ID", "0"))
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = str(tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[node])
    env.setdefault("MASTER_PORT", str(20000 + (job * 31 + step) % 20000))
    if "MASTER_ADDR" not in env:
        alone = env.get("SLURM_STEP_NUM_NODES") == "1"
        env["MASTER_ADDR"] = "127.0.0.1" if alone else _first_node_address(env["SLURM_STEP_NODELIST"])


def tasks_per_node(text: str) -> list[int]:
    """Slurm's ``2(x3),1`` as [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _in_slurm_step() -> bool:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def _first_node_address(nodes: str) -> str:
    """The address of the first node; its name need not resolve."""
    first = _scontrol("show", "hostnames", nodes).split()[0]
    found = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", first))
    return found.group(1) if found else first


def _scontrol(*arguments: str) -> str:
    try:
        return subprocess.run(["scontrol", *arguments], check=True, capture_output=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        what = "is not set and scontrol cannot tell it"
        raise UserError("MASTER_ADDR", what, "export MASTER_ADDR") from error
