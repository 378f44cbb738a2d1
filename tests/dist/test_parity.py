"""Every way to spread a model gives the single process's losses and gradient norms.

Labels are as uneven as 1 to 61 a row, rows divide by nothing, and the oracle accumulates nothing, recomputes
nothing and packs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import train_recipes
from tests.ranks import run_ranks
from tests.tiny import SHAPES, make_model, values, write_uneven_rows

LABELS = [1, 61, 2, 40, 1, 1, 7, 33, 5, 61, 1, 2, 3]
WORLDS = {
    "ddp 2": (2, "ddp", 1), "fsdp 2": (2, "fsdp", 2), "fsdp 4": (4, "fsdp", 4), "hsdp 2x2": (4, "fsdp", 2),
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "freeze": {"type": "freeze", "freeze_first": 2},
    "freeze named": {"type": "freeze", "trainable": ["blocks.1-2", "norm"]},
    "lora": {"type": "lora", "rank": 4},
    "lora variants": {"type": "lora", "rank": 4, "dora": True, "rslora": True, "lora_plus": 4.0, "targets": ["q_proj", "down_proj"]},
    "pissa": {"type": "lora", "rank": 4, "start": "pissa"},
}
ACCUMULATIONS = (1, 3)
BATCH = 8


def recipes(model: Path, data: str, size: int, strategy: str, shard_size: int) -> dict[str, dict[str, Any]]:
    found = {}
    for method, section in METHODS.items():
        for accumulation in ACCUMULATIONS:
            share = -(-BATCH // size)
            recompute = {1: "none", 3: "full"}[accumulation]
            found[f"{method}, accumulation {accumulation}"] = values(
                model, data, method=section, data={"eval": 0.1},
                parallel={"strategy": strategy, "shard_size": shard_size, "recompute": recompute},
                train={"batch_size": BATCH, "micro_batch_size": -(-share // accumulation)},
            )  # fmt: skip
    return found


def oracle(model: Path, data: str) -> dict[str, dict[str, Any]]:
    return {m: values(model, data, method=s, data={"eval": 0.1}) for m, s in METHODS.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("parity")
    return make_model(folder / "model"), f"{write_uneven_rows(folder / 'rows.py', LABELS)}:rows"


@pytest.fixture(scope="module")
def expected(case: tuple[Path, str]) -> dict[str, Any]:
    return run_ranks(1, train_recipes, oracle(*case))[0]


def assert_equal(found: Any, wanted: Any) -> None:
    """Within 1e-5, of the value where it is above 1: Gemma's LoRA has gradient norms of 0.07, whose last digits
    hang on AdamW's first steps along gradients of rounding size."""
    (steps, loss), (wanted_steps, wanted_loss) = found, wanted
    assert [s[0] for s in steps] == pytest.approx([s[0] for s in wanted_steps], rel=1e-5, abs=1e-5)
    assert [s[1] for s in steps] == pytest.approx([s[1] for s in wanted_steps], rel=1e-5, abs=1e-5)
    assert loss == pytest.approx(wanted_loss, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_spread_equals_single(case: tuple[Path, str], expected: dict[str, Any], world: str) -> None:
    size, strategy, shard_size = WORLDS[world]
    by_rank = run_ranks(size, train_recipes, recipes(*case, size, strategy, shard_size))
    assert all(found == by_rank[0] for found in by_rank), "ranks disagree"
    for name, found in by_rank[0].items():
        assert_equal(found, expected[name.split(",")[0]])


def test_accumulation_and_recompute_on_one_process(case: tuple[Path, str], expected: dict[str, Any]) -> None:
    tried = recipes(*case, 1, "single", 1)
    for recompute in ("selective", 0.5):
        tried[f"full, {recompute}"] = values(*case, data={"eval": 0.1}, parallel={"recompute": recompute})
    for name, found in run_ranks(1, train_recipes, tried)[0].items():
        assert_equal(found, expected[name.split(",")[0]])


def test_architectures(tmp_path: Path) -> None:
    """Packed and sharded over two processes against plain rows on one: tied and untied, full and LoRA."""
    data = f"{write_uneven_rows(tmp_path / 'rows.py', LABELS)}:rows"
    one_batch = {"batch_size": 100, "micro_batch_size": 100}  # so that packing changes no grouping
    plain, spread = {}, {}
    for shape in SHAPES:
        for tied in (False, True):
            model = make_model(tmp_path / f"{shape}-{tied}", shape, tied)
            for method in ("full", "lora"):
                name = f"{shape}, tied {tied}, {method}"
                common = {"method": METHODS[method], "train": one_batch}
                plain[name] = values(model, data, data={"eval": 0.1}, **common)
                spread[name] = values(
                    model, data, data={"eval": 0.1, "packing": True},
                    parallel={"strategy": "fsdp", "shard_size": 2}, **common,
                )  # fmt: skip
    wanted, found = run_ranks(1, train_recipes, plain)[0], run_ranks(2, train_recipes, spread)[0]
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert_equal(found[name], wanted[name])
