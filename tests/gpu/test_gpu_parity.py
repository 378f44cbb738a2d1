"""On a GPU: the same numbers as on the CPU, and as each other, whatever the kernels and the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import steps_of
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_uneven_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
LABELS = [1, 61, 2, 40, 1, 1, 7, 33, 5, 61, 1, 2, 3]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("gpu")
    return make_model(folder / "model"), f"{write_uneven_rows(folder / 'rows.py', LABELS)}:rows"


def losses(case: tuple[Path, str], device: str, strategy: str = "single", **sections: Any) -> list[float]:
    sections.setdefault("parallel", {})["strategy"] = strategy
    recipe = values(*case, launch={"device": device}, **sections)
    return [loss for loss, _ in run_ranks(1, steps_of, recipe, device=device)[0]]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_fp32_losses_are_those_of_the_cpu(case: tuple[Path, str], method: str, strategy: str) -> None:
    expected = losses(case, "cpu", method={"type": method})
    assert losses(case, "cuda", strategy, method={"type": method}) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sections", [
    {"parallel": {"compile": True}}, {"parallel": {"recompute": "full"}}, {"parallel": {"recompute": "selective"}},
    {"parallel": {"recompute": 0.5, "compile": True}},
])  # fmt: skip
def test_compile_and_recompute_change_nothing(case: tuple[Path, str], sections: dict[str, Any]) -> None:
    expected = losses(case, "cpu", method={"type": "lora"})
    assert losses(case, "cuda", method={"type": "lora"}, **sections) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_packed_bf16_is_near_fp32(case: tuple[Path, str], strategy: str) -> None:
    """The variable-length kernel computes in bf16; three significant digits are what that leaves."""
    expected = losses(case, "cpu", data={"packing": True})
    found = losses(case, "cuda", strategy, data={"packing": True}, train={"precision": "bf16"})
    assert found == pytest.approx(expected, rel=5e-3)
