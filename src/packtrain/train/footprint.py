"""What a run's memory really is, beside its plan: the peak of each process, and what the tensors that stay take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from packtrain.models.quantized import QuantizedLinear
from packtrain.models.weights import local_tensor
from packtrain.train.session import Session

KEPT = ("weights", "quantised_weights", "adapters", "master_weights", "optimizer_states")
"""Of the plan's terms (plan/memory.py), those that stay from step to step."""


def log_memory(session: Session, step: int) -> None:
    """Write the peak of every rank, and what rank 0's tensors take. A collective."""
    if session.memory is not None:
        peaks = session.world.gather(session.memory.bytes)
        session.log.write("memory", step=step, peaks=peaks, kept=kept_bytes(session))


def kept_bytes(session: Session) -> dict[str, int]:
    """Bytes on the training device of this process's tensors that stay, by the plan's names for them."""
    found = dict.fromkeys(KEPT, 0)
    model, device = session.built.model, session.world.device.type
    quantised = {id(t) for m in model.modules() if isinstance(m, QuantizedLinear) for t in m.parameters(recurse=False)}
    base = {id(parameter) for parameter in model.base.parameters()}
    for name, parameter in model.named_parameters():
        kind = "weights"
        if id(parameter) in quantised:
            kind = "quantised_weights"
        elif parameter.requires_grad:
            beside = id(parameter) not in base or ".lora_" in name or ".adaption_" in name
            kind = "adapters" if beside else "master_weights"
        found[kind] += _bytes_on(device, parameter)
    for state in session.updates.optimizer.state.values():
        found["optimizer_states"] += sum(_bytes_on(device, value) for value in _tensors(state))
    return found


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() > 1)


def _bytes_on(device: str, tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size() if local.device.type == device else 0
