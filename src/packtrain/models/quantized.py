"""A frozen linear whose weight is stored quantised, as two plain parameters that any strategy can shard by rows.

The bytes are looked at as the compute dtype: FSDP2 of torch 2.11 refuses uint8 parameters, and a mixed-precision
policy leaves alone what is in its dtype already. So a shard's bytes are gathered, never cast, and the weight exists
only while a block runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from packtrain.models.quantize import BLOCK, Quantization

Dequantize = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


class _FrozenLinear(torch.autograd.Function):
    """``x @ weight.T``, keeping the quantised weight for the backward pass and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor,
                dequantize: Dequantize) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(packed, scales)
        ctx.dequantize = dequantize
        return x @ dequantize(packed, scales, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        packed, scales = ctx.saved_tensors
        return grad @ ctx.dequantize(packed, scales, grad.dtype), None, None, None


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` with a quantised, frozen weight.

    Attributes:
        packed: (out, packed bytes) and scales: (out, scale bytes), both viewed as ``storage``.
        weight: the weight itself, (out, in), made anew each time it is asked for.
    """

    def __init__(self, linear: nn.Linear, quantization: Quantization, storage: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantization, self.storage = quantization, storage
        self.dequantize = find_dequantize(quantization)
        device, rows, columns = linear.weight.device, linear.out_features, linear.in_features

        def rows_of(num_bytes: int) -> nn.Parameter:
            empty = torch.empty(rows, num_bytes // storage.itemsize, dtype=storage, device=device)
            return nn.Parameter(empty, requires_grad=False)

        self.packed = rows_of(quantization.packed_bytes(columns))
        self.scales = rows_of(quantization.scale_bytes(columns))
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.dequantize(self.packed, self.scales, self.storage)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            out = _FrozenLinear.apply(input, self.packed, self.scales, self.dequantize)
            return out if self.bias is None else out + self.bias.to(out.dtype)


def find_dequantize(quantization: Quantization) -> Dequantize:
    """What makes the (out, in) weight from its stored bytes: bitsandbytes' kernel where it is installed, else torch."""
    kernel = bitsandbytes_kernel() if quantization.format == "nf4" else None

    def dequantize(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        packed, scales = packed.view(torch.uint8), scales.view(torch.uint8)
        if kernel is None or packed.is_meta:
            return quantization.dequantize(packed, scales, dtype)
        columns = packed.shape[1] * 2
        absmax = quantization.scales(scales, columns).reshape(-1)
        return kernel(packed.reshape(-1, 1), absmax, BLOCK, "nf4", (packed.shape[0], columns), dtype)

    return dequantize


@functools.cache
def bitsandbytes_kernel() -> Any:
    """bitsandbytes' operator as torch knows it, or None where it is not installed."""
    try:
        import bitsandbytes  # noqa: F401 - registers its operators
    except ImportError:
        return None
    return torch.ops.bitsandbytes.dequantize_4bit.default


def quantize_linears(model: nn.Module, names: list[str], quantization: Quantization, storage: torch.dtype) -> list[str]:
    """Replace the named linear modules of a meta-device model by quantised ones.

    A module whose rows do not divide into blocks stays as it is.

    Returns:
        The names that were replaced.
    """
    replaced = []
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if linear.in_features % BLOCK == 0:
            model.set_submodule(name, QuantizedLinear(linear, quantization, storage))
            replaced.append(name)
    return replaced
