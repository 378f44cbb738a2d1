"""Weights stream: each rank reads its own slices of each safetensors tensor straight into its local shard.

No rank and no host ever holds the model. Adapters are not in the files: whoever knows how they start fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from packtrain.errors import UserError
from packtrain.models.files import WeightFiles
from packtrain.models.names import file_key, is_adapter

Slices = tuple[slice, ...]


def local_slices(parameter: torch.Tensor) -> Slices:
    """Which part of the whole tensor this rank holds, as one slice per dim."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The memory this rank holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


@dataclass
class WeightReader:
    """Reads slices of named tensors; a context manager that keeps the files it opened.

    Attributes:
        bytes_read: bytes of the slices read so far.
    """

    files: WeightFiles
    bytes_read: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _handles: dict[Path, Any] = field(default_factory=dict)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handles.clear()
        self._stack.close()

    def read(self, key: str, slices: Slices) -> torch.Tensor:
        """The slice as a CPU tensor in the file's dtype."""
        from safetensors import safe_open

        file = self.files.entries[key].file
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        tensor = self._handles[file].get_slice(key)[slices]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor


def resolve_key(files: WeightFiles, key: str, decoder: str) -> str | None:
    """The file's name for ``key``: the same, or the one of a bare decoder saved without its head."""
    short = key.removeprefix(f"{decoder}.")
    return next((k for k in (key, short) if k in files.entries), None)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(file key, parameter) of everything that comes from weight files, each tied parameter once."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield file_key(name), parameter


def stream_weights(
    model: nn.Module,
    files: WeightFiles,
    decoder: str,
    transform: Callable[[str, Slices, torch.Tensor], torch.Tensor] | None = None,
) -> int:
    """Fill the local shards of all base parameters from the files.

    Args:
        model: materialised (not meta), sharded or not.
        decoder: name of the decoder in the model, the prefix a headless weight file leaves out.
        transform: changes a slice on its way: ``transform(key, slices, values) -> values``.

    Returns:
        Bytes read by this rank.

    Raises:
        UserError: a tensor is missing from the files or has another shape.
    """
    with WeightReader(files) as reader, torch.no_grad():
        for key, parameter in base_parameters(model):
            name = resolve_key(files, key, decoder)
            if name is None:
                raise UserError(
                    "model.path",
                    f"{files.folder} has no tensor '{key}'",
                    "give a folder whose weights match its config.json",
                )
            _check_shape(files, name, parameter)
            local, slices = local_tensor(parameter), local_slices(parameter)
            if local.numel() == 0:
                continue
            values = reader.read(name, slices)
            local.copy_(transform(key, slices, values) if transform else values)
        return reader.bytes_read


def _check_shape(files: WeightFiles, key: str, parameter: torch.Tensor) -> None:
    entry = files.entries[key]
    if entry.shape != tuple(parameter.shape):
        raise UserError(
            f"{entry.file}: {key}",
            f"has shape {list(entry.shape)}, config.json asks for {list(parameter.shape)}",
            "give a folder whose weights match its config.json",
        )
