"""The plan of a GPU's memory beside every peak that was measured, and what is known without measuring."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.plan.measured import GIB, LLAMA_3B, LLAMA_8B, LLAMA_70B, asked, gpus, measured, recipe_for

from packtrain.config.facts import Facts
from packtrain.plan.memory import peak, recomputed_share, total
from packtrain.plan.rank import rank, usable

RUNS = list(measured())


def planned(facts: Facts, micro: int = 1, share: float = 1.0, **sections: dict[str, Any]) -> float:
    return total(recipe_for(facts, **sections), facts, micro, share) / GIB


def test_there_is_something_to_compare_with() -> None:
    assert len(RUNS) >= 24


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_measured_peak_was_foreseen(run: Any) -> None:
    """Within a twentieth, and never so far below that a plan that fits would run out."""
    share, micro = recomputed_share(run.recompute), run.recipe.train.micro_batch_size
    found = total(run.recipe, run.facts, micro, share) / GIB
    assert found == pytest.approx(run.gib, rel=0.05)
    assert found * 1.05 + 1 >= run.gib


def test_terms_are_the_sum() -> None:
    for run in RUNS:
        one = peak(run.recipe, run.facts, 1, 0.0)
        assert one.total == sum(one.terms.values()) and min(one.terms.values()) >= 0


def test_shards_hold_their_part() -> None:
    """What is sharded over eight takes an eighth of what it takes on one."""
    one = peak(recipe_for(gpus(1, LLAMA_8B), parallel={"strategy": "fsdp"}), gpus(1, LLAMA_8B), 1, 1.0)
    eight = gpus(8, LLAMA_8B)
    found = peak(recipe_for(eight, parallel={"strategy": "fsdp"}), eight, 1, 1.0)
    for name in ("weights", "adapters", "optimizer_states"):
        assert found.terms[name] == pytest.approx(one.terms[name] / 8)
    assert found.terms["activations"] == one.terms["activations"]
    copies = peak(recipe_for(eight, parallel={"strategy": "ddp"}), eight, 1, 1.0)
    assert copies.terms["weights"] == one.terms["weights"]


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 2 + 2 + 12), (1, 2 + 2 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_what_each_stage_of_zero_keeps(stage: int, bytes_each: float) -> None:
    facts = gpus(8, LLAMA_8B)
    section = {"strategy": "deepspeed", "zero_stage": stage}
    one = peak(recipe_for(facts, method={"type": "full"}, parallel=section), facts, 1, 1.0)
    names = ("weights", "master_weights", "optimizer_states", "gradients")
    assert sum(one.terms[name] for name in names) == pytest.approx(LLAMA_8B.num_parameters * bytes_each, rel=1e-6)


def test_each_saving_saves() -> None:
    facts = gpus(1, LLAMA_8B)

    def found(**sections: Any) -> float:
        return planned(facts, method={"type": "full"}, **sections)

    fsdp = {"strategy": "fsdp"}
    plain = found(parallel=fsdp)
    smaller = [
        found(parallel=fsdp, train={"optimizer": "adamw_bf16"}),
        found(parallel=fsdp, train={"optimizer": "adamw_8bit"}),
        found(parallel=fsdp | {"offload": "optimizer"}),
        found(parallel=fsdp | {"offload": "params"}),
    ]
    assert [plain, *smaller] == sorted([plain, *smaller], reverse=True)
    assert smaller[-1] < 15  # what is left are activations, the tables and the blocks that run


def test_8b_full_with_fp32_masters_fits_one_card_of_139_gib() -> None:
    facts = gpus(1, LLAMA_8B)
    best = rank(asked(method={"type": "full"}), facts)[0]
    assert not best.refused and best.recipe.train.master_weights == "fp32"


def test_70b_with_16_bytes_a_parameter_does_not_fit_eight_cards() -> None:
    found = rank(asked(method={"type": "full"}), gpus(8, LLAMA_70B))
    assert all(one.refused for one in found)


def test_70b_qlora_fits_one_card() -> None:
    facts = gpus(1, LLAMA_70B)
    best = rank(asked(method={"type": "qlora"}), facts)[0]
    assert not best.refused and best.peak.total < usable(facts)


def test_lora_on_a_model_that_fits_is_replicated_not_sharded() -> None:
    for count in (2, 8):
        assert rank(asked(), gpus(count, LLAMA_8B))[0].recipe.parallel.strategy == "ddp"
    assert rank(asked(), gpus(8, LLAMA_70B))[0].recipe.parallel.strategy == "fsdp"


def test_a_card_is_filled_by_less_recompute_first() -> None:
    best = rank(asked(method={"type": "qlora"}), gpus(1, LLAMA_8B, 24))[0]
    assert not best.refused and 0 < recomputed_share(best.recipe.parallel.recompute) < 1
    assert rank(asked(method={"type": "qlora"}), gpus(1, LLAMA_8B))[0].recipe.parallel.recompute == 0.0


def test_what_the_recipe_says_is_kept() -> None:
    given = asked(parallel={"strategy": "fsdp", "recompute": "full"}, train={"micro_batch_size": 2, "batch_size": 16})
    for one in rank(given, gpus(8, LLAMA_3B)):
        assert one.recipe.parallel.strategy == "fsdp" and one.recipe.parallel.recompute == "full"
        assert one.recipe.train.micro_batch_size == 2
