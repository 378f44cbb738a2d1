"""A Triton kernel that makes bf16, fp16 or fp32 weights from quantised ones in one pass over the bytes."""

from __future__ import annotations

import functools

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from packtrain.models.quantize import BLOCK, Quantization, nf4_codes

_WORDS = 512  # of four bytes, for each program


@triton.jit
def _expand(words, scales, codes, out, count, NF4: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Each 32-bit word holds eight nibbles or four bytes of one block; values lie as the bytes do."""
    PER: tl.constexpr = 8 if NF4 else 4
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = at < count
    word = tl.load(words + at, mask=inside, other=0)
    scale = tl.load(scales + at * PER // BLOCK, mask=inside, other=0.0)
    part = tl.arange(0, PER)
    if NF4:  # the high nibble of each byte comes first
        shift = (part // 2) * 8 + (1 - part % 2) * 4
        value = tl.load(codes + ((word[:, None] >> shift[None, :]) & 15))
    else:
        value = (((word[:, None] << (24 - 8 * part)[None, :]) >> 24).to(tl.float32)) * (1 / 127)
    places = at[:, None] * PER + part[None, :]
    tl.store(out + places, (value * scale[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    return nf4_codes(device)


def dequantize(
    quantization: Quantization, packed: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As ``Quantization.dequantize``, bit for bit, on a CUDA device."""
    nf4 = quantization.format == "nf4"
    rows, columns = packed.shape[0], packed.shape[1] * (2 if nf4 else 1)
    scales = quantization.scales(stored, columns).contiguous()
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    words = packed.contiguous().view(torch.int32)
    grid = (triton.cdiv(words.numel(), _WORDS),)
    _expand[grid](words, scales, _table(packed.device), out, words.numel(), NF4=nf4, BLOCK=BLOCK, WORDS=_WORDS)
    return out
