"""What a checkpoint holds: the trained parameters and the optimizer's state, flat, by parameter name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Named = Sequence[tuple[str, nn.Parameter]]


def training_state(named: Named, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """References to every tensor of the state: ``model/NAME`` and ``optimizer/NAME/KEY``.

    Loading copies into these tensors. An optimizer that has not stepped yet is given its state first.
    """
    fill_optimizer_state(optimizer)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in named:
        state[f"model/{name}"] = parameter.detach()
        values: dict[str, Any] = optimizer.state[parameter]
        for key, value in values.items():
            state[f"optimizer/{name}/{key}"] = value
    return state


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state: a step of zero gradients at learning rate zero, which moves nothing."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(optimizer.state.get(p) for p in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        optimizer.state[parameter]["step"].zero_()
