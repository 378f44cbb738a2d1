"""Python's garbage collector beside a loop that must not pause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_heap() -> Iterator[None]:
    """What exists now is not looked at by the garbage collector until the context ends; what is made inside is.

    Libraries and the model are half a million objects. A full collection walks them all, for a fifth of a second, at a
    step of its own choice on each rank, and the others wait for it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
