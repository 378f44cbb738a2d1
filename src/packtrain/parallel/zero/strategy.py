"""DeepSpeed's engine behind the strategy contract: it owns accumulation, clipping, the loss scale and the step."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from packtrain.models.files import WeightFiles
from packtrain.models.weights import Reader, Slices, WeightReader, torch_dtype
from packtrain.parallel.strategy import Strategy
from packtrain.parallel.traffic import Traffic
from packtrain.parallel.updates import MakeOptimizer, Named, Updates
from packtrain.parallel.world import World
from packtrain.parallel.zero.partition import empty_buffers, materialize_parts
from packtrain.parallel.zero.updates import ZeroUpdates

if TYPE_CHECKING:
    from packtrain.models.causal_lm import CausalLMWithLoss


class Zero(Strategy):
    """ZeRO (Rajbhandari et al., https://arxiv.org/abs/1910.02054) by DeepSpeed.

    Args:
        config: of the engine, without ``auto`` (``packtrain.config.deepspeed.engine_config``).
    """

    keeps_masters = True

    def __init__(self, world: World, compute_dtype: torch.dtype, config: dict[str, Any]) -> None:
        super().__init__(world, compute_dtype)
        self.config = config
        self.stage: int = config["zero_optimization"]["stage"]
        self.deepspeed = _deepspeed(world)
        self.engine: Any = None

    def shard(self, model: CausalLMWithLoss) -> None:
        """Nothing on the meta device: ZeRO-3 shards what ``materialize`` has made, the others shard in ``updates``."""

    @contextmanager
    def reader(self, files: WeightFiles) -> Iterator[Reader]:
        """Rank 0 reads; DeepSpeed broadcasts its parameters to the others."""
        if not self.world.is_main:
            yield _Zeros(files)
            return
        with WeightReader(files) as reader:
            yield reader

    def materialize(self, model: CausalLMWithLoss, complete: Callable[[], None]) -> Iterator[list[nn.Parameter]]:
        if self.stage < 3:
            yield from super().materialize(model, complete)
            return
        empty_buffers(model, self.world.device)
        complete()
        for part in materialize_parts(model, model.blocks(), self.world.device):
            yield part
            # Rank 0's values go to all, and each keeps its share of them.
            self.deepspeed.zero.Init(nn.ParameterList(part), config_dict_or_path=self.config)

    def updates(self, named: Named, make_optimizer: MakeOptimizer) -> Updates:
        optimizer = make_optimizer(named)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # stage 0 makes a step of zero gradients to allocate its states
        self.engine, *_ = self.deepspeed.initialize(model=self.module, optimizer=optimizer, config=self.config)
        self.module = self.engine
        return ZeroUpdates(named, optimizer, self.engine)

    def _autocast(self) -> Any:
        """Off: the engine stores the model in the dtype of the arithmetic."""
        return nullcontext()

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)

    def clip(self, parameters: list[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """The norm alone: the engine clips in its step, by the ``gradient_clipping`` of its configuration."""
        zero = self.engine.optimizer
        if self.stage == 0:
            return super().clip(parameters, None)
        if self.stage < 3:
            norm = zero.scaled_global_norm()
        else:
            groups = torch.stack([norm.float().cpu() for norm in zero._get_norm_groups()])
            norm = torch.where((groups >= 0).all(), torch.linalg.vector_norm(groups), -1.0)
        # DeepSpeed marks a norm that is not finite by a negative number.
        return torch.where(norm >= 0, norm / self._scale, torch.inf).to(self.world.device)

    @property
    def _scale(self) -> float:
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0))

    @property
    def loss_scale(self) -> float | None:
        return self._scale if self.compute_dtype == torch.float16 else None

    def skips(self, norm: float) -> bool:
        scaler = self.engine.optimizer.loss_scaler if self.compute_dtype == torch.float16 else None
        return scaler is not None and scaler.dynamic and scaler.cur_scale > scaler.min_scale and norm == float("inf")

    def traffic(self, micro_batches: int) -> Traffic | None:
        return None

    def describe(self) -> str:
        kept = ("nothing", "optimizer states", "optimizer states and gradients", "the model and its optimizer states")
        processes = f"{self.world.size} process{'es' if self.world.size > 1 else ''}"
        return f"{kept[self.stage]} sharded over {processes} (DeepSpeed, ZeRO-{self.stage})"


class _Zeros:
    """A reader that reads nothing, for the ranks whose values rank 0's replace."""

    def __init__(self, files: WeightFiles) -> None:
        self.files, self.bytes_read = files, 0

    def read(self, key: str, slices: Slices) -> torch.Tensor:
        entry = self.files.entries[key]
        shape = [len(range(*part.indices(size))) for part, size in zip(slices, entry.shape, strict=True)]
        return torch.zeros(shape, dtype=torch_dtype(entry))


def _deepspeed(world: World) -> Any:
    """The package, on this world's processes and device, and quiet."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    # DeepSpeed takes it for the GPU's index, which it is not where each process sees its own GPU only.
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    os.environ.setdefault("WORLD_SIZE", str(world.size))
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # torch renames collectives that DeepSpeed still calls by their old names.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed
