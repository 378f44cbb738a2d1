"""The engine's step, and its states by parameter name: as a checkpoint of Packtrain's own holds them.

DeepSpeed keeps fp32 weights and AdamW's moments in flat tensors. Here each parameter finds its range of them, so that
a checkpoint is sharded, free of pickle and of the number of processes, and whole tensors can be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from packtrain.parallel.flat import FlatShard
from packtrain.parallel.updates import Named, Updates, set_learning_rate
from packtrain.parallel.zero.partition import held_range, is_partitioned, shard_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Range:
    """Where a parameter's elements lie in a flat fp32 tensor of this rank.

    Attributes:
        flat: what the optimizer updates; None where this rank holds nothing of the parameter.
        offset, count: the parameter's elements in it.
        start: the first of them in the parameter, flattened.
    """

    flat: torch.Tensor | None
    offset: int
    count: int
    start: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a tensor like ``flat``, (count,)."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.count]


class ZeroUpdates(Updates):
    """Args:
    named: what is trained.
    optimizer: AdamW, to whose groups the engine has given its flat tensors.
    engine: DeepSpeed's.
    """

    def __init__(self, named: Named, optimizer: torch.optim.Optimizer, engine: Any) -> None:
        super().__init__(named, optimizer)
        self.engine, self.zero = engine, engine.optimizer
        self.stage: int = engine.zero_optimization_stage()
        self.trained = {id(parameter) for _, parameter in named}
        self._set_step(0)  # stage 0 has made a step of zero gradients

    def apply(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        self.engine.step()

    def saved(self, parameter: Any) -> Any:
        if id(parameter) in self.trained:
            with self._in_memory(self._group(parameter)):
                return self._part(parameter)
        return shard_of(parameter) if is_partitioned(parameter) else parameter.detach()

    def state(self) -> dict[str, Any]:
        for flat in self._flats():
            self._allocate(flat)
        state: dict[str, Any] = {}
        for name, parameter in self.named:
            with self._in_memory(self._group(parameter)):
                state |= {key: self._part(parameter, moment) for key, moment in _keys(name)}
        steps = max((float(s["step"]) for s in self.optimizer.state.values() if s), default=0.0)
        state["optimizer/step"] = torch.tensor(steps, dtype=torch.float64)
        if self.engine.fp16_enabled():
            scaler = self.zero.loss_scaler  # a static one has a scale alone
            values = [float(getattr(scaler, key, 0)) for key in _SCALER]
            state["optimizer/loss_scale"] = torch.tensor(values, dtype=torch.float64)
        return state

    @torch.no_grad()
    def loaded(self, state: dict[str, Any]) -> None:
        if self.engine.fp16_enabled():
            for key, value in zip(_SCALER, state["optimizer/loss_scale"].tolist(), strict=True):
                if hasattr(self.zero.loss_scaler, key):
                    setattr(self.zero.loss_scaler, key, value if key == "cur_scale" else int(value))
        if self.stage == 0:
            for _, parameter in self.named:
                parameter.copy_(self._masters.get(id(parameter), parameter))
        elif self.stage < 3:
            self.zero.update_lp_params()
        else:
            for group in range(len(self.zero.fp16_groups)):
                with self._in_memory(group, write=True):
                    self._write_back(group, state)
                    self.zero._reassign_or_swap_out_partitioned_parameters(group)
            if kept := self.zero.persistent_parameters:
                kept[0].all_gather(kept)
        self._set_step(int(state["optimizer/step"]))

    def _part(self, parameter: nn.Parameter, moment: str | None = None) -> torch.Tensor:
        """This rank's part of a parameter's fp32 weights, or of one of AdamW's moments of it.

        In place, but for what is swapped to a disk: that is a copy, made while it is ``_in_memory``.
        """
        place = self._range(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if place.flat is None:
            return FlatShard(shape, 0, torch.empty(0, device=next(iter(self._flats())).device))
        if self.stage == 0:
            return (place.flat if moment is None else self.optimizer.state[place.flat][moment]).detach()
        whole = place.flat if moment is None else self.optimizer.state[place.flat].get(moment)
        if whole is None:  # swapped out before a first step: there are no moments yet
            return FlatShard(shape, place.start, torch.zeros(place.count))
        local = place.of(whole)
        return FlatShard(shape, place.start, local.clone() if self._is_swapped(self._group(parameter)) else local)

    def _write_back(self, group: int, state: dict[str, Any]) -> None:
        """Copy what ``state`` gave of a swapped group, and loading has changed, to where it came from."""
        if not self._is_swapped(group):
            return
        for name, parameter in self.named:
            if self._group(parameter) != group:
                continue
            place = self._range(parameter)
            assert place.flat is not None
            self._allocate(place.flat)
            for key, moment in _keys(name):
                place.of(place.flat if moment is None else self.optimizer.state[place.flat][moment]).copy_(
                    state[key].local
                )

    def _group(self, parameter: Any) -> int:
        """Stage 3: the sub-group of a parameter."""
        return int(self.zero.grad_position[self.zero.get_param_id(parameter)][0]) if self.stage == 3 else 0

    def _is_swapped(self, group: int) -> bool:
        return bool(self.stage == 3 and self.zero._swappable_optimizer_subgroup(group))

    @contextmanager
    def _in_memory(self, group: int, write: bool = False) -> Iterator[None]:
        """Read a swapped sub-group from the disk; ``write``: and back to it afterwards."""
        if not self._is_swapped(group):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if write:
            self.zero._optimizer_states_and_gradient_swap_out(group)
        else:
            self.zero._release_swap_buffers(group)

    def _range(self, parameter: Any) -> Range:
        if self.stage == 0:
            return Range(self._masters.get(id(parameter), parameter), 0, parameter.numel(), 0)
        if self.stage < 3:
            group, offset = self._offsets[id(parameter)]
            flat = self.zero.single_partition_of_fp32_groups[group]
            first = dist.get_rank() * len(flat) - offset  # of this rank's flat tensor, counted in the parameter
            start, end = max(first, 0), min(first + len(flat), parameter.numel())
            return Range(flat, start - first, end - start, start) if start < end else Range(None, 0, 0, 0)
        group, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start, count = held_range(parameter)
        return Range(self.zero.fp32_partitioned_groups_flat[group], offset, count, start)

    @cached_property
    def _offsets(self) -> dict[int, tuple[int, int]]:
        """Stages 1 and 2: the group of each parameter, and where it begins in the group's flat tensor.

        Not DeepSpeed's own ``_hp_mapping``, which in 0.19.8 forgets that round-robin gradients change the order.
        """
        groups = zip(self.zero.round_robin_bit16_groups, self.zero.round_robin_bit16_offsets, strict=True)
        return {
            id(parameter): (group, offset)
            for group, (parameters, offsets) in enumerate(groups)
            for parameter, offset in zip(parameters, offsets, strict=True)
        }

    @cached_property
    def _masters(self) -> dict[int, torch.Tensor]:
        """Stage 0's fp32 copies by the id of what they stand for; none where the model itself is in fp32."""
        pairs = zip(getattr(self.zero, "fp16_groups", []), getattr(self.zero, "fp32_groups", []), strict=True)
        return {id(own): master for owns, masters in pairs for own, master in zip(owns, masters, strict=True)}

    def _flats(self) -> Iterable[torch.Tensor]:
        """Everything that the optimizer updates on this rank."""
        if self.stage == 0:
            masters = self._masters
            return [masters.get(id(parameter), parameter) for _, parameter in self.named]
        return self.zero.single_partition_of_fp32_groups if self.stage < 3 else self.zero.fp32_partitioned_groups_flat

    def _allocate(self, flat: torch.Tensor) -> None:
        """The states that an optimizer makes in its first step; of what is swapped out, when it is in memory."""
        if flat.numel() and not self.optimizer.state[flat]:
            moments = {moment: torch.zeros_like(flat) for moment in _MOMENTS}
            self.optimizer.state[flat] = {"step": self._step_of(0, flat), **moments}

    def _set_step(self, count: int) -> None:
        for flat, state in self.optimizer.state.items():
            if state:
                state["step"] = self._step_of(count, flat)

    def _step_of(self, count: int, flat: torch.Tensor) -> Any:
        """torch's AdamW counts in a tensor, DeepSpeed's in a number."""
        if isinstance(self.optimizer, torch.optim.AdamW):
            return torch.tensor(float(count), dtype=torch.float32, device=flat.device)
        return count


def _keys(name: str) -> list[tuple[str, str | None]]:
    """What a checkpoint calls a parameter's weights (None) and its moments."""
    return [(f"model/{name}", None), *((f"optimizer/{name}/{moment}", moment) for moment in _MOMENTS)]
