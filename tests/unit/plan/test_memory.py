"""The estimate of a GPU's memory against what was measured: never below it, and not far above."""

from __future__ import annotations

from typing import Any

import pytest

from packtrain.config import Recipe, build_recipe
from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.resolve import resolve
from packtrain.plan.memory import choose, total

GIB = 2**30
H200 = Facts(1, 1, "cuda", 1, int(139.8 * GIB), True, 16, ModelFacts(8.03e9, 32, 4096, 14336, 128256, 8192))  # type: ignore[arg-type]

# Llama-3-8B's shape, rows of 4,096: settings, micro-batch, recompute, measured GiB (benchmarks/results.csv)
MEASURED: dict[str, tuple[dict[str, Any], int, float, float]] = {
    "lora": ({"method": {"type": "lora"}}, 4, 0.0, 90.1),
    "lora, recompute": ({"method": {"type": "lora"}}, 2, 1.0, 19.7),
    "qlora": ({"method": {"type": "qlora"}}, 4, 0.0, 80.8),
    "qlora, recompute": ({"method": {"type": "qlora"}}, 2, 1.0, 10.4),
    "full": ({"method": {"type": "full"}, "parallel": {"strategy": "fsdp"}}, 2, 1.0, 123.6),
    "full, small states": (
        {"method": {"type": "full"}, "train": {"optimizer": "adamw_8bit", "master_weights": "bf16"}}, 2, 1.0, 45.5,
    ),
}  # fmt: skip


def recipe(sections: dict[str, Any], facts: Facts = H200) -> Recipe:
    values = {"model": {"path": "m"}, "data": {"train": ["d"], "max_length": 4096}, **sections}
    values["train"] = {"batch_size": 4, **values.get("train", {})}
    return resolve(build_recipe(values), facts)


@pytest.mark.parametrize("name", MEASURED)
def test_estimate_is_not_below_what_was_measured(name: str) -> None:
    sections, micro, recompute, measured = MEASURED[name]
    found = total(recipe(sections), H200, micro, recompute) / GIB
    assert measured <= found <= measured + 6


def test_each_saving_saves() -> None:
    def peak(**sections: Any) -> float:
        return total(recipe({"method": {"type": "full"}, **sections}), H200, 1, 1.0) / GIB

    plain = peak(parallel={"strategy": "fsdp"})
    smaller = [
        peak(parallel={"strategy": "fsdp"}, train={"optimizer": "adamw_bf16"}),
        peak(parallel={"strategy": "fsdp"}, train={"optimizer": "adamw_8bit"}),
        peak(parallel={"strategy": "fsdp", "offload": "optimizer"}),
        peak(parallel={"strategy": "fsdp", "offload": "params"}),
    ]
    assert [plain, *smaller] == sorted([plain, *smaller], reverse=True)
    assert smaller[-1] < 12  # what is left are activations and the blocks that run


def test_a_card_is_filled_by_less_recompute_first() -> None:
    small = Facts(**{**vars(H200), "memory": 24 * GIB})
    choice = choose(recipe({"method": {"type": "qlora"}}, small), small)
    assert choice.recompute < 1.0 or choice.micro_batch_size > 1
    assert choose(recipe({"method": {"type": "qlora"}}), H200).recompute == 0.0
