"""A look at a group of processes before a model is loaded: are they alike, how fast is the network, what is shared."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
import uuid
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from packtrain import __version__
from packtrain.config import Recipe
from packtrain.config.difference import difference
from packtrain.errors import UserError
from packtrain.launch import group
from packtrain.parallel.world import World

CUDA_BYTES, CPU_BYTES = 64 * 2**20, 8 * 2**20
_ROUNDS = 3
_LOOKS, _LOOK_SECONDS = 4, 0.1
_OWN_TO_A_HOST = ("data.workers", "data.cache", "launch.gpus", "output.name")
"""Settings that each host may have its own of: they change no number."""
_CLIENTS = re.compile(r"(\d+)/(\d+) clients joined")


@dataclass(frozen=True)
class Facts:
    """One rank's host, and what must be alike on all of them; empty where there is no such thing."""

    host: str
    python: str
    torch: str
    transformers: str
    packtrain: str
    cuda: str
    nccl: str
    gpu: str
    recipe: Recipe


_MUST_AGREE = ("packtrain", "torch", "transformers", "python", "cuda", "nccl")


@dataclass(frozen=True)
class Preflight:
    """What was found in a group whose processes are alike.

    Attributes:
        hosts: how many processes each host has.
        bandwidth: bus bandwidth of an all-reduce in bytes a second; None in a group of one.
        num_bytes: what was reduced.
        unshared: hosts that do not see rank 0's cache folder; None where there is no other host, or no probe.
        probe_error: why the folder could not be probed.
        gpus: the hosts of each name of a GPU.
    """

    hosts: dict[str, int]
    bandwidth: float | None
    num_bytes: int
    unshared: list[str] | None
    probe_error: str
    gpus: dict[str, list[str]]

    @property
    def lines(self) -> list[str]:
        """The group in one line, then what is unusual about it."""
        found = [", ".join(part for part in (self._size, self._speed, self._cache) if part)]
        if len(self.gpus) > 1:
            names = "; ".join(f"{name or 'none'} on {', '.join(hosts)}" for name, hosts in self.gpus.items())
            found.append(f"the GPUs are not alike: {names}; the slowest sets the pace")
        if self.probe_error:
            found.append(f"whether the nodes share the data cache is not known ({self.probe_error})")
        return found

    @property
    def _size(self) -> str:
        counts = list(self.hosts.values())
        nodes = f"{len(counts)} node{'s' * (len(counts) > 1)}"
        if len(set(counts)) == 1:
            return f"{nodes} x {counts[0]} process{'es' * (counts[0] > 1)}"
        return f"{nodes} with {' + '.join(map(str, counts))} processes"

    @property
    def _speed(self) -> str:
        if self.bandwidth is None:
            return ""
        size, speed = self.num_bytes // 2**20, self.bandwidth / 1e9
        return f"all-reduce {size} MiB at {speed:.{0 if speed >= 100 else 1 if speed >= 1 else 3}f} GB/s (bus)"

    @property
    def _cache(self) -> str:
        if self.unshared is None:
            return ""
        if not self.unshared:
            return "data cache shared by all nodes"
        if len(self.unshared) == len(self.hosts) - 1:
            return "each node with a data cache of its own"
        return f"data cache not shared with {', '.join(self.unshared)}"


def check(world: World, recipe: Recipe, cache_folder: Path, host: str | None = None) -> Preflight:
    """Compare the ranks, measure an all-reduce and probe the cache folder. A collective.

    Args:
        recipe: resolved, as this rank has it.
        cache_folder: where this rank keeps tokenised data.
        host: this rank's host, where it is not the name that the system knows.

    Raises:
        UserError: two hosts differ in what must be alike; on every rank.
    """
    facts = cast(list[Facts], world.gather(gather_facts(world, recipe, host)))
    _refuse_differences(facts)
    first_ranks = {fact.host: rank for rank, fact in reversed(list(enumerate(facts)))}
    hosts = {fact.host: 0 for fact in facts}
    gpus: dict[str, list[str]] = {}
    for fact in facts:
        hosts[fact.host] += 1
        if fact.host not in gpus.setdefault(fact.gpu, []):
            gpus[fact.gpu].append(fact.host)
    num_bytes = CUDA_BYTES if world.device.type == "cuda" else CPU_BYTES
    bandwidth = all_reduce_bandwidth(world, num_bytes)
    unshared, error = _probe(world, cache_folder, facts, first_ranks)
    return Preflight(hosts, bandwidth, num_bytes, unshared, error, gpus)


def gather_facts(world: World, recipe: Recipe, host: str | None = None) -> Facts:
    """What this rank is."""
    on_gpu = world.device.type == "cuda"
    return Facts(
        host=host or socket.gethostname(),
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch.__version__,
        transformers=version("transformers"),
        packtrain=__version__,
        cuda=str(torch.version.cuda) if on_gpu else "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        gpu=torch.cuda.get_device_name(world.device) if on_gpu else "",
        recipe=recipe,
    )


def _refuse_differences(facts: list[Facts]) -> None:
    first = facts[0]
    for other in facts[1:]:
        for name in _MUST_AGREE:
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                what = f"{name} {ours or 'none'} on {first.host}, {theirs or 'none'} on {other.host}"
                raise UserError("group", what, f"install the same {name} on every node")
        _refuse_other_recipe(first, other)


def _refuse_other_recipe(first: Facts, other: Facts) -> None:
    settings = [s for s in difference([first.recipe, other.recipe]) if s.key not in _OWN_TO_A_HOST]
    if settings:
        ours, theirs = settings[0].shown
        what = f"{ours} on {first.host}, {theirs} on {other.host}"
        raise UserError(settings[0].key, what, "start every node with the same recipe, and set what was auto")


def all_reduce_bandwidth(world: World, num_bytes: int) -> float | None:
    """Bus bandwidth in bytes a second, as NCCL's tests count it: bytes times 2(n-1)/n over the seconds of a round."""
    if world.size == 1:
        return None
    data = torch.zeros(num_bytes // 4, device=world.device)
    seconds = torch.tensor([_timed(world, data) for _ in range(1 + _ROUNDS)][1:])  # the first one makes connections
    slowest = seconds.to(world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return num_bytes * 2 * (world.size - 1) / world.size / float(slowest.median())


def _timed(world: World, data: torch.Tensor) -> float:
    world.barrier()
    finish(world.device)
    started = time.perf_counter()
    world.sum(data)
    finish(world.device)
    return time.perf_counter() - started


def finish(device: torch.device) -> None:
    """Wait for what a GPU was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _probe(world: World, folder: Path, facts: list[Facts], first_ranks: dict[str, int]) -> tuple[list[str] | None, str]:
    """The hosts that do not see a file of rank 0's, and why there was none. One rank of each other host looks."""
    if len(first_ranks) == 1:
        return None, ""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    error = _written(probe) if world.is_main else ""
    try:
        name, error = cast(tuple[str, str], world.broadcast((probe.name, error)))
        if error:
            return None, error
        looks = first_ranks[facts[world.rank].host] == world.rank
        seen = world.gather(world.is_main or not looks or _seen(folder / name))
    finally:
        if world.is_main and not error:
            probe.unlink(missing_ok=True)
    return [host for host, rank in first_ranks.items() if not seen[rank]], ""


def _written(probe: Path) -> str:
    """Write the file; why it cannot be, or nothing."""
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
    except OSError as error:
        return f"{probe.parent}: {error.strerror}"
    return ""


def _seen(probe: Path) -> bool:
    """Whether the file is there, or appears soon: a network file system may be late."""
    for _ in range(_LOOKS):
        if probe.exists():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def not_joined(error: BaseException, recipe: Recipe) -> UserError | None:
    """What to tell the user where joining the group raised ``error``; None where the user cannot have caused it."""
    if not isinstance(error, dist.DistError):
        return None
    if "EADDRINUSE" in str(error):
        what = f"port {os.environ['MASTER_PORT']} of {socket.gethostname()} is taken by another program"
        return UserError("MASTER_PORT", what, "export MASTER_PORT with a free one, the same on every node")
    return incomplete(str(error), group.size() or 1, recipe.launch.timeout)


def incomplete(text: str, size: int, timeout: str) -> UserError | None:
    """What to tell the user where a group was not complete in time; None for any other error.

    Args:
        text: what torch said.
        size: how many processes were to come.
        timeout: ``launch.timeout``.
    """
    if found := _CLIENTS.search(text):
        what = f"{found[1]} of {found[2]} processes came within {timeout}"
    elif "client socket has timed out" in text and (place := re.search(r"connect to \(?([^,\s]+), (\d+)", text)):
        what = f"rank 0 did not answer at {place[1]}:{place[2]} within {timeout}"
    elif "wait timeout" in text or "Wait timeout" in text:
        what = f"not all of the {size} processes came within {timeout}"
    else:
        return None
    mend = "see whether the others have started and reach MASTER_ADDR, or raise launch.timeout"
    return UserError("group", what, mend)
