"""How many bytes one process sends over each axis of the mesh in one optimizer step, said before the run starts.

Counts are the bandwidth-optimal ones (Chan et al., Collective communication, 2007, table 1; NCCL's rings send as
much): an all-gather or a reduce-scatter of S bytes in all over n processes sends S * (n - 1) / n from each, an
all-reduce of S bytes twice that. Other than parameters and gradients a step sends a norm's partial sums for clipping
(4 bytes for each trained parameter) and the loss with the wish to stop (8 bytes): not worth counting, and not counted.
Evaluation and checkpoints are no part of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class UnitBytes:
    """What FSDP2 moves at once: a block, or what the root keeps for itself. Bytes of whole, padded tensors.

    Attributes:
        gathered: all parameters, in the dtype they are gathered in.
        reduced: the gradients of the trained ones, in the dtype they are reduced in.
        in_backward: whether backward gathers it again where blocks are resharded after forward; the root is not.
    """

    gathered: int
    reduced: int
    in_backward: bool


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends in one optimizer step, over each axis and its number of processes."""

    shard: int
    replicate: int
    shard_size: int
    replicas: int

    def describe(self) -> str:
        """One sentence for the log."""
        axes = [("shard", self.shard_size, self.shard), ("replicate", self.replicas, self.replicate)]
        spread = [axis for axis in axes if axis[1] > 1]
        if not spread:
            return "nothing is sent: there is one process"
        parts = [
            f"{name} axis ({num}{' processes' if i == 0 else ''}): {_readable(sent)}"
            for i, (name, num, sent) in enumerate(spread)
        ]
        return f"{', '.join(parts)} sent by each process a step"


def sharded_units(model: nn.Module, policy: MixedPrecisionPolicy, *, all_flow: bool = False) -> list[UnitBytes]:
    """The units of a model whose blocks and root ``fully_shard`` was applied to; the meta device will do.

    Backward gathers what gradients flow through, and in vain the one block before that: each unit fetches the one ahead
    of it without asking whether that has a backward pass. Gradients flow from the first trained parameter on, in the
    order modules were registered in (of a decoder: embedding, blocks, norm), and always through the root, which ends
    in the loss. ``all_flow``: through all blocks, where a trained prefix outside of them enters each.
    """
    order = {p: i for i, p in enumerate(model.parameters())}
    first_trained = min((i for p, i in order.items() if p.requires_grad), default=len(order))
    owned: set[nn.Parameter] = set()
    units = []
    fetched = True  # the root fetches the last block
    for module in reversed(list(model.modules())):  # from the last block to the first, then the root around them
        if not isinstance(module, FSDPModule):
            continue
        own = [p for p in module.parameters() if isinstance(p, DTensor) and p not in owned]
        owned.update(own)
        flows = all_flow or any(order[p] >= first_trained for p in own)
        units.append(_unit_bytes(own, policy, (flows or fetched) and module is not model))
        fetched = flows
    return units


def _unit_bytes(parameters: Iterable[DTensor], policy: MixedPrecisionPolicy, in_backward: bool) -> UnitBytes:
    gathered = reduced = 0
    for parameter in parameters:
        numel = _padded_numel(parameter)
        casts = parameter.is_floating_point()  # quantized weights are gathered as they are stored
        dtype = (policy.param_dtype if casts else None) or parameter.dtype
        gathered += numel * dtype.itemsize
        if parameter.requires_grad:
            reduced += numel * (policy.reduce_dtype or dtype).itemsize
    return UnitBytes(gathered, reduced, in_backward)


def _padded_numel(parameter: DTensor) -> int:
    """FSDP2 fills dimension 0 up to a multiple of the shard size, in gathers and in reductions."""
    shard_size = parameter.device_mesh.size(-1)  # the last axis shards, replicas are before it
    rows, *rest = parameter.shape
    return -(-rows // shard_size) * shard_size * prod(rest)


def sharded_traffic(
    units: Iterable[UnitBytes],
    shard_size: int,
    replicas: int,
    micro_batches: int,
    *,
    reshard: bool,
    reduce_each: bool,
) -> Traffic:
    """What FSDP2 sends on a mesh of ``replicas`` times ``shard_size`` processes.

    Args:
        micro_batches: forward and backward passes in a step, on each process.
        reshard: ``reshard_after_forward`` of the blocks: they are gathered again in backward.
        reduce_each: gradients are reduced to shards after each micro-batch, not the last only. Replicas' shards are
            summed once a step in either case.
    """
    gathered = reduced = 0
    for unit in units:
        gathered += unit.gathered * (2 if reshard and unit.in_backward else 1)
        reduced += unit.reduced
    num_reduce = micro_batches if reduce_each else 1
    shard = _share(gathered * micro_batches + reduced * num_reduce, shard_size)
    replicate = _share(2 * (reduced // shard_size), replicas)
    return Traffic(shard, replicate, shard_size, replicas)


def replicated_traffic(model: nn.Module, replicas: int) -> Traffic:
    """What DDP sends: one all-reduce of the trained parameters' gradients a step, in the dtype they are stored in."""
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return Traffic(0, _share(2 * gradients, replicas), 1, replicas)


def _share(size: int, num_processes: int) -> int:
    """The part of ``size`` bytes that a process does not have or keep, and so sends."""
    return size * (num_processes - 1) // num_processes


def _readable(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if size >= 2**power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"
