"""What DeepSpeed cannot do is said before anything starts, with what can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packtrain.config import build_recipe, strategies
from packtrain.config.deepspeed import swap_folder
from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.resolve import resolve
from packtrain.config.rules import check

MODEL = ModelFacts(8_000_000_000, 32, 4096, 14336, 128256, 8192)
FACTS = Facts(4, 4, "cuda", 4, 80 * 2**30, True, 16, MODEL)


def recipe(parallel: dict[str, Any], **sections: Any) -> Any:
    values = {"model": {"path": "m"}, "data": {"train": ["d"]}, "method": {"type": "full"}, **sections}
    return build_recipe({**values, "parallel": {"strategy": "deepspeed", **parallel}})


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Facts, tuple[str, str, str]]] = {
    "missing": (
        {}, {}, replace(FACTS, deepspeed=False), ("parallel.strategy", "not installed", "packtrain[deepspeed]"),
    ),
    "experts": (
        {"zero_stage": 3}, {}, replace(FACTS, model=replace(MODEL, num_experts=8)),
        ("parallel.zero_stage", "8 experts", "parallel.zero_stage to 2"),
    ),
    "8-bit states": ({}, {"train": {"optimizer": "adamw_8bit"}}, FACTS, ("train.optimizer", "adamw_8bit", "adamw")),
    "bf16 weights": (
        {}, {"train": {"master_weights": "bf16"}}, FACTS, ("train.optimizer", "bf16", "train.master_weights to fp32"),
    ),
    "compiled": ({"zero_stage": 3, "compile": True}, {}, FACTS, ("parallel.compile", "ZeRO-3", "auto")),
    "fp16 at 0": (
        {"zero_stage": 0}, {"train": {"precision": "fp16"}}, FACTS, ("train.precision", "ZeRO-0", "zero_stage"),
    ),
    "fp16 elsewhere": (
        {"strategy": "fsdp"}, {"train": {"precision": "fp16"}}, FACTS, ("train.precision", "loss scaling", "bf16"),
    ),
    "a stage elsewhere": (
        {"strategy": "fsdp", "zero_stage": 2}, {}, FACTS, ("parallel.strategy", "zero_stage", "deepspeed"),
    ),
    "a disk at 2": (
        {"zero_stage": 2, "offload": "optimizer", "offload_dir": "/nvme"}, {}, FACTS,
        ("parallel.offload_dir", "ZeRO-2", "zero_stage to 3"),
    ),
    "a disk for nothing": (
        {"zero_stage": 3, "offload_dir": "/nvme"}, {}, FACTS, ("parallel.offload_dir", "nothing", "offload"),
    ),
    "lost gradients": (
        {
            "zero_stage": 3, "offload": "optimizer", "offload_dir": "/nvme",
            "deepspeed_config": {"zero_optimization": {"sub_group_size": 1e9}},
        },
        {}, FACTS, ("parallel.offload_dir", "loses gradients", "sub_group_size"),
    ),
    "params at 2": (
        {"zero_stage": 2, "offload": "params"}, {}, FACTS, ("parallel.offload", "ZeRO-2", "zero_stage to 3"),
    ),
    "shard size": ({"shard_size": 2}, {}, FACTS, ("parallel.shard_size", "deepspeed", "fsdp")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_instead(name: str) -> None:
    parallel, sections, facts, (setting, what, mend) = REFUSED[name]
    found = [f for f in check(recipe(parallel, **sections), facts) if f.severity == "error"]
    assert [f for f in found if f.setting == setting and what in f.message and mend in f.mend], found


def test_auto_takes_the_stage_that_sends_least() -> None:
    small = replace(FACTS, model=replace(MODEL, num_parameters=1_000_000_000))
    huge = replace(FACTS, model=replace(MODEL, num_parameters=70_000_000_000))
    lora = {"method": {"type": "lora"}}
    assert resolve(recipe({}, **lora), small).parallel.zero_stage == 2
    assert resolve(recipe({}, **lora), huge).parallel.zero_stage == 3
    assert resolve(recipe({}), small).parallel.zero_stage == 3
    assert resolve(recipe({"offload": "params"}, **lora), small).parallel.zero_stage == 3
    experts = replace(FACTS, model=replace(MODEL, num_experts=8))
    assert resolve(recipe({}), experts).parallel.zero_stage == 2
    compiled = {stage: resolve(recipe({"zero_stage": stage}), small).parallel.compile for stage in (2, 3)}
    assert compiled == {2: True, 3: False}


def test_a_disk_gets_a_sub_group_for_each_parameter() -> None:
    made = resolve(recipe({"zero_stage": 3, "offload": "optimizer", "offload_dir": "/nvme"}), FACTS)
    assert made.parallel.deepspeed_config["zero_optimization"]["sub_group_size"] == 1


def test_what_is_swapped_is_the_run_s_own() -> None:
    """Not the run's folder where both have one parent, and not that of a namesake."""
    disk = {"zero_stage": 3, "offload": "optimizer", "offload_dir": "runs"}
    folders = {swap_folder(recipe(disk, output={"folder": f, "name": "n"})) for f in ("runs", "elsewhere")}
    assert len(folders) == 2 and all(Path(f).name.startswith("packtrain-swap-") for f in folders)
    assert str(Path("runs/n").absolute()) not in folders


def test_the_table_of_the_docs_is_what_the_rules_say() -> None:
    assert strategies.as_markdown() in Path("docs/deepspeed.md").read_text(encoding="utf-8")
    refused = [cell for cell in strategies.cells() if not cell.runs]
    assert refused and all(cell.instead for cell in refused)
