"""Random starts that depend on the seed and the parameter's name only: alike on all ranks, for any number of them."""

from __future__ import annotations

import hashlib
import math

import torch

from packtrain.models.names import file_key


def uniform(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """LoRA's A, (rank, in) float32: uniform in +-1/sqrt(in), which is peft's Kaiming start."""
    return torch.empty(shape).uniform_(-1, 1, generator=_generator(name, seed)) / math.sqrt(shape[-1])


def normal(name: str, shape: tuple[int, ...], seed: int, deviation: float) -> torch.Tensor:
    """Normal values, float32."""
    return torch.empty(shape).normal_(0, deviation, generator=_generator(name, seed))


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{file_key(name)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
