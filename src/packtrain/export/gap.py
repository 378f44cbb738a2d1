"""How far the logits of a merged model are from those of the model that was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from packtrain.config import Recipe
from packtrain.data.store import TokenStore
from packtrain.export.merge import Adapter
from packtrain.export.tensors import peft_key
from packtrain.models.causal_lm import CausalLMWithLoss
from packtrain.models.names import NEW_ROWS, is_adapter
from packtrain.parallel.world import World
from packtrain.train.build import DTYPES, Built, build


@dataclass(frozen=True)
class Gap:
    """Differences of logits over all positions of some rows.

    Attributes:
        mean, largest: of the absolute differences. spread: the standard deviation of the trained model's logits.
        same_choice: the share of positions where both put the same token first.
    """

    mean: float
    largest: float
    spread: float
    same_choice: float
    positions: int

    def __str__(self) -> str:
        return (
            f"its logits differ from the trained model's by {self.mean:.4f} on average and {self.largest:.3f} at most "
            f"(their spread is {self.spread:.2f}); both put the same token first at {self.same_choice:.1%} of "
            f"{self.positions:,} positions"
        )


def logit_gap(recipe: Recipe, run: Path, base: Path, merged: Path, world: World, rows: Sequence[torch.Tensor]) -> Gap:
    """Compare the merged model with the trained one, which is built again from the base and ``final/``.

    Args:
        rows: token ids, (seq,) int64 each.
    """
    trained = _trained_logits(recipe, run, base, world, rows)
    other = _plain_logits(merged, recipe, world, rows)
    total = largest = same = 0.0
    squares, count, positions = 0.0, 0, 0
    for ours, theirs in zip(trained, other, strict=True):
        difference = (ours - theirs).abs()
        total, largest = total + difference.sum().item(), max(largest, difference.max().item())
        squares += (ours - ours.mean()).square().sum().item()
        count += ours.numel()
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        positions += ours.shape[0]
    return Gap(total / count, largest, (squares / count) ** 0.5, same / positions, positions)


def first_rows(store: TokenStore, count: int, length: int) -> list[torch.Tensor]:
    """The first rows of prepared data, each cut to ``length`` tokens."""
    return [torch.tensor(store.tokens(i)[:length].tolist()) for i in range(min(count, len(store)))]


@torch.no_grad()
def _trained_logits(
    recipe: Recipe, run: Path, base: Path, world: World, rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    alone = recipe.model_copy(deep=True)
    alone.parallel.strategy, alone.parallel.shard_size, alone.parallel.compile = "single", 1, False
    alone.parallel.offload, alone.parallel.recompute, alone.data.packing = "none", "none", False
    built = build(alone, base, world, run)
    _fill_trained(built, Adapter.load(run / "final"))
    built.model.eval()
    found = []
    for row in rows:
        with torch.autocast(world.device.type, DTYPES[recipe.train.precision], recipe.train.precision != "fp32"):
            found.append(built.model.logits(row[None].to(world.device))[0].float().cpu())
    return found


def _fill_trained(built: Built, adapter: Adapter) -> None:
    """Copy what was saved into a model that was just built."""
    model: CausalLMWithLoss = built.model
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            saved = adapter.tensors[peft_key(name).removeprefix("base_model.model.")]
            if built.start is not None:  # PiSSA's export is twice as large: the trained part comes first
                saved = saved[: parameter.shape[0], : parameter.shape[1]]
            parameter.copy_(saved)
    for module, name in model.names.items():
        for leaf, parameter in module.named_parameters(recurse=False):
            saved_part = adapter.tensors.get(f"{name}.{leaf}")
            if saved_part is not None:
                parameter.copy_(saved_part[: len(parameter)])
        if built.added and f"{name}.weight" in adapter.tensors and hasattr(module, NEW_ROWS):
            rows = adapter.tensors[f"{name}.weight"][built.added.first : built.added.end]
            getattr(module, NEW_ROWS).copy_(rows)


@torch.no_grad()
def _plain_logits(merged: Path, recipe: Recipe, world: World, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dtype = DTYPES[recipe.train.precision]
    model: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=dtype, local_files_only=True)
    model = model.to(world.device).eval()
    return [model(input_ids=row[None].to(world.device)).logits[0].float().cpu() for row in rows]
