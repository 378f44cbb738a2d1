"""Predicted tokens a second beside every rate that was measured, and FLOPs by plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.plan.measured import LLAMA_8B, calibrated, gpus, measured, of_shape, recipe_for

from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe
from packtrain.plan.memory import recomputed_share
from packtrain.plan.rates import has_bf16, known_gpus, published, published_memory
from packtrain.plan.speed import Speed, flops, speed

RUNS = list(measured())


def of(recipe: Recipe, facts: Facts, micro: int, recompute: float = 0.0) -> Speed:
    found = speed(recipe, facts, micro, recompute)
    assert found
    return found


def predicted(run: Any, facts: Facts | None = None) -> float:
    share, micro = recomputed_share(run.recompute), run.recipe.train.micro_batch_size
    return of(run.recipe, facts or run.facts, micro, share).tokens_per_second


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_measured_rate_was_foreseen(run: Any) -> None:
    assert predicted(run) == pytest.approx(run.tokens_per_second, rel=0.15)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_measured_rate_was_foreseen_after_a_calibration(run: Any) -> None:
    facts = calibrated(run)
    assert facts.rates != run.facts.rates
    assert predicted(run, facts) == pytest.approx(run.tokens_per_second, rel=0.15)


def test_auto_reached_the_best_setting_found_by_hand() -> None:
    """8B LoRA in one session on one H200 (benchmarks/plan_session.sh)."""
    session = {
        run.name: run.tokens_per_second for run in RUNS if "(69f0f5f)" in run.name and run.facts.model.hidden == 4096
    }
    by_hand = [rate for name, rate in session.items() if "by hand" in name]
    (auto,) = (rate for name, rate in session.items() if "auto" in name)
    assert len(by_hand) >= 2 and auto >= 0.97 * max(by_hand)


def test_the_order_of_settings_is_right() -> None:
    """Of pairs that differ by a twentieth or more, 49 in 50 come out in the right order: a ranking rests on it."""
    same = [run for run in RUNS if run.facts.model is LLAMA_8B and run.full_rows]
    pairs = [(a, b) for a in same for b in same if a.tokens_per_second > 1.05 * b.tokens_per_second]
    right = sum(predicted(a) > predicted(b) for a, b in pairs)
    assert len(pairs) > 50 and right >= 0.98 * len(pairs)


def test_flops_of_a_token() -> None:
    """8B: 6.98 billion weights in the blocks' linears, 0.525 in the head; attention of 4,096 tokens by 4,096 / 2."""
    facts = gpus(1, LLAMA_8B)
    inside, head = 6_979_321_856, 128256 * 4096
    attention = 2 * 2 * 4096 / 2 * 4096 * 32
    full = flops(recipe_for(facts, method={"type": "full"}), LLAMA_8B, 0.0)
    assert full.linears == pytest.approx(6 * inside) and full.head == 6 * head
    assert full.attention == pytest.approx(3.5 * attention)
    lora = flops(recipe_for(facts, method={"type": "lora", "rank": 16}), LLAMA_8B, 0.0)
    assert lora.linears == pytest.approx(4 * inside + 6 * 41_943_040) and lora.head == 4 * head
    again = flops(recipe_for(facts, method={"type": "full"}), LLAMA_8B, 1.0)
    assert again.linears == pytest.approx(8 * inside) and again.attention == pytest.approx(4.5 * attention)
    freeze = flops(recipe_for(facts, method={"type": "freeze", "freeze_first": 16}), LLAMA_8B, 0.0)
    assert freeze.linears == pytest.approx((2 + 2 / 2 + 2 / 2) * inside)


def test_offload_wants_many_tokens_a_step() -> None:
    """8B with its optimizer in host memory: at about 150,000 tokens a step it costs about a quarter."""
    facts = gpus(1, LLAMA_8B)
    rows = 150_000 // 4096
    there, away = (
        of(
            recipe_for(facts, method={"type": "full"}, train={"batch_size": rows}, parallel=how), facts, 4
        ).tokens_per_second
        for how in ({"strategy": "fsdp"}, {"strategy": "fsdp", "offload": "optimizer"})
    )  # fmt: skip
    assert 0.70 < away / there < 0.85


def test_links_between_nodes_cost_more() -> None:
    near, far = gpus(16, LLAMA_8B), gpus(16, LLAMA_8B, nodes=2)
    rates = [
        of(recipe_for(facts, method={"type": "full"}, train={"batch_size": 16}), facts, 1)
        for facts in (near, far)
    ]  # fmt: skip
    assert rates[0].sent == rates[1].sent > 0
    assert rates[0].tokens_per_second > 2 * rates[1].tokens_per_second


def test_processes_without_rows_do_no_work() -> None:
    """Sixteen rows on 32 processes train no more tokens a second than on 16."""
    few, many = gpus(16, LLAMA_8B), gpus(32, LLAMA_8B)
    found = [
        of(recipe_for(facts, train={"batch_size": 16}), facts, 1).tokens_per_second * facts.processes
        for facts in (few, many)
    ]  # fmt: skip
    assert found[1] <= found[0]


def test_gpus_are_known_by_their_drivers_names() -> None:
    named = {
        "NVIDIA A100-SXM4-80GB": 80, "NVIDIA A100-SXM4-40GB": 40, "NVIDIA H100 80GB HBM3": 80, "NVIDIA L4": 24,
        "NVIDIA L40S": 48, "NVIDIA A10G": 24, "NVIDIA GeForce RTX 4090": 24, "Tesla T4": 16, "NVIDIA H200": 141,
        "NVIDIA H20": 96, "NVIDIA RTX A6000": 48,
    }  # fmt: skip
    for name, size in named.items():
        assert published_memory(name) == round(size * 0.99 * 2**30), name
    assert published("Voodoo 2") is published("") is None
    assert all(published(name) for name in known_gpus())
    assert published("L4000") is published("XT4") is None and published("NVIDIA A10G") == published("A10")
    assert has_bf16("NVIDIA L4") and has_bf16("Voodoo 2") and not has_bf16("Tesla V100-SXM2-32GB")


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-3-8b", 8.030),
        ("llama-3.2-3b", 3.213),
        ("llama-3.2-1b", 1.236),
        ("mistral-7b", 7.248),
        ("qwen2.5-3b", 3.086),
    ],
)
def test_shapes_of_benchmarks_are_those_of_the_models(shape: str, billions: float) -> None:
    """As their makers count them."""
    assert of_shape(shape).num_parameters == pytest.approx(billions * 1e9, abs=5e5)
    speed_of = of(recipe_for(gpus(1, of_shape(shape)), method={"type": "lora"}), gpus(1, of_shape(shape)), 1)
    assert 5_000 < speed_of.tokens_per_second < 200_000
