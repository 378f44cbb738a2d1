"""The safetensors files of a model folder: which tensor lies where, checked without reading a weight."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packtrain.errors import UserError

_HEADER_LIMIT = 100 * 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: its file, shape and safetensors dtype name (``BF16``, ``F32``, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """All tensors of a model folder by name."""

    folder: Path
    entries: dict[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Read and check the headers of all files.

        Raises:
            UserError: no weights, a listed file is missing, or a file is cut short or damaged.
        """
        entries: dict[str, TensorEntry] = {}
        for file in _files(folder):
            entries.update(_read_header(file))
        return cls(folder, entries)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the headers and of samples all over the files: tells two models of one shape apart."""
        digest = hashlib.sha256()
        for file in sorted({entry.file for entry in self.entries.values()}):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with open(file, "rb") as handle:
                for part in range(_SAMPLES):
                    handle.seek(size * part // _SAMPLES)
                    digest.update(handle.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:32]

    @cached_property
    def num_parameters(self) -> int:
        total = 0
        for entry in self.entries.values():
            count = 1
            for size in entry.shape:
                count *= size
            total += count
        return total


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(str(index), "is damaged", "copy or download the model again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                "model.path",
                f"{folder} lacks {missing[0]}, one of {len(names)} weight files",
                "copy or download the model again",
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    if list(folder.glob("*.bin")):
        raise UserError(
            "model.path",
            f"{folder} holds its weights as pickle files (*.bin)",
            "convert them with transformers' save_pretrained(safe_serialization=True)",
        )
    raise UserError("model.path", f"{folder} has a config.json and no weights", "add its *.safetensors files")


def _read_header(file: Path) -> dict[str, TensorEntry]:
    damaged = UserError(str(file), "is not a whole safetensors file", "copy or download it again")
    if not file.is_file():
        raise damaged
    size = file.stat().st_size
    with open(file, "rb") as handle:
        prefix = handle.read(8)
        if len(prefix) < 8:
            raise damaged
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, _HEADER_LIMIT):
            raise damaged
        try:
            header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            found = {name: TensorEntry(file, tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise damaged from error
    if size < end:
        raise UserError(str(file), f"is cut short: {size} of {end} bytes are there", "copy or download it again")
    return found
