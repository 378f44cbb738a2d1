"""What is done to each block before sharding: activation checkpointing, then compile, both around its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = str | float

# Kept by selective recompute: the products that are dear to compute. What lies between them is cheap.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def prepare_blocks(blocks: Sequence[nn.Module], recompute: Recompute, compiled: bool, offload: bool = False) -> int:
    """Wrap the forward of each block; FSDP's hooks, put on later, stay outside of both.

    Args:
        recompute: ``none``, ``selective``, ``full``, or the share of blocks that recompute their activations.
        compiled: compile each block on its own (one graph for all, since they are alike).
        offload: keep the inputs of recomputed blocks in host memory.

    Returns:
        The number of blocks that recompute.
    """
    chosen = recomputed_blocks(len(blocks), recompute)
    for index, block in enumerate(blocks):
        forward: Callable[..., Any] = block.forward
        if compiled:
            forward = torch.compile(forward)
        if index in chosen:
            forward = _checkpointed(forward, selective=recompute == "selective")
            forward = _offloaded(forward) if offload else forward
        if forward is not block.forward:
            block.forward = forward
    return len(chosen)


def recomputed_blocks(count: int, recompute: Recompute) -> set[int]:
    """Which blocks recompute: spread evenly, so that freed and kept memory alternate."""
    if recompute == "none":
        return set()
    if recompute in ("selective", "full"):
        return set(range(count))
    num = round(float(recompute) * count)
    return {i * count // num for i in range(num)} if num else set()


def _checkpointed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def _offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What ``forward`` saves for the backward pass goes to host memory: of a recomputed block, its input."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
