"""What was there before the loop is left alone, what the loop leaves behind is not."""

from __future__ import annotations

import gc
import weakref

import pytest

from packtrain.train.garbage import settled_heap


class Node:
    """Something that can be in a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_old_objects_are_left_alone_and_new_cycles_are_collected() -> None:
    old = Node()
    gone = weakref.ref(old)
    del old
    before = gc.get_freeze_count()
    with settled_heap():
        assert gone() is None  # garbage of before is not kept
        kept = len(gc.get_objects())
        assert gc.get_freeze_count() > before + 10 * kept and gc.isenabled()
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0 and len(gc.get_objects()) > kept


def test_the_heap_thaws_when_a_step_fails() -> None:
    with pytest.raises(KeyError), settled_heap():
        raise KeyError
    assert gc.get_freeze_count() == 0
