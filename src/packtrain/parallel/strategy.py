"""The contract between the training loop and whatever spreads the model. The loop knows only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from packtrain.models.files import WeightFiles
from packtrain.models.weights import Reader, WeightReader
from packtrain.parallel.flat import FlatShard
from packtrain.parallel.traffic import Traffic
from packtrain.parallel.updates import MakeOptimizer, Named, Updates
from packtrain.parallel.world import World

if TYPE_CHECKING:
    from packtrain.models.causal_lm import CausalLMWithLoss


class Strategy(ABC):
    """One way to spread a model over a ``World``.

    The order of calls: ``shard`` (on the meta device), ``materialize`` while the builder fills in the weights,
    ``ready``, ``updates``, then the loop: ``forward``, ``backward`` per micro-batch inside ``accumulate``, ``clip``,
    and the step of what ``updates`` returned.
    """

    keeps_masters = False
    """Whether ``updates`` works on fp32 copies of its own, so that the model's parameters need not be wide."""

    def __init__(self, world: World, compute_dtype: torch.dtype) -> None:
        self.world = world
        self.compute_dtype = compute_dtype
        self.module: nn.Module

    @abstractmethod
    def shard(self, model: CausalLMWithLoss) -> None:
        """Spread the parameters; the model is still on the meta device."""

    def materialize(self, model: CausalLMWithLoss, complete: Callable[[], None]) -> Iterator[list[nn.Parameter]]:
        """Give the model memory, a part at a time.

        Args:
            complete: ties what is shared and computes the buffers; called once the buffers have memory.

        Yields:
            The parameters of a part, to be filled before the next part is asked for.
        """
        model.to_empty(device=self.storage)
        complete()
        yield list(model.parameters())

    def ready(self, model: CausalLMWithLoss) -> None:
        """The weights are in: finish what needs real parameters."""
        self.module = model

    def updates(self, named: Named, make_optimizer: MakeOptimizer) -> Updates:
        """What applies the gradients of the trained parameters ``named``."""
        return Updates(named, make_optimizer(named))

    @property
    def storage(self) -> torch.device:
        """Where the parameters lie."""
        return self.world.device

    @contextmanager
    def reader(self, files: WeightFiles) -> Iterator[Reader]:
        """Where the weights come from: the files, unless ranks of a node can share what one of them reads."""
        with WeightReader(files) as reader:
            yield reader

    def forward(self, **batch: Any) -> torch.Tensor:
        """The model's loss on this rank's micro-batch (see ``CausalLMWithLoss.forward``)."""
        with self._autocast():
            return self.module(**batch)

    def _autocast(self) -> Any:
        """Arithmetic in the compute dtype where parameters are stored wider."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.compute_dtype)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; gradients need to be the same on all ranks after the last."""
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss``, this rank's share of a sum over all ranks.

        Collectives average over the ranks, so the share is scaled back up by their number.
        """
        (loss * self.world.size).backward()

    def clip(self, parameters: list[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Clip in place by the global norm.

        Returns:
            The norm before clipping, a scalar on the device, the same on all ranks.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def skips(self, norm: float) -> bool:
        """Whether a step with this gradient norm is left out and training goes on: an overflow of fp16."""
        return False

    @property
    def loss_scale(self) -> float | None:
        """What fp16's loss is multiplied by before the backward pass; None: nothing."""
        return None

    def traffic(self, micro_batches: int) -> Traffic | None:
        """What one process sends to the others in an optimizer step of so many micro-batches; None: not known."""
        return Traffic(0, 0, 1, 1)

    def describe(self) -> str:
        """One phrase for the log: what is spread over what."""
        return "one process"


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank (a collective where it is sharded)."""
    return parameter.full_tensor() if isinstance(parameter, DTensor | FlatShard) else parameter
