"""Block-wise quantisation of frozen weights: NF4 and int8, by rows, so that a rank can quantise just its own.

Values are split into blocks of 64 along a row; each block is divided by its largest magnitude, the scale. NF4 keeps
the nearest of sixteen normal quantiles, two to a byte, high nibble first: the layout and the values of bitsandbytes,
bit for bit (Dettmers et al., https://arxiv.org/abs/2305.14314). int8 keeps the nearest of 255 even steps.

Double quantisation stores a row's scales in a byte each, between that row's smallest and largest. bitsandbytes takes
one mean over the whole tensor instead, which no rank that reads its own rows could know.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

BLOCK = 64
Format = Literal["nf4", "int8"]

# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (appendix E of the paper).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """How a frozen weight is stored. ``double``: its scales are quantised too."""

    format: Format = "nf4"
    double: bool = False

    def packed_bytes(self, columns: int) -> int:
        """Bytes of a row's values."""
        return columns // 2 if self.format == "nf4" else columns

    def scale_bytes(self, columns: int) -> int:
        """Bytes of a row's scales: float32 each, or a byte each behind the row's smallest and its step."""
        blocks = columns // BLOCK
        return _padded(blocks) + 8 if self.double else 4 * blocks

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise whole rows.

        Args:
            values: (rows, columns), columns a multiple of 64.

        Returns:
            (rows, packed_bytes) uint8 and (rows, scale_bytes) uint8.
        """
        blocks = values.float().reshape(values.shape[0], -1, BLOCK)
        scales = blocks.abs().amax(-1)
        stored = self._store_scales(scales)
        if self.double:
            scales = self.scales(stored, values.shape[1])
        normed = (blocks * (1.0 / scales.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1).reshape(values.shape)
        if self.format == "int8":
            return (normed * 127).round().to(torch.int8).view(torch.uint8), stored
        codes = torch.bucketize(normed, _midpoints(values.device), out_int32=True).to(torch.uint8)
        return (codes[:, ::2] << 4) | codes[:, 1::2], stored

    def dequantize(self, packed: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight, (rows, columns) in ``dtype``; the product with the scale is taken in float32."""
        if self.format == "int8":
            values = packed.view(torch.int8).float() * (1 / 127)
        else:
            values = torch.stack([packed >> 4, packed & 15], -1).flatten(1)
            values = nf4_codes(packed.device)[values.int()]
        scales = self.scales(stored, values.shape[1])
        return (values.unflatten(1, (-1, BLOCK)) * scales.unsqueeze(-1)).flatten(1).to(dtype)

    def scales(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        """The scales of each row's blocks, (rows, columns / 64) float32."""
        if not self.double:
            return stored.view(torch.float32)
        low_and_step = stored[:, :8].contiguous().view(torch.float32)
        return low_and_step[:, :1] + stored[:, 8 : 8 + columns // BLOCK].float() * low_and_step[:, 1:]

    def _store_scales(self, scales: torch.Tensor) -> torch.Tensor:
        if not self.double:
            return scales.contiguous().view(torch.uint8)
        low, high = scales.aminmax(dim=1, keepdim=True)
        step = (high - low) / 255
        codes = ((scales - low) / step.clamp(min=1e-38)).round().to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, _padded(codes.shape[1]) - codes.shape[1]))
        return torch.cat([torch.cat([low, step], 1).view(torch.uint8), codes], 1)


def _padded(count: int) -> int:
    """Up to a multiple of four, so that a row's bytes can be looked at as float32."""
    return -(-count // 4) * 4


@functools.cache
def nf4_codes(device: torch.device) -> torch.Tensor:
    """The sixteen values of NF4, float32, ascending."""
    return torch.tensor(_NF4, device=device)


@functools.cache
def _midpoints(device: torch.device) -> torch.Tensor:
    codes = nf4_codes(device)
    return (codes[:-1] + codes[1:]) / 2
