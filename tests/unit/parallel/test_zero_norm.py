"""What is asked of DeepSpeed's engine between the backward pass and the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packtrain.parallel.flat import FlatShard
from packtrain.parallel.world import World
from packtrain.parallel.zero.strategy import Zero


def strategy(stage: int, norms: list[float], scale: float = 1.0) -> Zero:
    """A strategy whose engine has gradients with these norms, a negative one where DeepSpeed found them not finite."""
    made = Zero.__new__(Zero)
    made.world, made.stage = World(0, 0, 1, 1, torch.device("cpu")), stage
    groups = [torch.tensor(norm) for norm in norms]
    optimizer: Any = SimpleNamespace(
        loss_scale=scale, _get_norm_groups=lambda: groups, scaled_global_norm=lambda: groups[0]
    )
    made.engine = SimpleNamespace(optimizer=optimizer)
    return made


def test_the_norm_is_that_of_all_groups_without_the_loss_scale() -> None:
    assert strategy(3, [3.0, 4.0], 2.0).clip([], 1.0).item() == pytest.approx(2.5)
    assert strategy(2, [8.0], 4.0).clip([], None).item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("stage", "norms"), [(1, [-1.0]), (2, [float("nan")]), (3, [2.0, -1.0]), (3, [float("nan"), 1.0])]
)
def test_a_norm_that_is_not_finite_is_infinite(stage: int, norms: list[float]) -> None:
    assert strategy(stage, norms).clip([], 1.0).item() == float("inf")


def test_a_part_of_a_tensor_has_no_arithmetic() -> None:
    part = FlatShard(torch.Size([2, 3]), 2, torch.arange(3.0))
    assert part.size() == torch.Size([6]) and repr(part) == "FlatShard((2, 3), 2:5)"
    assert torch.equal(part.full_tensor(), torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 0.0]]))
    with pytest.raises(NotImplementedError, match="full_tensor"):
        part + 1
