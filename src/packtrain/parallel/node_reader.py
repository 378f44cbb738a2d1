"""One process of each node reads the weights; the others get them from it, piece by piece."""

from __future__ import annotations

import torch
import torch.distributed as dist

from packtrain.models.files import WeightFiles
from packtrain.models.weights import Slices, WeightReader, torch_dtype
from packtrain.parallel.world import World


class NodeReader(WeightReader):
    """A reader that every rank of a node calls with the same slices in the same order.

    Attributes:
        bytes_read: bytes that this rank read from disk: none but on the first rank of the node.
    """

    def __init__(self, files: WeightFiles, world: World) -> None:
        super().__init__(files)
        self.device = world.device
        self.first = world.rank - world.local_rank
        firsts = [int(str(first)) for first in world.gather(self.first)]
        self.group = None
        for first in sorted(set(firsts)):  # every rank makes every group
            members = [rank for rank, own in enumerate(firsts) if own == first]
            group = dist.new_group(members)
            if first == self.first:
                self.group = group
        self.reads = world.local_rank == 0

    def read(self, key: str, slices: Slices) -> torch.Tensor:
        """The slice in the file's dtype, on the device that trains."""
        if self.reads:
            piece = super().read(key, slices).to(self.device).contiguous()
        else:
            entry = self.files.entries[key]
            shape = [part.stop - part.start for part in _whole(slices, entry.shape)]
            piece = torch.empty(shape, dtype=torch_dtype(entry), device=self.device)
        dist.broadcast(piece, self.first, group=self.group)
        return piece


def _whole(slices: Slices, shape: tuple[int, ...]) -> list[slice]:
    """The slices with both ends given."""
    return [slice(*part.indices(size)) for part, size in zip(slices, shape, strict=True)]
