"""Checkpoints on disk. A folder ``step-N`` is whole; whatever is not whole is called ``step-N.tmp``.

The shards are written by ``torch.distributed.checkpoint`` (any number of processes can read them), then
``manifest.json`` with the size and SHA-256 of each file, then the folder is renamed. A kill at any moment leaves
the older checkpoints as they were.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from packtrain.checkpoint.folders import MANIFEST, read_manifest, sha256, whole
from packtrain.errors import UserError
from packtrain.parallel.world import World

_SPARE_BYTES = 4 << 20  # metadata, the manifest, and what else the run writes meanwhile
T = TypeVar("T")


class SaveFailedError(Exception):
    """A checkpoint could not be written; raised on every rank. The older ones are untouched."""


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
        """Write a checkpoint; every rank calls this at the same step. Returns its folder, whole.

        Raises:
            SaveFailedError: the disk is full or fails; what was begun is removed again.
        """
        final = self.folder / f"step-{position.step}"
        temporary = final.with_name(final.name + ".tmp")
        needed = sum(value.numel() * value.element_size() for value in state.values())
        try:
            self._together(lambda: self._begin(temporary, needed))
            self._write(state, temporary)
            hashes = self._hash_own(temporary)
            self._together(lambda: self._complete(temporary, final, hashes, position))
        except SaveFailedError:
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)  # the next save tries again
            raise
        return final

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

    def _together(self, action: Callable[[], T]) -> T:
        """Do something on every rank; where it fails on one, all of them hear of it."""
        value, fault = None, None
        try:
            value = action()
        except OSError as error:
            fault = f"rank {self.world.rank}: {error}"
        for found in self.world.gather(fault):
            if found:
                raise SaveFailedError(found)
        return value  # type: ignore[return-value]

    def _begin(self, temporary: Path, needed: int) -> None:
        if not self.world.is_main:
            return
        for unfinished in self.folder.glob("*.tmp"):  # of a save or a removal that was killed
            shutil.rmtree(unfinished)
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < needed + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"it takes {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free")
        temporary.mkdir()

    def _write(self, state: dict[str, torch.Tensor], temporary: Path) -> None:
        """The shards. What fails on one rank is raised on all of them."""
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary))
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            if not isinstance(cause, OSError | RuntimeError):  # torch's writer turns a full disk into the latter
                raise
            raise SaveFailedError(f"rank {rank}: {str(cause).splitlines()[0]}") from error

    def _hash_own(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Sizes and hashes of all files, each rank hashing a share of them."""
        self.world.barrier()  # .metadata is written last, by one rank

        def hash_share() -> dict[str, dict[str, Any]]:
            files = sorted(p for p in folder.iterdir() if p.is_file())[self.world.rank :: self.world.size]
            return {p.name: {"size": p.stat().st_size, "sha256": sha256(p)} for p in files}

        mine = self._together(hash_share)
        merged: dict[str, dict[str, Any]] = {}
        for part in self.world.gather(mine):
            merged.update(part)  # type: ignore[call-overload]
        return merged

    def _complete(self, temporary: Path, final: Path, hashes: dict[str, Any], position: Position) -> None:
        if not self.world.is_main:
            return
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
        for old in list(whole(self.folder).values())[: -self.keep]:
            _remove(old)


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
