"""Every way to spread a model gives the single process's losses and gradient norms.

Labels are as uneven as 1 to 61 a row, rows divide by nothing, and the oracle accumulates nothing, recomputes
nothing and packs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.jobs import train_recipes
from tests.parity import ADAPTERS, LABELS, METHODS, WORLDS, Case, assert_equal, make_case
from tests.ranks import run_ranks
from tests.tiny import SHAPES, make_model, values, write_uneven_rows


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def expected(case: Case) -> dict[str, Any]:
    plain = {name: case.recipe(s, data={"eval": 0.1}) for name, s in (METHODS | ADAPTERS).items()}
    return run_ranks(1, train_recipes, plain)[0]


def compare(case: Case, expected: dict[str, Any], world: str, methods: dict[str, dict[str, Any]]) -> None:
    """Each method spread over a world, with one forward pass a step and with three and recompute."""
    recipes = {f"{m}; {n}": case.spread(s, world, n) for m, s in methods.items() for n in (1, 3)}
    by_rank = run_ranks(WORLDS[world][0], train_recipes, recipes)
    assert all(found == by_rank[0] for found in by_rank), "ranks disagree"
    for name, found in by_rank[0].items():
        assert_equal(found, expected[name.split(";")[0]], 1e-4 if "qlora" in name else 1e-5, name)


@pytest.mark.parametrize("world", WORLDS)
def test_spread_equals_single(case: Case, expected: dict[str, Any], world: str) -> None:
    compare(case, expected, world, METHODS)


@pytest.mark.parametrize("world", [pytest.param("ddp 2", marks=pytest.mark.slow), "fsdp 2", "hsdp 2x2"])
def test_adapters_spread_equal_single(case: Case, expected: dict[str, Any], world: str) -> None:
    compare(case, expected, world, ADAPTERS)


def test_accumulation_and_recompute_on_one_process(case: Case, expected: dict[str, Any]) -> None:
    tried = {"full, accumulation 3": case.recipe(METHODS["full"], data={"eval": 0.1}, train={"micro_batch_size": 3})}
    for recompute in ("selective", 0.5):
        for method in ("full", "prefix", "qlora"):
            section = (METHODS | ADAPTERS)[method]
            tried[f"{method}, {recompute}"] = case.recipe(
                section, data={"eval": 0.1}, parallel={"recompute": recompute}
            )
    for name, found in run_ranks(1, train_recipes, tried)[0].items():
        assert_equal(found, expected[name.split(",")[0]], name=name)


OFFLOADS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "optimizer"}, "params": {"offload": "params"},
    "activations": {"offload_activations": True},
}  # fmt: skip


def test_offload_changes_nothing(case: Case, expected: dict[str, Any]) -> None:
    methods = {m: (METHODS | ADAPTERS)[m] for m in ("full", "qlora", "full, tokens", "full, 8 bit")}
    recipes = {
        f"{m}; {o}": case.spread(s, "fsdp 2", 3, **how) for m, s in methods.items() for o, how in OFFLOADS.items()
    }
    for name, found in run_ranks(2, train_recipes, recipes)[0].items():
        assert_equal(found, expected[name.split(";")[0]], 1e-4 if "qlora" in name else 1e-5, name)


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
                common = {**METHODS[method], "train": one_batch}
                plain[name] = values(model, data, data={"eval": 0.1}, **common)
                spread[name] = values(
                    model, data, data={"eval": 0.1, "packing": True},
                    parallel={"strategy": "fsdp", "shard_size": 2}, **common,
                )  # fmt: skip
    wanted, found = run_ranks(1, train_recipes, plain)[0], run_ranks(2, train_recipes, spread)[0]
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert_equal(found[name], wanted[name])
