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

Kernel = Callable[[Quantization, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def dequantize(
    quantization: Quantization, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The (out, in) weight from its stored bytes, viewed as any dtype.

    On a GPU by our kernel, on a CPU by that of bitsandbytes where it is installed, elsewhere by torch: all give the
    same values.
    """
    packed, scales = packed.view(torch.uint8), scales.view(torch.uint8)
    kernel = None if packed.is_meta else find_kernel(quantization, packed.device.type)
    return (kernel or Quantization.dequantize)(quantization, packed, scales, dtype)


@functools.cache
def find_kernel(quantization: Quantization, device: str) -> Kernel | None:
    """The fastest that is installed."""
    if device == "cuda":
        try:
            from packtrain.models import kernels
        except ImportError:  # a torch without Triton
            return None
        return kernels.dequantize
    try:
        import bitsandbytes  # noqa: F401 - registers its operators
    except ImportError:
        return None
    return by_bitsandbytes if quantization.format == "nf4" else None


def by_bitsandbytes(
    quantization: Quantization, packed: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """NF4 by bitsandbytes' operator."""
    columns = packed.shape[1] * 2
    absmax = quantization.scales(stored, columns).reshape(-1)
    kernel = torch.ops.bitsandbytes.dequantize_4bit.default
    made: torch.Tensor = kernel(packed.reshape(-1, 1), absmax, BLOCK, "nf4", (packed.shape[0], columns), dtype)
    return made


# The two products are operators of their own, so that a compiled block cannot look inside: it would see the same weight
# made twice, make it once in the forward pass, and keep it for the backward pass in 16 bits.
@torch.library.custom_op("packtrain::frozen_linear", mutates_args=())
def frozen_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, format: str, double: bool
) -> torch.Tensor:
    """``x @ weight.T``, keeping the quantised weight for the backward pass and nothing else.

    Args:
        x: (..., in). packed, scales: as ``QuantizedLinear`` stores them.

    Returns:
        (..., out) in ``x``'s dtype.
    """
    return x @ dequantize(Quantization(format, double), packed, scales, x.dtype).t()  # type: ignore[arg-type]


@frozen_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, format: str, double: bool) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@torch.library.custom_op("packtrain::frozen_linear_backward", mutates_args=())
def frozen_linear_backward(
    grad: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, format: str, double: bool
) -> torch.Tensor:
    """``grad @ weight``, (..., in)."""
    return grad @ dequantize(Quantization(format, double), packed, scales, grad.dtype)  # type: ignore[arg-type]


@frozen_linear_backward.register_fake
def _(grad: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, format: str, double: bool) -> torch.Tensor:
    num_bytes = packed.shape[1] * packed.element_size()
    return grad.new_empty(*grad.shape[:-1], num_bytes * (2 if format == "nf4" else 1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, packed, scales, *ctx.quantization = inputs
    ctx.save_for_backward(packed, scales)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    return frozen_linear_backward(grad, *ctx.saved_tensors, *ctx.quantization), None, None, None, None


frozen_linear.register_autograd(_backward, setup_context=_save)


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
        find_kernel(quantization, "cuda" if torch.cuda.is_available() else "cpu")  # imported now, not in a step
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
        return dequantize(self.quantization, self.packed, self.scales, self.storage)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            how = self.quantization
            out = frozen_linear(input, self.packed, self.scales, how.format, how.double)
            return out if self.bias is None else out + self.bias.to(out.dtype)


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
