"""The blocks of a model that a setting names."""

from __future__ import annotations

import re

_BLOCKS = re.compile(r"blocks\.(\d+)(?:-(\d+))?")


def block_range(part: str) -> range | None:
    """``blocks.N`` or ``blocks.N-M``, both counted, as indices; empty where M is below N; None: it names no blocks."""
    found = _BLOCKS.fullmatch(part)
    return range(int(found[1]), int(found[2] or found[1]) + 1) if found else None
