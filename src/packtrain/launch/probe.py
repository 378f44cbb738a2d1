"""How fast the parts of a machine are, each measured as a training step uses it.

``python -m packtrain.launch.probe FOLDER SPEC OUT``, a process a GPU, started by ``launch/calibrate.py``. All measure
at once, as they train at once, and the slowest counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn

from packtrain.launch import failure
from packtrain.launch.calibration import Shapes
from packtrain.launch.folder import RunFolder, write_json
from packtrain.launch.preflight import finish
from packtrain.launch.process import die_with_supervisor, leave_at_once
from packtrain.models.attention import prefer_fast_kernels, sdpa_attention
from packtrain.models.sizes import LOSS_CHUNK
from packtrain.parallel import world as group
from packtrain.parallel.world import World
from packtrain.plan.speed import ATTENTION_BACKWARD, HOST_UPDATE_BYTES, causal_attention

_ROUNDS = 8
_TIMEOUT_SECONDS = 120.0
_PIECE = 32 << 20


class Spec(BaseModel):
    """What is measured, and with how much of it.

    Attributes:
        folder: whose disk is written to. seconds: of the longest measurement, warming up aside.
        tokens: of a matrix product. copied: bytes copied within a GPU's memory. moved: between it and host memory,
            and sent by a rank. written: to disk. updated: weights of the optimizer's step in host memory.
    """

    device: str
    folder: str
    shapes: Shapes
    seconds: float = 3.0
    tokens: int = 8192
    copied: int = 1 << 30
    moved: int = 256 << 20
    written: int = 1 << 30
    updated: int = 32 << 20


def main(folder: str, spec_file: str, out: str) -> None:
    """Measure as the rank that the environment names; rank 0 writes the rates; never returns.

    Args:
        folder: the supervisor's, for a failure. spec_file: a ``Spec`` in JSON. out: where the rates go.
    """
    die_with_supervisor()
    try:
        spec = Spec.model_validate_json(Path(spec_file).read_bytes())
        here = group.join(spec.device, _TIMEOUT_SECONDS)
        prefer_fast_kernels()
        found = measure(spec, here)
        if here.is_main:
            write_json(Path(out), found)
        group.leave()
    except BaseException as error:  # noqa: BLE001 - the end of a rank: recorded, then it leaves
        told = failure.describe(error, int(os.environ["RANK"]))
        failure.record(RunFolder(folder), told)
        print(told.traceback, file=sys.stderr)
        leave_at_once(1)
    leave_at_once(0)


def measure(spec: Spec, world: World) -> dict[str, float]:
    """Each part's rate on the slowest rank: FLOP/s or bytes/s by its name in ``config.facts.Rates``. A collective.

    ``link`` is left out in a group of one.
    """
    device = world.device
    parts: dict[str, Callable[[], float]] = {
        "matmul": lambda: matmul_rate(spec, device),
        "attention": lambda: attention_rate(spec, device),
        "memory": lambda: copy_rate(spec, device),
        "host": lambda: host_rate(spec, device),
        "host_memory": lambda: host_memory_rate(spec),
    }
    found: dict[str, float] = {}
    for name, part in parts.items():
        world.barrier()
        found[name] = part()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if world.size > 1:
        found["link"] = gather_rate(spec, world)
    if world.is_main:
        found["disk"] = disk_rate(spec)
    every = cast(list[dict[str, float]], world.gather(found))
    return {name: min(one[name] for one in every if name in one) for name in every[0]}


def matmul_rate(spec: Spec, device: torch.device) -> float:
    """FLOP/s of the matrix products of a step: the blocks' at ``tokens``, the head's at a chunk of the loss."""
    shapes, flops, seconds = spec.shapes, 0.0, 0.0
    head = [(shapes.vocabulary, shapes.hidden)]
    for linears, tokens, times in (
        (shapes.linears, spec.tokens, shapes.num_blocks),
        (head, min(LOSS_CHUNK, spec.tokens), 1),
    ):
        work = _products(linears, tokens, device)
        seconds += times * _seconds(work, device, spec.seconds if times > 1 else spec.seconds / 3) / tokens
        flops += times * 6.0 * sum(outputs * inputs for outputs, inputs in linears)
    return flops / seconds


def _products(linears: Sequence[tuple[int, int]], tokens: int, device: torch.device) -> Callable[[], None]:
    """Forward, and the gradients of input and weight, of each linear."""
    like: dict[str, Any] = {"device": device, "dtype": _dtype(device)}
    weights = [torch.randn(shape, **like).mul_(0.02) for shape in linears]
    rows = {width: torch.randn(tokens, width, **like) for shape in linears for width in shape}

    def work() -> None:
        for weight in weights:
            outputs, inputs = weight.shape
            _ = rows[inputs] @ weight.T
            _ = rows[outputs] @ weight
            _ = rows[outputs].T @ rows[inputs]

    return work


def attention_rate(spec: Spec, device: torch.device) -> float:
    """FLOP/s of causal attention, forward and backward, by the kernel that a run of such rows takes."""
    shapes = spec.shapes
    batch = max(1, spec.tokens // shapes.length)
    like: dict[str, Any] = {"device": device, "dtype": _dtype(device)}
    sizes = [(batch, heads, shapes.length, shapes.head_size) for heads in (shapes.heads, *[shapes.kv_heads] * 2)]
    inputs = [torch.randn(size, **like).requires_grad_() for size in sizes]
    gradient = torch.randn(batch, shapes.length, shapes.heads, shapes.head_size, **like)
    module = nn.Identity()

    def work() -> None:
        query, key, value = inputs
        out, _ = sdpa_attention(module, query, key, value, None, sliding_window=shapes.window)
        torch.autograd.grad(out, inputs, gradient)

    forward = causal_attention(shapes.heads * shapes.head_size, shapes.length, shapes.window)
    seconds = _seconds(work, device, spec.seconds / 2)
    return batch * shapes.length * forward * (1 + ATTENTION_BACKWARD) / seconds


def copy_rate(spec: Spec, device: torch.device) -> float:
    """Bytes/s read and written by a copy within a GPU's memory."""
    source = torch.zeros(spec.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * spec.copied / _seconds(lambda: target.copy_(source), device, spec.seconds / 6)


def host_rate(spec: Spec, device: torch.device) -> float:
    """Bytes/s between host memory that is pinned and a GPU, the mean of both ways."""
    there = torch.zeros(spec.moved, dtype=torch.uint8, device=device)
    here = torch.zeros(spec.moved, dtype=torch.uint8, pin_memory=device.type == "cuda")
    up = _seconds(lambda: there.copy_(here, non_blocking=True), device, spec.seconds / 6)
    down = _seconds(lambda: here.copy_(there, non_blocking=True), device, spec.seconds / 6)
    return 2 * spec.moved / (up + down)


def host_memory_rate(spec: Spec) -> float:
    """Bytes/s of an AdamW step in host memory, with this process's share of the cores."""
    weight = torch.zeros(spec.updated, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    seconds = _seconds(optimizer.step, torch.device("cpu"), spec.seconds / 3)
    return spec.updated * HOST_UPDATE_BYTES / seconds


def gather_rate(spec: Spec, world: World) -> float:
    """Bytes/s that a rank sends in an all-gather. A collective: all ranks take as many rounds."""
    own = torch.zeros(spec.moved, dtype=torch.uint8, device=world.device)
    whole = torch.empty(world.size * spec.moved, dtype=torch.uint8, device=world.device)
    for round_number in range(2 * _ROUNDS):
        if round_number == _ROUNDS:  # half of them make connections and warm up
            finish(world.device)
            world.barrier()
            started = time.perf_counter()
        dist.all_gather_into_tensor(whole, own)
    finish(world.device)
    return _ROUNDS * (world.size - 1) * spec.moved / (time.perf_counter() - started)


def disk_rate(spec: Spec) -> float:
    """Bytes/s at which a file is written and safe; a slow disk is written to for some seconds only."""
    path = Path(spec.folder) / f".packtrain-{os.getpid()}.tmp"
    piece, written = os.urandom(min(_PIECE, spec.written)), 0
    started = time.perf_counter()
    try:
        with path.open("wb") as file:
            while written < spec.written and time.perf_counter() - started < 2 * spec.seconds:
                written += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        return written / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def _seconds(work: Callable[[], Any], device: torch.device, least: float) -> float:
    """Seconds of a call, over ``least`` seconds or more, after two thirds of them to reach a steady clock."""
    _spend(work, device, least * 2 / 3)
    return _spend(work, device, least)


def _spend(work: Callable[[], Any], device: torch.device, least: float) -> float:
    started, calls, spent = time.perf_counter(), 0, 0.0
    while spent < least or not calls:
        work()
        finish(device)
        calls += 1
        spent = time.perf_counter() - started
    return spent / calls


def _dtype(device: torch.device) -> torch.dtype:
    """What matrix products are in: bf16, or fp16 on a GPU that has no bf16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


if __name__ == "__main__":
    main(*sys.argv[1:])
