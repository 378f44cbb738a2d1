"""Weights stream: each rank reads its own slices of each safetensors tensor straight into its local shard.

No rank and no host ever holds the model: a tensor passes in pieces of a few megabytes, quantised on the way where its
place asks for that. Adapters are not in the files: whoever knows how they start fills them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from packtrain.errors import UserError
from packtrain.models.causal_lm import CausalLMWithLoss
from packtrain.models.files import TensorEntry, WeightFiles
from packtrain.models.names import NEW_ROWS
from packtrain.models.quantized import QuantizedLinear

Slices = tuple[slice, ...]
Transform = Callable[[str, Slices, torch.Tensor], torch.Tensor]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

PIECE = 2**23
"""Values that are in flight at once: what quantising makes of them is the largest staging buffer."""


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


def placed_like(parameter: torch.Tensor, local: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """A tensor sharded like ``parameter`` whose memory on this rank is ``local``, on whatever device that is.

    Args:
        shape: of the whole tensor, where it is not the parameter's.
    """
    if not isinstance(parameter, DTensor):
        return local
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = parameter.shape if shape is None else shape
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(shape, stride, local.dtype)
    # DTensor.from_local would move what lies in host memory to the mesh's device.
    return DTensor(local, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)


class Reader(Protocol):
    """Where slices of named tensors come from."""

    files: WeightFiles
    bytes_read: int

    def read(self, key: str, slices: Slices) -> torch.Tensor:
        """The slice in the file's dtype, on any device."""
        ...


@dataclass
class WeightReader:
    """Reads from the files itself; a context manager that keeps the files it opened.

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


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """The dtype a tensor has in its file.

    Raises:
        UserError: not one that a model is trained from.
    """
    if entry.dtype not in _DTYPES:
        what, mend = f"holds a tensor stored as {entry.dtype}", "start from weights in bf16, fp16 or fp32"
        raise UserError(str(entry.file), what, mend)
    return _DTYPES[entry.dtype]


def resolve_key(files: WeightFiles, key: str, decoder: str) -> str | None:
    """The file's name for ``key``: the same, or the one of a bare decoder saved without its head."""
    short = key.removeprefix(f"{decoder}.")
    return next((k for k in (key, short) if k in files.entries), None)


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of the weight files, and what holds this rank's part of it in the model.

    Args:
        key: its name in the files.
        holder: the parameter, or the module that stores it quantised.
    """

    key: str
    holder: torch.Tensor | QuantizedLinear

    @property
    def parameter(self) -> torch.Tensor:
        return self.holder.packed if isinstance(self.holder, QuantizedLinear) else self.holder

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.holder, QuantizedLinear):
            return self.holder.out_features, self.holder.in_features
        return tuple(self.holder.shape)

    @property
    def slices(self) -> Slices:
        """This rank's part, one slice per dim."""
        if isinstance(self.holder, QuantizedLinear):
            return local_slices(self.holder.packed)[0], slice(0, self.holder.in_features)
        return local_slices(self.holder)

    def store(self, start: int, values: torch.Tensor) -> None:
        """Keep ``values``, which begin at row ``start`` of this rank's part."""
        if isinstance(self.holder, QuantizedLinear):
            place = self.holder.packed.device
            packed, scales = self.holder.quantization.quantize(values.to(place))
            _rows(self.holder.packed, start, packed).copy_(packed)
            _rows(self.holder.scales, start, scales).copy_(scales)
        else:
            local = local_tensor(self.holder)
            (local[start : start + len(values)] if local.ndim else local).copy_(values)


def _rows(parameter: torch.Tensor, start: int, values: torch.Tensor) -> torch.Tensor:
    """The bytes of a stored parameter where ``values`` (rows, bytes) belong."""
    return local_tensor(parameter).view(torch.uint8)[start : start + len(values)]


def base_tensors(model: CausalLMWithLoss) -> Iterator[BaseTensor]:
    """Everything of the model that comes from weight files, each tied tensor once."""
    seen: set[int] = set()
    for module, name in model.names.items():
        if isinstance(module, QuantizedLinear):
            yield BaseTensor(f"{name}.weight", module)
            seen |= {id(module.packed), id(module.scales)}
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen and leaf != NEW_ROWS:
                seen.add(id(parameter))
                yield BaseTensor(f"{name}.{leaf}", parameter)


def num_trained(model: CausalLMWithLoss) -> int:
    """Parameters that are trained, of a model before it is sharded."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def num_parameters(model: CausalLMWithLoss) -> int:
    """Parameters of a model before it is sharded: a quantised weight counts as what it stands for."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    stored = {id(p) for module in quantized for p in (module.packed, module.scales)}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in stored)
    return plain + sum(module.in_features * module.out_features for module in quantized)


def stream_weights(
    model: CausalLMWithLoss, reader: Reader, transform: Transform | None = None,
    only: Container[torch.Tensor] | None = None,
) -> int:  # fmt: skip
    """Fill this rank's parts of all base tensors.

    Args:
        model: materialised (not meta), sharded or not.
        transform: changes a slice on its way: ``transform(key, slices, values) -> values``.
        only: the parameters to fill; None: all.

    Returns:
        Bytes read by this rank.

    Raises:
        UserError: a tensor is missing from the files or has another shape.
    """
    with torch.no_grad():
        for tensor in base_tensors(model):
            if only is not None and tensor.parameter not in only:
                continue
            name = find_tensor(reader.files, tensor, model.plan.decoder)
            slices = tensor.slices
            for piece in pieces(slices):
                values = reader.read(name, piece)
                start = piece[0].start - slices[0].start if piece else 0
                tensor.store(start, transform(tensor.key, piece, values) if transform else values)
    return reader.bytes_read


def pieces(slices: Slices) -> Iterator[Slices]:
    """A part of a tensor in runs of rows of at most ``PIECE`` values (one row at least); an empty part in none."""
    if not slices:
        yield slices
        return
    first, rest = slices[0], slices[1:]
    columns = math.prod(part.stop - part.start for part in rest)
    step = max(PIECE // max(columns, 1), 1)
    if columns == 0:
        return
    for start in range(first.start, first.stop, step):
        yield slice(start, min(start + step, first.stop)), *rest


def find_tensor(files: WeightFiles, tensor: BaseTensor, decoder: str) -> str:
    """The name of ``tensor`` in the files, checked.

    Args:
        decoder: name of the decoder in the model, the prefix a headless weight file leaves out.

    Raises:
        UserError: it is missing or has another shape.
    """
    name = resolve_key(files, tensor.key, decoder)
    if name is None:
        raise UserError(
            "model.path",
            f"{files.folder} has no tensor '{tensor.key}'",
            "give a folder whose weights match its config.json",
        )
    entry = files.entries[name]
    if entry.shape != tensor.shape:
        raise UserError(
            f"{entry.file}: {name}",
            f"has shape {list(entry.shape)}, config.json asks for {list(tensor.shape)}",
            "give a folder whose weights match its config.json",
        )
    torch_dtype(entry)
    return name
