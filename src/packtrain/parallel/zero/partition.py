"""ZeRO-3's parameters: how they come to be without one rank holding the model, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from packtrain.parallel.flat import FlatShard

Parameters = list[nn.Parameter]


def materialize_parts(model: nn.Module, blocks: list[nn.Module], device: torch.device) -> Iterator[Parameters]:
    """Give a meta-device model its parameters, a block at a time and then the rest, shared ones once.

    Yields:
        The parameters that were just made, uninitialised and whole.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for root, recurse in [*((block, True) for block in blocks), *((module, False) for module in model.modules())]:
        fresh = _materialize(root, device, made, recurse)
        if fresh:
            yield fresh


def empty_buffers(model: nn.Module, device: torch.device) -> None:
    """Give the buffers of a meta-device model memory; what belongs into them is computed by the caller."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def shard_of(parameter: Any) -> FlatShard:
    """This rank's range of a partitioned parameter, in the dtype of the arithmetic."""
    start, count = held_range(parameter)
    return FlatShard(parameter.ds_shape, start, parameter.ds_tensor.data.view(-1)[:count])


def held_range(parameter: Any) -> tuple[int, int]:
    """The first element of a partitioned parameter, flattened, that this rank holds, and how many it holds."""
    size = parameter.partition_numel()
    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return start, min(parameter.ds_numel - start, size)  # the last ranks may hold padding


def is_partitioned(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_id")


def _materialize(
    root: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter], recurse: bool
) -> Parameters:
    fresh = []
    for module in root.modules() if recurse else (root,):
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                fresh.append(made[parameter])
            module._parameters[name] = made[parameter]
    return fresh
