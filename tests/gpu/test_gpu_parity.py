"""On a GPU: the CPU's numbers, whatever the kernels, the strategy, compile and recompute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import train_recipes
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_uneven_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
LABELS = [1, 61, 2, 40, 1, 1, 7, 33, 5, 61, 1, 2, 3]
METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"}, "freeze": {"type": "freeze", "freeze_first": 2}, "lora": {"type": "lora", "rank": 4},
}  # fmt: skip
EXACT: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"}, "ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"},
    "compiled": {"compile": True}, "recompute": {"recompute": "full"}, "selective": {"recompute": "selective"},
    "compiled, half recomputed": {"compile": True, "recompute": 0.5},
    "fsdp, compiled, recomputed": {"strategy": "fsdp", "compile": True, "recompute": "full"},
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("gpu")
    return make_model(folder / "model"), f"{write_uneven_rows(folder / 'rows.py', LABELS)}:rows"


@pytest.fixture(scope="module")
def expected(case: tuple[Path, str]) -> dict[str, Any]:
    recipes = {m: values(*case, method=s) for m, s in METHODS.items()}
    recipes |= {f"{m}, packed": values(*case, method=s, data={"packing": True}) for m, s in METHODS.items()}
    return run_ranks(1, train_recipes, recipes)[0]


def losses(result: tuple[list[tuple[float, float]], Any]) -> list[float]:
    return [loss for loss, _ in result[0]]


def test_fp32_is_the_cpu_whatever_the_strategy(case: tuple[Path, str], expected: dict[str, Any]) -> None:
    recipes = {
        f"{method}; {name}": values(*case, method=section, parallel=parallel, launch={"device": "cuda"})
        for method, section in METHODS.items()
        for name, parallel in EXACT.items()
    }
    found = run_ranks(1, train_recipes, recipes, device="cuda")[0]
    for name, result in found.items():
        assert losses(result) == pytest.approx(losses(expected[name.split(";")[0]]), rel=1e-5), name


def test_packed_bf16_is_near_fp32(case: tuple[Path, str], expected: dict[str, Any]) -> None:
    """The variable-length kernel computes in bf16, which leaves about three digits."""
    recipes = {
        f"{method}; {strategy}, compile {compiled}": values(
            *case, method=section, data={"packing": True}, train={"precision": "bf16"}, launch={"device": "cuda"},
            parallel={"strategy": strategy, "compile": compiled},
        )
        for method, section in METHODS.items()
        for strategy in ("single", "fsdp")
        for compiled in (False, True)
    }  # fmt: skip
    found = run_ranks(1, train_recipes, recipes, device="cuda")[0]
    for name, result in found.items():
        wanted = losses(expected[f"{name.split(';')[0]}, packed"])
        assert losses(result) == pytest.approx(wanted, rel=5e-3), name
