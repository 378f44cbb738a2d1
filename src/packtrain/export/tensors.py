"""Trained tensors, gathered one at a time on rank 0 and written as safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from packtrain.models.files import WeightFiles
from packtrain.models.names import file_key
from packtrain.models.weights import base_parameters, resolve_key
from packtrain.parallel.strategy import full_tensor
from packtrain.train.session import Session

_SHARD_BYTES = 4 * 2**30
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

Named = Iterator[tuple[str, torch.Tensor]]


def gathered_model(session: Session) -> Named:
    """(file key, whole CPU tensor) of the base model, in the dtype of the files it came from.

    A collective: every rank runs through it; tensors that only rank 0 needs are dropped elsewhere.
    """
    files, decoder = session.built.files, session.built.plan.decoder
    for key, parameter in base_parameters(session.built.model):
        whole = full_tensor(parameter.detach())
        if session.world.is_main:
            yield key, whole.to("cpu", _file_dtype(files, key, decoder))


def gathered_adapters(session: Session) -> dict[str, torch.Tensor]:
    """Adapter tensors by parameter name, float32 on the CPU; empty on ranks other than 0. A collective."""
    found = {}
    for name, parameter in session.named:
        whole = full_tensor(parameter.detach())
        if session.world.is_main:
            found[name] = whole.to("cpu", torch.float32)
    return found


def peft_key(name: str) -> str:
    """The name of an adapter tensor in a peft adapter file."""
    key = "base_model.model." + file_key(name)
    return key.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(".default.", ".")


def write_sharded(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> int:
    """Write tensors as they come, a file for every 4 GiB, with the index transformers expects. Returns bytes."""
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal pending, size
        save_file(pending, folder / f"part-{len(parts)}.safetensors", metadata={"format": "pt"})
        parts.append(list(pending))
        pending, size = {}, 0

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and size + num_bytes > _SHARD_BYTES:
            flush()
        pending[name] = tensor.contiguous()
        size, total = size + num_bytes, total + num_bytes
    flush()
    _name_parts(folder, parts, total)
    return total


def _name_parts(folder: Path, parts: list[list[str]], total: int) -> None:
    if len(parts) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{i}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _file_dtype(files: WeightFiles, key: str, decoder: str) -> torch.dtype:
    name = resolve_key(files, key, decoder)
    return _TORCH_DTYPES[files.entries[name].dtype] if name else torch.bfloat16
