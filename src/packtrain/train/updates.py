"""Applying the gradients: the optimizer, and where the weights lie that it works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from packtrain.config.schema import Recipe
from packtrain.models.weights import local_tensor, placed_like
from packtrain.train.optimizer import make_optimizer, set_learning_rate

Named = list[tuple[str, nn.Parameter]]


@dataclass
class Updates:
    """The optimizer's step on ``stored``, which are the model's own parameters or copies in host memory.

    Attributes:
        named: what is trained, in the model. stored: the same names and what is saved of them.
    """

    named: Named
    stored: Named
    optimizer: torch.optim.Optimizer

    @property
    def offloaded(self) -> bool:
        return self.stored is not self.named

    def apply(self, learning_rate: float) -> None:
        """One step with the gradients that lie on the model's parameters, which are dropped."""
        set_learning_rate(self.optimizer, learning_rate)
        if self.offloaded:
            self._take_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.offloaded:
            self.give_back()

    def give_back(self) -> None:
        """Copy the stored weights into the model, after a step or a checkpoint was loaded."""
        if self.offloaded:
            with torch.no_grad():
                for (_, parameter), (_, stored) in zip(self.named, self.stored, strict=True):
                    local_tensor(parameter).copy_(local_tensor(stored))

    def _take_gradients(self) -> None:
        for (_, parameter), (_, stored) in zip(self.named, self.stored, strict=True):
            if parameter.grad is not None:
                local = local_tensor(parameter.grad).to("cpu", torch.float32)
                stored.grad = placed_like(stored, local)
                parameter.grad = None


def make_updates(recipe: Recipe, named: Named) -> Updates:
    """The updates that a resolved recipe asks for."""
    stored = named
    if recipe.parallel.offload == "optimizer":
        stored = [(name, _host_copy(parameter)) for name, parameter in named]
    return Updates(named, stored, make_optimizer(recipe, stored))


def _host_copy(parameter: nn.Parameter) -> nn.Parameter:
    """The weights in fp32 in host memory, sharded alike."""
    local: Any = local_tensor(parameter).detach().to("cpu", torch.float32, copy=True)
    return nn.Parameter(placed_like(parameter, local))
