"""Trained tensors, gathered one at a time on rank 0 and written as safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from packtrain.models.grown import whole_table
from packtrain.models.names import NEW_ROWS, file_key, is_adapter
from packtrain.models.weights import base_tensors, resolve_key, torch_dtype
from packtrain.train.session import Session

_FILE_BYTES = 4 * 2**30
Named = Iterator[tuple[str, torch.Tensor]]


def gathered_model(session: Session) -> Named:
    """(file key, whole CPU tensor) of the base model, in the dtype of the files it came from.

    A collective: every rank runs through it; tensors that only rank 0 needs are dropped elsewhere.
    """
    for tensor in base_tensors(session.built.model):
        assert isinstance(tensor.holder, torch.Tensor), "a quantised base is not exported"
        whole = _gathered(session, tensor.key, tensor.holder)
        if session.world.is_main:
            yield tensor.key, whole


def gathered_adapters(session: Session) -> dict[str, torch.Tensor]:
    """Adapter tensors by parameter name, float32 on the CPU; empty on ranks other than 0. A collective."""
    found = {}
    for name, parameter in session.named:
        if is_adapter(name):
            whole = session.whole(parameter)
            if session.world.is_main:
                found[name] = whole.float()
    return found


def gathered_parts(session: Session, modules: list[str]) -> dict[str, torch.Tensor]:
    """The parameters of whole modules of the base model by file key, as ``gathered_model`` gives them."""
    found = {}
    for module in modules:
        for leaf, parameter in session.built.model.base.get_submodule(module).named_parameters(recurse=False):
            if leaf != NEW_ROWS:
                whole = _gathered(session, f"{module}.{leaf}", parameter)
                if session.world.is_main:
                    found[f"{module}.{leaf}"] = whole
    return found


def _gathered(session: Session, key: str, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the CPU in its file's dtype, an embedding or head with the rows of added tokens in it."""
    built = session.built
    whole = session.whole(parameter)
    if built.added and key in (f"{built.plan.embedding}.weight", f"{built.plan.head}.weight"):
        rows = getattr(built.model.base.get_submodule(key.removesuffix(".weight")), NEW_ROWS)
        whole = whole_table(whole, session.whole(rows), built.added.first)
    name = resolve_key(built.files, key, built.plan.decoder)
    if name is None and built.plan.tied:  # the head of a tied model has no tensor of its own
        name = resolve_key(built.files, f"{built.plan.embedding}.weight", built.plan.decoder)
    assert name is not None, key
    return whole.to(torch_dtype(built.files.entries[name]))


def peft_key(name: str) -> str:
    """The name of an adapter tensor in a peft adapter file."""
    if ".prompt_encoder." in name:
        return "prompt_embeddings"
    key = "base_model.model." + file_key(name)
    return key.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(".default.", ".")


def write_sharded(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, file_bytes: int = _FILE_BYTES) -> int:
    """Write tensors as they come, several files where they take more, with the index transformers expects.

    Returns:
        Bytes of all tensors.
    """
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
        if pending and size + num_bytes > file_bytes:
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
