"""Where tokenised data is kept: a folder named after a hash of all that it depends on, complete or absent."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from packtrain.config.cache_folder import cache_root, writable
from packtrain.errors import UserError

# Raise by hand whenever the same input would give other tokens or labels.
DATA_VERSION = 1


def data_root(setting: str) -> Path:
    """The folder of tokenised data: ``data.cache``, else ``data`` in the user's cache."""
    return cache_root() / "data" if setting == "auto" else Path(setting).expanduser()


def data_key(root: Path, files: Iterable[Path], settings: Any) -> str:
    """The hash of the files' contents, of ``settings`` (what orjson can write) and of the code's version."""
    hashes = [file_hash(root, path) for path in files]
    values = {"version": DATA_VERSION, "files": hashes, "settings": settings}
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


def file_hash(root: Path, path: Path) -> str:
    """The SHA-256 of a file, remembered in ``root`` by its path, size, inode and time of change."""
    stat = path.stat()
    name = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
    memo = root / "hashes" / hashlib.sha256(name.encode()).hexdigest()
    if memo.is_file() and len(known := memo.read_text()) == 64:
        return known
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    writable(memo.parent, "data.cache")
    part = memo.with_name(f"{memo.name}.{os.getpid()}.tmp")
    part.write_text(digest)
    part.rename(memo)
    return digest


def build_once(folder: Path, build: Callable[[Path], None]) -> bool:
    """Have ``build(folder)`` make the folder unless it exists; of several processes one does, the rest wait.

    Returns:
        whether it was built now.

    Raises:
        UserError: the cache folder cannot be written.
    """
    writable(folder.parent, "data.cache")
    try:
        with _locked(folder.with_name(folder.name + ".lock")):
            if folder.is_dir():
                return False
            build(folder)
            return True
    except PermissionError as error:
        raise UserError(
            "data.cache", f"cannot write {error.filename}", "set data.cache to a folder of yours"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
