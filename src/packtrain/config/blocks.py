"""The blocks of a model that a setting names."""

from __future__ import annotations

import re

_BLOCKS = re.compile(r"blocks\.(\d+)(?:-(\d+))?")


def block_range(part: str) -> range | None:
    """``blocks.N`` or ``blocks.N-M``, both counted, as indices; empty where M is below N; None: it names no blocks."""
    found = _BLOCKS.fullmatch(part)
    return range(int(found[1]), int(found[2] or found[1]) + 1) if found else None


def block_fault(part: str, num_blocks: int) -> tuple[str, str] | None:
    """What is wrong with the name of blocks, and its mend; None: a model of so many has them."""
    blocks = block_range(part)
    if blocks is None:
        return f"'{part}' is no part of the model", "give embedding, norm, head, blocks.N or blocks.N-M"
    if not blocks or blocks.stop > num_blocks:
        return f"'{part}' of {num_blocks} blocks", f"blocks go from 0 to {num_blocks - 1}"
    return None
