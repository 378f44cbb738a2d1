"""AdamW over the trainable parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from packtrain.adapters.lora import learning_rate_factor
from packtrain.config.schema import Recipe
from packtrain.train.adamw import AdamW, States


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is trained, in a fixed order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


_STATES: dict[str, States] = {"adamw": "fp32", "adamw_bf16": "bf16", "adamw_8bit": "int8"}


def make_optimizer(recipe: Recipe, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW with one group for each (learning-rate factor, weight decay): matrices decay, vectors do not.

    torch's fused one where weights and states are fp32, ours where either is stored in less.
    """
    section = recipe.train
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        decay = section.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((learning_rate_factor(name, recipe.method), decay), []).append(parameter)
    params: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay, "lr": section.learning_rate * lr, "factor": lr}
        for (lr, decay), params in groups.items()
    ]
    common: dict[str, Any] = {
        "lr": section.learning_rate, "betas": (section.beta1, section.beta2), "eps": section.epsilon,
    }  # fmt: skip
    if section.optimizer == "adamw" and section.master_weights == "fp32":
        return torch.optim.AdamW(params, **common, fused=True)
    compiled = recipe.parallel.compile is True and recipe.parallel.offload == "none"
    return AdamW(
        params, **common, states=_STATES[section.optimizer], rounding=section.rounding, seed=section.seed,
        compiled=compiled,
    )  # fmt: skip
