"""Every rule of the table: what breaks it, what does not, and that its mend as settings mends it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from packtrain.config import Recipe, build_recipe
from packtrain.config.edits import with_edits
from packtrain.config.facts import Facts, Host, Linear, ModelFacts
from packtrain.config.resolve import resolve
from packtrain.config.rule import Finding
from packtrain.config.rules import RULES, check

Sections = dict[str, dict[str, Any]]
MODEL = ModelFacts(8_000_000_000, 32, 4096, 14336, 128256, 8192)
GPU_HOST = Host(4, "580.65.06", "13.0", "12.8", "2.27.3", "2.27.3")
GPUS = Facts(4, 4, "cuda", 4, 80 * 2**30, True, 16, MODEL, host=GPU_HOST)
CPU = Facts(2, 2, "cpu", 0, 80 * 2**30, True, 16, MODEL, host=Host())
OLD_GPUS = replace(GPUS, bf16=False)
OLD_CPU = replace(CPU, bf16=False)
EXPERTS = replace(GPUS, model=replace(MODEL, num_experts=8))
LINEARS = (Linear("self_attn.q_proj", 4096, 4096), Linear("mlp.down_proj", 4096, 14336))
TWO_NODES = replace(GPUS, processes=8)


def model(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, model=replace(facts.model, **changes))


def host(facts: Facts, **changes: Any) -> Facts:
    assert facts.host
    return replace(facts, host=replace(facts.host, **changes))


def recipe(sections: Sections) -> Recipe:
    given: Sections = {"model": {"path": "m"}, "data": {"train": ["d"]}}
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return build_recipe(given)


def zero(**parallel: Any) -> Sections:
    return {"parallel": {"strategy": "deepspeed", **parallel}}


Case = tuple[Sections, Facts]
PREFIX: Sections = {"method": {"type": "prefix"}}
QLORA: Sections = {"method": {"type": "qlora"}}
DISK = {"zero_stage": 3, "offload": "optimizer", "offload_dir": "/nvme"}
BREAKS: dict[str, list[Case]] = {
    "driver-old": [({}, host(GPUS, driver_cuda="11.4")), ({}, host(replace(CPU, host=GPU_HOST), driver_cuda="11.4"))],
    "torch-blind": [({}, host(CPU, gpus=2)), ({}, replace(CPU, host=GPU_HOST))],
    "nccl-other": [({}, host(GPUS, nccl="2.19.3"))],
    "shared-memory": [({}, host(GPUS, shared_memory=64 * 2**20))],
    "compile": [
        ({"parallel": {"compile": True}}, host(GPUS, c_compiler=False)),
        ({"parallel": {"compile": True}}, host(CPU, cxx_compiler=False)),
        ({"parallel": {"compile": True}}, host(GPUS, python_headers=False)),
    ],
    "uncompiled": [({}, host(GPUS, c_compiler=False))],
    "kernels": [(QLORA, host(GPUS, c_compiler=False))],
    "deepspeed-compiler": [
        (zero(), host(CPU, cxx_compiler=False)), (zero(**DISK), host(GPUS, cxx_compiler=False)),
        (zero(), host(CPU, python_headers=False)),
    ],
    "bitsandbytes": [(QLORA, host(CPU, bitsandbytes=False))],
    "host-name": [({}, host(TWO_NODES, resolves=False))],
    "cuda-absent": [({"launch": {"device": "cuda"}}, CPU)],
    "processes": [
        ({}, replace(GPUS, processes=5, local_processes=5)),
        ({"launch": {"gpus": 8}}, replace(GPUS, processes=8, local_processes=8)),
    ],
    "gpus": [
        ({"launch": {"gpus": 2, "device": "cpu"}}, CPU), ({"launch": {"gpus": 2}}, CPU),
        ({"launch": {"gpus": [0, 0]}}, GPUS), ({"launch": {"gpus": [0, 4]}}, GPUS),
        ({"launch": {"gpus": 2, "processes": 4}}, GPUS),
    ],
    "single": [({"parallel": {"strategy": "single"}}, GPUS)],
    "shard-size": [({"parallel": {"shard_size": size}}, GPUS) for size in (3, 5, 64)],
    "shard-strategy": [({"parallel": {"strategy": "ddp", "shard_size": 2}}, GPUS)],
    "bf16-absent": [
        ({"train": {"precision": "bf16"}}, OLD_GPUS), ({"train": {"precision": "bf16"}, **zero()}, OLD_GPUS),
        ({"train": {"precision": "bf16"}, **zero(zero_stage=0)}, OLD_GPUS),
    ],
    "bf16-slow": [
        ({"train": {"precision": "bf16"}}, OLD_CPU),
        ({"train": {"precision": "bf16", "master_weights": "bf16"}}, OLD_CPU),
    ],
    "bf16-still": [({"train": {"master_weights": "bf16", "rounding": "nearest", "learning_rate": 1e-5}}, GPUS)],
    "bf16-weights": [
        ({"train": {"master_weights": "bf16", "precision": "fp32"}}, GPUS),
        ({"train": {"master_weights": "bf16"}}, OLD_CPU),
    ],
    "rounding": [({"train": {"rounding": "kahan"}}, GPUS)],
    "freeze-what": [
        ({"method": {"type": "freeze"}}, GPUS),
        ({"method": {"type": "freeze", "freeze_first": 1, "trainable": ["head"]}}, GPUS),
    ],
    "freeze-too-many": [({"method": {"type": "freeze", "freeze_first": 33}}, GPUS)],
    "trainable": [
        ({"method": {"type": "freeze", "trainable": ["head", name]}}, GPUS)
        for name in ("foo", "blocks.32", "blocks.5-2", "blocks.30-40", "blocks.", "blocks.1-", "blocks.-1")
    ],
    "targets": [
        ({"method": {"targets": ["q_proj", name]}}, model(GPUS, linears=LINEARS))
        for name in ("foo_proj", "lm_head", "proj", "qproj", "")
    ],
    "adapter-blocks": [({"method": {"type": "llama_adapter", "adapter_blocks": 33}}, GPUS)],
    "pissa-dora": [({"method": {"start": "pissa", "dora": True}}, GPUS)],
    "llama-adapter": [
        ({"method": {"type": "llama_adapter"}}, model(GPUS, type="qwen3")),
        ({"method": {"type": "llama_adapter"}}, model(GPUS, even_heads=False)),
    ],
    "prefix-window": [
        (PREFIX, model(GPUS, sliding_window=4096)),
        ({"method": {"type": "prefix", "virtual_tokens": 60}}, model(GPUS, sliding_window=64)),
    ],
    "also-train": [
        ({"method": {"type": "full", "also_train": ["head"]}}, GPUS),
        ({"method": {"type": "freeze", "freeze_first": 1, "also_train": ["head"]}}, GPUS),
    ],
    "quantize": [
        ({"method": {"quantize": "int8"}}, GPUS), ({"method": {"type": "full", "double_quant": True}}, GPUS),
    ],
    "method-unused": [({"method": {"type": "full", "rank": 8, "virtual_tokens": 5}}, GPUS)],
    "deepspeed-missing": [(zero(), replace(GPUS, deepspeed=False))],
    "deepspeed-unused": [
        ({"parallel": {"zero_stage": 2}}, GPUS), ({"parallel": {"zero_stage": 2}}, replace(GPUS, deepspeed=False)),
        ({"parallel": {"strategy": "fsdp", "offload_dir": "/nvme"}}, GPUS),
        ({"parallel": {"strategy": "ddp", "offload": "optimizer", "offload_dir": "/nvme"}}, GPUS),
        ({"parallel": {"strategy": "fsdp", "deepspeed_config": {"steps_per_print": 1}}}, GPUS),
    ],
    "zero-offload": [
        (zero(zero_stage=0, offload="optimizer"), GPUS), (zero(zero_stage=0, offload="params"), GPUS),
        (zero(zero_stage=2, offload="params"), GPUS),
    ],
    "zero-disk": [
        (zero(zero_stage=3, offload_dir="/nvme"), GPUS), (zero(**{**DISK, "zero_stage": 2}), GPUS),
        (zero(**DISK, deepspeed_config={"zero_optimization": {"sub_group_size": 1e9}}), GPUS),
    ],
    "zero-experts": [(zero(zero_stage=3), EXPERTS), (zero(offload="params"), EXPERTS), (zero(**DISK), EXPERTS)],
    "zero-optimizer": [
        ({**zero(), "train": {"optimizer": "adamw_8bit"}}, GPUS),
        ({**zero(), "train": {"master_weights": "bf16"}}, GPUS),
    ],
    "zero-compile": [(zero(zero_stage=3, compile=True), GPUS)],
    "fp16": [
        ({"train": {"precision": "fp16"}}, GPUS), ({"train": {"precision": "fp16"}}, OLD_GPUS),
        ({"train": {"precision": "fp16"}, **zero(zero_stage=0)}, GPUS),
        ({"train": {"precision": "fp16"}, **zero(zero_stage=0)}, OLD_GPUS),
        ({"train": {"precision": "fp16"}, **zero(zero_stage=2)}, OLD_CPU),
    ],
    "offload-strategy": [({"parallel": {"strategy": "ddp", "offload": "params"}}, GPUS)],
    "offload-weights": [({"parallel": {"offload": "optimizer"}, "train": {"master_weights": "bf16"}}, GPUS)],
    "offload-activations": [({"parallel": {"offload_activations": True, "recompute": "none"}}, GPUS)],
    "micro-batch": [({"train": {"micro_batch_size": 32}}, GPUS)],
    "batch-size": [({"train": {"batch_size": 15}}, GPUS)],
    "too-long": [
        ({"data": {"max_length": 9000}}, GPUS), ({"data": {"max_length": 8192}, **PREFIX}, GPUS),
        ({"data": {"max_length": 64}, "method": {"type": "prefix", "virtual_tokens": 60}}, model(GPUS, max_length=64)),
    ],
}  # fmt: skip
HOLDS: dict[str, list[Case]] = {
    "trainable": [
        ({"method": {"type": "freeze", "trainable": ["embedding", "norm", "head", "blocks.0", "blocks.30-31"]}}, GPUS),
        ({"method": {"type": "lora", "trainable": ["foo"]}}, GPUS),  # `method-unused` says it
    ],
    "targets": [
        ({"method": {"targets": [name]}}, model(GPUS, linears=LINEARS))
        for name in ("q_proj", "self_attn.q_proj", "layers.0.mlp.down_proj")
    ] + [({"method": {"targets": ["any"]}}, GPUS), ({}, model(GPUS, linears=LINEARS))],
    "driver-old": [
        ({}, host(GPUS, driver_cuda="12.0", torch_cuda="12.8")), ({}, host(GPUS, torch_cuda="")), ({}, CPU),
        ({"launch": {"device": "cpu"}}, host(replace(CPU, host=GPU_HOST), driver_cuda="11.4")),
    ],
    "torch-blind": [
        ({}, GPUS), ({}, CPU), ({"launch": {"device": "cpu"}}, host(CPU, gpus=2)),
        ({}, host(replace(CPU, host=GPU_HOST), driver_cuda="11.4")),
    ],
    "nccl-other": [({}, host(GPUS, torch_nccl="")), ({}, host(CPU, nccl="2.19.3")),
                   ({}, host(replace(GPUS, processes=1, local_processes=1), nccl="2.19.3"))],
    "shared-memory": [
        ({}, host(GPUS, shared_memory=2**30)), ({}, host(CPU, shared_memory=0)),
        ({}, host(replace(GPUS, processes=1, local_processes=1), shared_memory=0)),
    ],
    "compile": [({}, host(GPUS, c_compiler=False)), ({"parallel": {"compile": True}}, host(GPUS, cxx_compiler=False)),
                ({"parallel": {"compile": True}}, replace(GPUS, host=None))],
    "uncompiled": [({}, host(CPU, c_compiler=False)), ({"parallel": {"compile": False}}, host(GPUS, c_compiler=False))],
    "kernels": [(QLORA, GPUS), (QLORA, host(CPU, c_compiler=False)), ({}, host(GPUS, c_compiler=False))],
    "deepspeed-compiler": [(zero(), host(GPUS, cxx_compiler=False)), ({}, host(CPU, cxx_compiler=False))],
    "bitsandbytes": [
        (QLORA, host(GPUS, bitsandbytes=False)), ({}, host(CPU, bitsandbytes=False)),
        ({"method": {"type": "qlora", "quantize": "int8"}}, host(CPU, bitsandbytes=False)),
    ],
    "host-name": [({}, host(GPUS, resolves=False)), ({}, TWO_NODES)],
    "shard-size": [({"parallel": {"shard_size": 2}}, GPUS)],
    "batch-size": [({"train": {"batch_size": 16}}, GPUS)],
    "bf16-still": [({"train": {"master_weights": "bf16", "rounding": "kahan", "learning_rate": 1e-5}}, GPUS)],
    "zero-experts": [(zero(zero_stage=2), EXPERTS)],
}  # fmt: skip


def found(rule: str, case: Case) -> list[Finding]:
    return [finding for finding in check(recipe(case[0]), case[1]) if finding.rule == rule]


BROKEN = [(rule, case) for rule, cases in BREAKS.items() for case in cases]
NAMES = [f"{rule} {number}" for rule, cases in BREAKS.items() for number, _ in enumerate(cases)]


def test_every_rule_has_its_own_name_and_is_broken_here() -> None:
    names = [rule.id for rule in RULES]
    assert len(set(names)) == len(names) and set(names) == set(BREAKS)
    assert all(rule.meaning for rule in RULES)


@pytest.mark.parametrize(("rule", "case"), BROKEN, ids=NAMES)
def test_a_broken_rule_says_what_and_what_mends_it(rule: str, case: Case) -> None:
    (one,) = found(rule, case)
    assert one.message and one.mend and not (one.message + one.mend).count("\n")
    assert not one.mend.endswith(".") and one.sentence == f"{one.setting}: {one.message}; {one.mend}."


@pytest.mark.parametrize(("rule", "case"), BROKEN, ids=NAMES)
def test_edits_mend_their_rule(rule: str, case: Case) -> None:
    (one,) = found(rule, case)
    if one.edits:
        facts = case[1]
        mended = with_edits(recipe(case[0]), one.edits)
        processes = mended.launch.processes
        if "launch.processes" in one.edits and isinstance(processes, int):  # what the facts follow from
            facts = replace(facts, processes=processes, local_processes=processes)
        assert not [left for left in check(mended, facts) if left.rule == rule]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_table_says_which_rules_have_edits(rule: Any) -> None:
    edits = {bool(one.edits) for case in BREAKS[rule.id] for one in found(rule.id, case)}
    assert edits == {"yes": {True}, "no": {False}, "sometimes": {True, False}}[rule.fix]


HOLDING = [(rule, case) for rule, cases in HOLDS.items() for case in cases]


@pytest.mark.parametrize(("rule", "case"), HOLDING, ids=lambda value: value if isinstance(value, str) else "")
def test_what_breaks_no_rule(rule: str, case: Case) -> None:
    assert found(rule, case) == []


@pytest.mark.parametrize("facts", [GPUS, CPU, OLD_GPUS, OLD_CPU, EXPERTS, TWO_NODES])
def test_a_plain_recipe_breaks_none(facts: Facts) -> None:
    assert check(recipe({}), facts) == []


PARTS: tuple[tuple[Sections, ...], ...] = (
    ({}, {"method": {"type": "full", "rank": 4}}, {"method": {"double_quant": True}}, PREFIX, QLORA),
    (
        {}, {"parallel": {"strategy": "single", "offload": "optimizer"}}, {"parallel": {"shard_size": 3}},
        {"parallel": {"strategy": "ddp", "shard_size": 2, "zero_stage": 3, "offload_dir": "/nvme"}}, zero(**DISK),
        zero(zero_stage=0, offload="params", compile=True), zero(zero_stage=1, offload_dir="/nvme"),
        {"parallel": {"offload_activations": True, "recompute": "none", "zero_stage": 2}},
    ),
    (
        {}, {"train": {"precision": "bf16", "master_weights": "bf16", "rounding": "nearest", "learning_rate": 1e-6}},
        {"train": {"precision": "fp16", "optimizer": "adamw_8bit", "rounding": "kahan"}},
        {"train": {"precision": "fp32", "master_weights": "bf16", "batch_size": 3, "micro_batch_size": 8}},
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "facts", [GPUS, CPU, OLD_GPUS, OLD_CPU, EXPERTS], ids=["gpus", "cpu", "old", "slow", "experts"]
)
def test_mends_of_any_combination_come_to_an_end(facts: Facts) -> None:
    """Each mend may bring up the next, but none brings back what another one mended."""
    for parts in itertools.product(*PARTS):
        made, rounds = recipe({name: section for part in parts for name, section in part.items()}), 0
        while edits := next((finding.edits for finding in check(made, facts) if finding.edits), None):
            made, rounds = with_edits(made, edits), rounds + 1
            assert rounds < 20, (parts, edits)
        assert {finding.rule for finding in check(made, facts)} <= {"bf16-slow"}, parts


def test_a_model_of_too_few_positions_is_told_by_its_name() -> None:
    for sections, mend in (({}, "choose a model of more positions"), (PREFIX, "lower method.virtual_tokens")):
        given = recipe({**sections, "data": {"max_length": 8}})
        (found,) = [one for one in check(given, model(GPUS, max_length=4)) if one.rule == "too-long"]
        assert found.mend == mend


def test_auto_compiles_where_there_is_a_compiler() -> None:
    assert resolve(recipe({}), GPUS).parallel.compile is True
    assert resolve(recipe({}), host(GPUS, c_compiler=False)).parallel.compile is False
    assert resolve(recipe({}), host(GPUS, python_headers=False)).parallel.compile is False
