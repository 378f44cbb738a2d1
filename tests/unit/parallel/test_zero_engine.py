"""What is asked of DeepSpeed's engine: the norm before the step, the loss scale for a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packtrain.parallel.flat import FlatShard
from packtrain.parallel.world import World
from packtrain.parallel.zero.strategy import Zero
from packtrain.parallel.zero.updates import ZeroUpdates


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


def updates(scaler: SimpleNamespace) -> ZeroUpdates:
    """Updates of no parameters, under an engine with this loss scaler."""
    zero = SimpleNamespace(loss_scaler=scaler, single_partition_of_fp32_groups=[], update_lp_params=lambda: None)
    engine = SimpleNamespace(optimizer=zero, fp16_enabled=lambda: True, zero_optimization_stage=lambda: 2)
    return ZeroUpdates([], torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), engine)


def test_the_loss_scale_is_resumed() -> None:
    dynamic = SimpleNamespace(cur_scale=1024.0, cur_iter=7, last_overflow_iter=3, cur_hysteresis=2, dynamic=True)
    saved = {key: value.clone() for key, value in updates(dynamic).state().items()}
    fresh = SimpleNamespace(cur_scale=65536.0, cur_iter=0, last_overflow_iter=-1, cur_hysteresis=1, dynamic=True)
    resumed = updates(fresh)
    state = resumed.state()
    for key, value in state.items():
        value.copy_(saved[key])
    resumed.loaded(state)
    assert fresh == dynamic


def test_a_fixed_loss_scale_is_saved_too() -> None:
    fixed = updates(SimpleNamespace(cur_scale=128.0, dynamic=False))
    state = fixed.state()
    assert state["optimizer/loss_scale"][0] == 128.0
    fixed.loaded(state)
