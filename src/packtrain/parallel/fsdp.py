"""FSDP2: parameters, gradients and optimizer states sharded over processes, block by block.

HSDP is the same on a mesh of two axes: sharded within ``shard_size`` processes, replicated across (Zhao et al.,
https://arxiv.org/abs/2304.11277, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from packtrain.parallel.limits import KEPT_LIMIT, UNREDUCED_LIMIT
from packtrain.parallel.strategy import Strategy
from packtrain.parallel.traffic import Traffic, UnitBytes, sharded_traffic, sharded_units
from packtrain.parallel.updates import HostUpdates, MakeOptimizer, Named, Updates
from packtrain.parallel.world import World

if TYPE_CHECKING:
    from packtrain.models.causal_lm import CausalLMWithLoss


class FullyShard(Strategy):
    def __init__(self, world: World, compute_dtype: torch.dtype, shard_size: int, offload: str = "none") -> None:
        super().__init__(world, compute_dtype)
        self.shard_size = shard_size
        self.offload_params, self.keeps_masters = offload == "params", offload == "optimizer"
        self.reduce_each = self.reshard = False
        self.units: list[UnitBytes] = []
        if shard_size == world.size:
            self.mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
        else:
            shape = (world.size // shard_size, shard_size)
            self.mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def shard(self, model: CausalLMWithLoss) -> None:
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self.reduce_each = trained > UNREDUCED_LIMIT
        whole = sum(p.numel() for p in model.parameters()) * self.compute_dtype.itemsize
        options: dict[str, Any] = {"mesh": self.mesh, "reshard_after_forward": whole > KEPT_LIMIT}
        if self.compute_dtype != torch.float32:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        if self.offload_params:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
            options["reshard_after_forward"] = True
        for block in model.blocks():
            fully_shard(block, **options)
        # The backward pass begins with the root's parameters: dropping them after the forward pass would free nothing.
        fully_shard(model, **{**options, "reshard_after_forward": False})
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        self.units = sharded_units(model, policy, all_flow=model.prefix is not None)
        self.reshard = options["reshard_after_forward"]

    @property
    def storage(self) -> torch.device:
        return torch.device("cpu") if self.offload_params else self.world.device

    def updates(self, named: Named, make_optimizer: MakeOptimizer) -> Updates:
        return HostUpdates(named, make_optimizer) if self.keeps_masters else super().updates(named, make_optimizer)

    def _autocast(self) -> Any:
        """Off: the mixed-precision policy casts parameters as they are gathered."""
        return torch.autocast(self.world.device.type, enabled=False)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last or self.reduce_each)
        self.module.set_requires_all_reduce(last)
        yield

    def traffic(self, micro_batches: int) -> Traffic:
        replicas = self.world.size // self.shard_size
        how = {"reshard": self.reshard, "reduce_each": self.reduce_each}
        return sharded_traffic(self.units, self.shard_size, replicas, micro_batches, **how)

    def describe(self) -> str:
        if self.shard_size == self.world.size:
            processes = f"{self.world.size} process{'es' if self.world.size > 1 else ''}"
            return f"model sharded over {processes} (FSDP2)"
        return f"model sharded over {self.shard_size} processes, {self.world.size // self.shard_size} replicas (HSDP)"
