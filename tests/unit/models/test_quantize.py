"""Quantised rows are those of the whole tensor, bit for bit as bitsandbytes makes them, and the linear uses them."""

from __future__ import annotations

import itertools

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import nn

from packtrain.models import quantized
from packtrain.models.quantize import Quantization
from packtrain.models.quantized import QuantizedLinear, by_bitsandbytes, find_kernel, quantize_linears
from packtrain.models.weights import BaseTensor

FORMATS = [Quantization(f, d) for f, d in itertools.product(("nf4", "int8"), (False, True))]
ROWS, COLUMNS = 96, 192


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values with a row of zeros, an outlier, exact halves between two codes, and values of both extremes."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(ROWS, COLUMNS, generator=generator) * 0.03
    made[3] = 0
    made[5, 70] = 9
    made[6, :64] = 1e-30
    made[7] = made[7].abs().neg()
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_is_bitsandbytes_bit_for_bit(dtype: torch.dtype) -> None:
    whole = weight(dtype)
    packed, state = bnb.quantize_4bit(whole, blocksize=64, quant_type="nf4")
    for rows in (slice(0, ROWS), slice(10, 37), slice(95, 96)):
        own, scales = Quantization().quantize(whole[rows])
        assert torch.equal(own.reshape(-1), packed.view(ROWS, -1)[rows].reshape(-1))
        assert torch.equal(scales.view(torch.float32), state.absmax.view(ROWS, -1)[rows])
        back = bnb.dequantize_4bit(packed, state)[rows]
        assert torch.equal(Quantization().dequantize(own, scales, dtype), back)
        assert torch.equal(by_bitsandbytes(Quantization(), own, scales, dtype), back)


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_rows_do_not_depend_on_the_others(how: Quantization) -> None:
    packed, scales = how.quantize(weight())
    assert packed.shape == (ROWS, how.packed_bytes(COLUMNS)) and scales.shape == (ROWS, how.scale_bytes(COLUMNS))
    own = how.quantize(weight()[20:31])
    assert torch.equal(own[0], packed[20:31]) and torch.equal(own[1], scales[20:31])


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_error_is_that_of_the_format(how: Quantization) -> None:
    plain = torch.randn(256, 512, generator=torch.Generator().manual_seed(2))
    back = how.dequantize(*how.quantize(plain), torch.float32)
    error = ((back - plain).norm() / plain.norm()).item()
    # a code is at most half a step off: 0.15 of a block's largest value (about 2.4 deviations) in NF4, 1/254 in int8
    assert error < (0.11 if how.format == "nf4" else 0.006)
    assert how.dequantize(*how.quantize(torch.zeros(2, 64)), torch.float32).abs().max() == 0


@pytest.mark.parametrize("kernel", ["torch", "bitsandbytes"])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_the_linear_computes_with_its_weight(
    storage: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "torch":
        monkeypatch.setattr(quantized, "find_kernel", lambda *_: None)
    else:
        assert find_kernel(Quantization(), "cpu") is by_bitsandbytes
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, dtype=storage), nn.Linear(ROWS, 8, dtype=storage))
    bias = model[0].bias.detach().clone()
    assert quantize_linears(model, ["0", "1"], Quantization(), storage) == ["0"]  # 96 is no multiple of 64
    linear = model[0]
    assert isinstance(linear, QuantizedLinear)
    BaseTensor("0.weight", linear).store(0, weight(storage)[:50])
    BaseTensor("0.weight", linear).store(50, weight(storage)[50:])
    made = Quantization().dequantize(*Quantization().quantize(weight(storage)), storage)
    assert torch.equal(linear.weight, made)
    x = torch.randn(2, 3, COLUMNS, dtype=storage, requires_grad=True)
    out = linear(x)
    assert torch.equal(out, x @ made.t() + bias)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(out) @ made)
    assert linear.packed.grad is None and not linear.bias.requires_grad


def test_nothing_but_the_stored_bytes_is_kept_for_backward() -> None:
    linear = QuantizedLinear(nn.Linear(COLUMNS, ROWS), Quantization(), torch.float32)
    BaseTensor("weight", linear).store(0, weight())
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        linear(torch.randn(4, COLUMNS, requires_grad=True))
    assert {t.data_ptr() for t in kept} <= {linear.packed.data_ptr(), linear.scales.data_ptr()}


def test_compiled_blocks_keep_no_weight_either() -> None:
    linear = QuantizedLinear(nn.Linear(COLUMNS, ROWS), Quantization(), torch.float32)
    BaseTensor("weight", linear).store(0, weight())
    kept: list[torch.Tensor] = []
    run = torch.compile(lambda x: torch.relu(linear(x)), backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = run(torch.randn(4, COLUMNS, requires_grad=True))
    out.sum().backward()
    assert kept and max(t.numel() for t in kept) < ROWS * COLUMNS / 2
