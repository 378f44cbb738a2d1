"""PiSSA: A and B start as the principal singular vectors, the base keeps the rest (https://arxiv.org/abs/2404.02948).

The base weight is changed, so what is saved is the difference to the start, a LoRA adapter of twice the rank that
fits the unchanged base model. The start is kept in the run folder: a resumed run needs the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from packtrain.config.schema import MethodSection
from packtrain.models.files import WeightFiles
from packtrain.models.names import file_key
from packtrain.models.weights import Slices, WeightReader, local_slices, local_tensor, resolve_key
from packtrain.parallel.world import World

START_FILE = "pissa_start.safetensors"
"""In the run folder."""
_ITERATIONS = 8


@dataclass
class PissaStart:
    """A and B of each target by the base weight's key: A (rank, in), B (out, rank), float32 on the CPU."""

    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scaling: float

    def residual(self, key: str, slices: Slices, values: torch.Tensor) -> torch.Tensor:
        """The rows of a base weight without their principal part: a transform for ``stream_weights``."""
        if key not in self.factors:
            return values
        a, b = (factor.to(values.device) for factor in self.factors[key])
        return values.float() - self.scaling * (b[slices[0]] @ a[:, slices[1]])

    def fill(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Copy this rank's parts of A and B into the adapters among ``named``."""
        with torch.no_grad():
            for name, parameter in named:
                if ".lora_A." in name or ".lora_B." in name:
                    a, b = self.factors[file_key(name).split(".lora_")[0] + ".weight"]
                    whole = a if ".lora_A." in name else b
                    local_tensor(parameter).copy_(whole[local_slices(parameter)])

    def difference(self, key: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A (2 rank, in) and B (out, 2 rank) whose product is ``b @ a`` less the start's."""
        a0, b0 = self.factors[key]
        return torch.cat([a, a0.to(a)]), torch.cat([b, -b0.to(b)], dim=1)

    def save(self, file: Path) -> None:
        from safetensors.torch import save_file

        tensors = {
            f"{key}.{side}": t.contiguous()
            for key, pair in self.factors.items()
            for side, t in zip("AB", pair, strict=True)
        }
        temporary = file.with_suffix(".tmp")
        save_file(tensors, temporary)
        os.replace(temporary, file)

    @classmethod
    def load(cls, file: Path, method: MethodSection) -> PissaStart:
        from safetensors.torch import load_file

        tensors = load_file(file)
        keys = {name.rsplit(".", 1)[0] for name in tensors}
        return cls({key: (tensors[f"{key}.A"], tensors[f"{key}.B"]) for key in keys}, scaling(method))


def scaling(method: MethodSection) -> float:
    """What peft multiplies B @ A by."""
    return method.alpha / (method.rank**0.5 if method.rslora else method.rank)


def pissa_start(
    model: nn.Module, files: WeightFiles, decoder: str, method: MethodSection, world: World, file: Path
) -> PissaStart:
    """The start, read from ``file`` where a run is resumed, else computed (each rank a share) and written there."""
    if not file.exists():
        start = _compute(model, files, decoder, method, world)
        if world.is_main:
            start.save(file)
        world.barrier()
    return PissaStart.load(file, method)


def _compute(model: nn.Module, files: WeightFiles, decoder: str, method: MethodSection, world: World) -> PissaStart:
    keys = [file_key(name).split(".lora_")[0] + ".weight" for name, _ in model.named_parameters() if ".lora_A." in name]
    mine: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with WeightReader(files) as reader:
        for key in keys[world.rank :: world.size]:
            name = resolve_key(files, key, decoder)
            assert name is not None, key
            weight = reader.read(name, (slice(None), slice(None))).to(world.device).float()
            mine[key] = _principal(weight, method)
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in world.gather(mine):
        factors.update(part)  # type: ignore[call-overload]
    return PissaStart(factors, scaling(method))


def _principal(weight: torch.Tensor, method: MethodSection) -> tuple[torch.Tensor, torch.Tensor]:
    """A = sqrt(S / scaling) V^T and B = U sqrt(S / scaling) of the leading ``rank`` singular values."""
    rank = min(method.rank, *weight.shape)
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(weight, q=min(rank + 16, *weight.shape), niter=_ITERATIONS)
    root = (s[:rank] / scaling(method)).sqrt()
    a, b = root[:, None] * v[:, :rank].T, u[:, :rank] * root
    missing = method.rank - rank  # a matrix smaller than the rank: the other directions are zero
    if missing:
        a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
    return a.cpu().contiguous(), b.cpu().contiguous()
