"""What the three preparation scripts share: their arguments and their last line of output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "PREPARED "


def arguments() -> argparse.Namespace:
    """MODEL ROWS WORKERS CACHE LENGTH, as benchmarks/preprocessing.py gives them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("cache", type=Path)
    parser.add_argument("length", type=int)
    return parser.parse_args()


def report(seconds: float, sequences: int, tokens: int, labelled: int) -> None:
    """Print what was measured: wall seconds, packed sequences, real and labelled tokens."""
    values = {"seconds": seconds, "sequences": sequences, "tokens": tokens, "labelled": labelled}
    print(MARK + json.dumps(values), flush=True)


def flat(column: Any) -> Iterator[Any]:
    """The values of a list column of a ``datasets.Dataset``, as one numpy array a chunk."""
    for chunk in column.chunks:
        yield chunk.flatten().to_numpy(zero_copy_only=False)
