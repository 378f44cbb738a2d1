"""Checkpoint folders as anybody may look at them: which are whole, which verify. Without torch."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_NAME = re.compile(r"^step-(\d+)$")


def whole(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in a run's ``checkpoints`` folder by step, unverified, the oldest first."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): p for p in folder.iterdir() if (m := _NAME.match(p.name)) and (p / MANIFEST).is_file()}
    return dict(sorted(found.items()))


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and what is wrong with the newer ones that were passed over."""
    passed_over: list[str] = []
    for path in reversed(whole(folder).values()):
        fault = faults(path)
        if fault is None:
            return path, passed_over
        passed_over.append(fault)
    return None, passed_over


def faults(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file is there with its size and hash."""
    try:
        files = dict(read_manifest(path)["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name}: no readable {MANIFEST} ({error})"
    for name, expected in files.items():
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
