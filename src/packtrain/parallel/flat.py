"""A tensor whose flattened elements lie in ranges on the ranks, as ZeRO shards them.

ZeRO cuts where its flat buffers end, in the middle of a row and anywhere: no DTensor placement says that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class FlatShard(torch.Tensor):
    """This rank's range of a tensor, which looks like the whole one flattened and has no arithmetic.

    ``torch.distributed.checkpoint`` saves and loads it by the methods between double underscores (its protocol
    ``_Checkpointable``, which DTensor has too), so that any number of ranks reads what any other number wrote.

    Args:
        whole: shape of the tensor.
        start: the first element, of the flattened tensor, that this rank holds.
        local: this rank's elements, (count,); may be empty. Loading writes into it.
    """

    whole: torch.Size
    start: int
    local: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Size, start: int, local: torch.Tensor) -> FlatShard:
        size = (math.prod(whole),)
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=local.dtype, device=local.device)
        made.whole, made.start, made.local = whole, start, local
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on a part of a tensor: take full_tensor() first")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatShard({tuple(self.whole)}, {self.start}:{self.start + len(self.local)})"

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on every rank, on the device of its parts. A collective."""
        flat = torch.zeros(math.prod(self.whole), dtype=self.local.dtype, device=self.local.device)
        flat[self.start : self.start + len(self.local)] = self.local
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        return flat.view(self.whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not len(self.local):
            return []
        return [ChunkStorageMetadata(torch.Size([self.start]), torch.Size([len(self.local)]))]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> torch.Tensor:
        return self.local
