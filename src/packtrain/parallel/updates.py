"""Applying the gradients: the optimizer, and where the weights lie that it works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from packtrain.models.weights import local_tensor, placed_like
from packtrain.parallel.state import training_state

Named = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]


class Updates:
    """The optimizer's step on the model's own parameters, and what a checkpoint holds of both.

    Args:
        named: what is trained, in the model.
        optimizer: over these parameters; each group has a ``factor`` on the learning rate.
    """

    def __init__(self, named: Named, optimizer: torch.optim.Optimizer) -> None:
        self.named, self.optimizer = named, optimizer

    def apply(self, learning_rate: float) -> None:
        """One step with the gradients that lie on the model's parameters, which are dropped."""
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def saved(self, parameter: torch.Tensor) -> Any:
        """What is saved of a parameter of the model: itself, or the copy that the optimizer works on."""
        return parameter.detach()

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, by name; loading copies into it in place."""
        return training_state(self.named, self.optimizer)

    def loaded(self, state: dict[str, Any]) -> None:
        """The tensors of what ``state`` returned have new values: bring them to wherever else they are kept."""


class HostUpdates(Updates):
    """The optimizer works on fp32 copies in host memory, sharded like the parameters they stand for."""

    def __init__(self, named: Named, make_optimizer: MakeOptimizer) -> None:
        self.copies: Named = [(name, _host_copy(parameter)) for name, parameter in named]
        super().__init__(named, make_optimizer(self.copies))

    def apply(self, learning_rate: float) -> None:
        for (_, parameter), (_, copy) in zip(self.named, self.copies, strict=True):
            if parameter.grad is not None:
                copy.grad = placed_like(copy, local_tensor(parameter.grad).to("cpu", torch.float32))
                parameter.grad = None
        super().apply(learning_rate)
        self._give_back()

    def saved(self, parameter: torch.Tensor) -> Any:
        pairs = zip(self.named, self.copies, strict=True)
        return next((copy for (_, own), (_, copy) in pairs if own is parameter), parameter).detach()

    def state(self) -> dict[str, Any]:
        return training_state(self.copies, self.optimizer)

    def loaded(self, state: dict[str, Any]) -> None:
        self._give_back()

    def _give_back(self) -> None:
        with torch.no_grad():
            for (_, parameter), (_, copy) in zip(self.named, self.copies, strict=True):
                local_tensor(parameter).copy_(local_tensor(copy))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of all groups, each by its own factor (LoRA+)."""
    group: dict[str, Any]
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["factor"]


def _host_copy(parameter: nn.Parameter) -> nn.Parameter:
    """The weights in fp32 in host memory, sharded alike."""
    local: Any = local_tensor(parameter).detach().to("cpu", torch.float32, copy=True)
    return nn.Parameter(placed_like(parameter, local))
