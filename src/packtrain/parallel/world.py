"""The group of processes that train together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from packtrain.inherited import STORE_FD


@dataclass(frozen=True)
class World:
    """This process's place. ``size`` is the number of processes over all nodes."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of ``tensor`` over all ranks, on each of them, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes; all ranks get the same answer."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item() > 0)

    def broadcast(self, value: object) -> object:
        """Rank 0's picklable ``value`` on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: object) -> list[object]:
        """Every rank's picklable ``value``, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def join(device: str, timeout_seconds: float) -> World:
    """Join the group that the environment describes (RANK, WORLD_SIZE, ...; absent: a group of one).

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL, with gloo for what lies in host memory).
        timeout_seconds: how long a collective waits for the others.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        alone = torch.cuda.device_count() == 1  # srun --gpus-per-task shows each process its own GPU only
        place = torch.device("cuda", 0 if alone else local_rank)
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    else:
        place = torch.device("cpu")
        backend = "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        store = _store(rank, size, timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timeout,
            device_id=place if device == "cuda" else None,
        )  # fmt: skip
    else:  # a group of one: sharded strategies and checkpoints work in it as in any other
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return World(rank, local_rank, size, local_size, place)


def _store(rank: int, size: int, timeout: timedelta) -> dist.Store | None:
    """Where the ranks of a supervised run meet: on the socket that rank 0 inherited. Else torch's default."""
    if STORE_FD not in os.environ:
        return None
    listener = int(os.environ[STORE_FD])
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, timeout,
        master_listen_fd=listener if rank == 0 else None,
    )  # fmt: skip


def leave() -> None:
    """Leave the group when all ranks are done with it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
