"""Locks of compilations that were killed. torch makes a file for as long as it compiles an extension, and waits for
one that somebody else made without end: one compilation killed in its midst hangs every later run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import platformdirs

from packtrain.launch.clock import file_age

LOST_AFTER_SECONDS = 60.0
"""Age of a lock that no process here holds, after which no process on another host is taken to hold it either."""


def extensions_folder() -> Path:
    """Where torch compiles extensions (``torch.utils.cpp_extension``), found without importing it."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or platformdirs.user_cache_dir("torch_extensions"))


def remove_abandoned_locks(folder: Path, patience: float = LOST_AFTER_SECONDS) -> None:
    """Remove the locks under ``folder`` that no process holds; young ones may be another host's, so wait for them."""
    while locks := [path for path in folder.glob("**/lock") if not _held(path)]:
        for path in locks:
            if _age(path) > patience:
                print(f"packtrain: removed {path}, left by a compilation that was killed", file=sys.stderr, flush=True)
                path.unlink(missing_ok=True)
        time.sleep(0.2)


def _age(path: Path) -> float:
    try:
        return file_age(path)
    except FileNotFoundError:  # released meanwhile
        return 0.0


def _held(path: Path) -> bool:
    """Whether a process of this host that we may look into has the file open, as torch does while it compiles."""
    wanted = os.path.realpath(path)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == wanted:
                return True
        except OSError:  # gone, or somebody else's
            continue
    return False
