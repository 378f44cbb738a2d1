"""Checkpoints on disk. A folder ``step-N`` is whole; whatever is not whole is called ``step-N.tmp``.

The shards are written by ``torch.distributed.checkpoint`` (any number of processes can read them), then
``manifest.json`` with the size and SHA-256 of each file, then the folder is renamed. A kill at any moment leaves
the older checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from packtrain.errors import UserError
from packtrain.parallel.world import World

MANIFEST = "manifest.json"
_NAME = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Position:
    """Where the run stands. The order of the data is a function of the step, so this is the place in the data too."""

    step: int
    tokens: int = 0


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: the run's ``checkpoints`` folder, seen by all ranks.
        keep: how many of the newest stay.
        belongs_to: fingerprints of what a run stands on, by what it is called: ``{"data": ..., "base model": ...}``.
            A step's rows are a function of the data, and a LoRA checkpoint is nothing without its base model.
    """

    def __init__(self, folder: Path, keep: int, world: World, belongs_to: dict[str, str]) -> None:
        self.folder, self.keep, self.world, self.belongs_to = folder, keep, world, belongs_to

    def save(self, state: dict[str, torch.Tensor], position: Position) -> Path:
        """Write a checkpoint; every rank calls this at the same step. Returns its folder, whole."""
        final = self.folder / f"step-{position.step}"
        temporary = final.with_name(final.name + ".tmp")
        if self.world.is_main:
            for unfinished in self.folder.glob("*.tmp"):  # of a save or a removal that was killed
                shutil.rmtree(unfinished)
            temporary.mkdir(parents=True)
        self.world.barrier()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary))
        hashes = self._hash_own(temporary)
        if self.world.is_main:
            self._complete(temporary, final, hashes, position)
        self.world.barrier()
        return final

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that verifies, and what is wrong with the newer ones that were passed over."""
        passed_over: list[str] = []
        for path in reversed(self.all()):
            fault = faults(path)
            if fault is None:
                return path, passed_over
            passed_over.append(fault)
        return None, passed_over

    def all(self) -> list[Path]:
        """Whole checkpoints by step, unverified."""
        if not self.folder.is_dir():
            return []
        found = [
            (int(m[1]), p) for p in self.folder.iterdir() if (m := _NAME.match(p.name)) and (p / MANIFEST).is_file()
        ]
        return [path for _, path in sorted(found)]

    def load(self, path: Path, state: dict[str, torch.Tensor]) -> Position:
        """Copy a checkpoint into the tensors of ``state``, whatever number of processes wrote it."""
        manifest = read_manifest(path)
        for name, fingerprint in self.belongs_to.items():
            if manifest["belongs_to"][name] != fingerprint:
                what = f"was saved on other {name} than the recipe's files hold now"
                raise UserError(str(path), what, f"restore the {name}, or start a new run")
        missing = sorted(set(state) ^ set(manifest["keys"]))
        if missing:
            raise UserError(
                str(path),
                f"holds other tensors than this recipe trains (first: {missing[0]})",
                "resume with the run's own recipe",
            )
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        return Position(**manifest["position"])

    def _hash_own(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Sizes and hashes of all files, each rank hashing a share of them."""
        self.world.barrier()  # .metadata is written last, by one rank
        files = sorted(p for p in folder.iterdir() if p.is_file())
        mine = {
            p.name: {"size": p.stat().st_size, "sha256": sha256(p)} for p in files[self.world.rank :: self.world.size]
        }
        merged: dict[str, dict[str, Any]] = {}
        for part in self.world.gather(mine):
            merged.update(part)  # type: ignore[call-overload]
        return merged

    def _complete(self, temporary: Path, final: Path, hashes: dict[str, Any], position: Position) -> None:
        keys = list(dcp.FileSystemReader(temporary).read_metadata().state_dict_metadata)
        manifest = {
            "belongs_to": self.belongs_to,
            "position": asdict(position),
            "world_size": self.world.size,
            "files": hashes,
            "keys": sorted(keys),
        }
        with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():  # a damaged one of the same step, passed over by a resume
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync_folder(self.folder)
        for old in self.all()[: -self.keep]:
            _remove(old)


def faults(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file is there with its size and hash."""
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return f"{path.name}: no readable {MANIFEST} ({error})"
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{path.name}: {name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{path.name}: {name} has {file.stat().st_size} of {expected['size']} bytes"
        if sha256(file) != expected["sha256"]:
            return f"{path.name}: {name} is damaged (its hash differs)"
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    """Delete a checkpoint; a kill half-way leaves a ``.tmp`` behind, never a broken ``step-N``."""
    doomed = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
