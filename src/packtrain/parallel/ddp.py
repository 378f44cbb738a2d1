"""A whole copy of the model on each process; gradients are averaged behind the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from packtrain.models.files import WeightFiles
from packtrain.models.weights import Reader
from packtrain.parallel.node_reader import NodeReader
from packtrain.parallel.strategy import Strategy
from packtrain.parallel.traffic import Traffic, replicated_traffic

if TYPE_CHECKING:
    from packtrain.models.causal_lm import CausalLMWithLoss


class Replicated(Strategy):
    module: DistributedDataParallel

    def shard(self, model: CausalLMWithLoss) -> None:
        """Nothing to spread: each rank keeps the whole model."""

    @contextmanager
    def reader(self, files: WeightFiles) -> Iterator[Reader]:
        with NodeReader(files, self.world) as reader:
            yield reader

    def ready(self, model: CausalLMWithLoss) -> None:
        device = self.world.device
        with warnings.catch_warnings():
            # Newer versions of torch want another name for broadcast_buffers, which 2.11 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            self.module = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                init_sync=False,  # all ranks read the same files and start adapters from the same seed
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        if last:
            yield
            return
        with self.module.no_sync():
            yield

    def traffic(self, micro_batches: int) -> Traffic:
        return replicated_traffic(self.module.module, self.world.size)

    def describe(self) -> str:
        return f"a copy of the model on each of {self.world.size} processes (DDP)"
