"""How fast a quantised weight becomes bf16 on a GPU, against a plain copy of as many bytes.

python benchmarks/dequantize.py
"""

from __future__ import annotations

import functools
import importlib.util
import statistics

import torch

from packtrain.models.quantize import Quantization
from packtrain.models.quantized import by_bitsandbytes, find_kernel


def milliseconds(function, repeats: int = 50) -> float:
    for _ in range(5):
        function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    rows, columns = 14336, 4096
    weights = [(torch.randn(rows, columns, device="cuda") * 0.02).bfloat16() for _ in range(4)]
    target = torch.empty_like(weights[0])
    copy = milliseconds(lambda: target.copy_(weights[0]))
    rate = 2 * target.nbytes / copy / 1e9
    print(f"copy: {copy:.3f} ms, {rate:.2f} TB/s")
    for quantization in (Quantization(), Quantization(double=True), Quantization("int8")):
        packed, scales = quantization.quantize(weights[0])
        moved = packed.nbytes + scales.nbytes + target.nbytes
        kernels = {"torch": Quantization.dequantize, "torch, compiled": torch.compile(Quantization.dequantize)}
        kernels["ours"] = find_kernel(quantization, "cuda")
        if importlib.util.find_spec("bitsandbytes") and quantization.format == "nf4":
            import bitsandbytes  # noqa: F401 - registers its operators

            kernels["bitsandbytes"] = by_bitsandbytes
        wanted = quantization.dequantize(packed, scales, torch.bfloat16)
        for name, kernel in kernels.items():
            run = functools.partial(kernel, quantization, packed, scales, torch.bfloat16)
            assert torch.equal(run(), wanted) or name == "torch, compiled", name  # which fuses a product and a sum
            time = milliseconds(run)
            print(
                f"{quantization}, {name}: {time:.3f} ms, {moved / time / 1e9 / rate:.2f} of the copy's rate", flush=True
            )


if __name__ == "__main__":
    main()
