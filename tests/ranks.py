"""Real processes over gloo: run a function as every rank of a world."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_main(
    rank: int, size: int, port: int, device: str, function: Callable[..., Any], args: tuple[Any, ...], queue: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    import torch

    from packtrain.parallel.world import join, leave

    torch.set_num_threads(1)
    try:
        world = join(device, 30)
        queue.put((rank, True, function(world, *args)))
        leave()
    except BaseException:  # whatever ends a rank is told to the test before it goes on up
        queue.put((rank, False, traceback.format_exc()))
        raise


def _next_result(queue: Any, processes: list[Any], timeout: float) -> tuple[int, bool, Any]:
    """The next rank's result; a rank that died by a signal sends none, and is one."""
    import queue as queues

    end = time.monotonic() + timeout
    while True:
        try:
            return queue.get(timeout=0.2)
        except queues.Empty:
            for rank, process in enumerate(processes):
                if process.exitcode is not None and process.exitcode < 0:
                    return rank, False, f"ended by {signal.Signals(-process.exitcode).name}"
            if time.monotonic() > end:
                raise TimeoutError(f"no result within {timeout} s") from None


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, device: str = "cpu", timeout: float = 240
) -> list[Any]:
    """``function(world, *args)`` on ``size`` fresh processes; what each returned, by rank."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    queue, port = context.Queue(), free_port()
    processes = [
        context.Process(target=_rank_main, args=(rank, size, port, device, function, args, queue))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in range(size):
            rank, done, value = _next_result(queue, processes, timeout)
            assert done, f"rank {rank} failed:\n{value}"
            results[rank] = value
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(size)]
