"""AdamW over the trainable parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from packtrain.adapters.lora import learning_rate_factor
from packtrain.config.schema import Recipe


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is trained, in a fixed order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def make_optimizer(recipe: Recipe, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """AdamW with one group for each (learning-rate factor, weight decay): matrices decay, vectors do not."""
    section = recipe.train
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        decay = section.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((learning_rate_factor(name, recipe.method), decay), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": params, "weight_decay": decay, "lr": section.learning_rate * lr, "factor": lr}
            for (lr, decay), params in groups.items()
        ],
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of all groups, each by its own factor (LoRA+)."""
    group: dict[str, Any]
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["factor"]
