"""A plan of any recipe that breaks no rule is finite, ordered and true to itself, on any machine."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

from tests.unit.plan.measured import LLAMA_3B, LLAMA_8B, LLAMA_70B, asked, gpus

from packtrain.config.facts import Facts
from packtrain.config.rules import check
from packtrain.config.schema import Recipe
from packtrain.launch.resolve_recipe import fill, shortage
from packtrain.plan.report import plan, plan_resolved

METHODS: tuple[dict[str, Any], ...] = (
    {"type": "full"}, {"type": "freeze", "freeze_first": 4}, {"type": "freeze", "trainable": ["head", "blocks.3"]},
    {"type": "lora"}, {"type": "lora", "dora": True, "also_train": ["embedding"]},
    {"type": "lora", "targets": ["q_proj"]}, {"type": "qlora"},
    {"type": "qlora", "quantize": "int8", "double_quant": True}, {"type": "prefix"}, {"type": "llama_adapter"},
)  # fmt: skip
PARALLEL: tuple[dict[str, Any], ...] = (
    {}, {"strategy": "ddp"}, {"strategy": "fsdp"}, {"shard_size": 2}, {"strategy": "deepspeed"},
    {"strategy": "deepspeed", "zero_stage": 1}, {"strategy": "deepspeed", "zero_stage": 3, "offload": "params"},
    {"strategy": "deepspeed", "zero_stage": 2, "offload": "optimizer"}, {"offload": "optimizer"},
    {"offload": "params"}, {"strategy": "single"}, {"recompute": "selective"},
    {"recompute": "full", "offload_activations": True}, {"compile": False},
)  # fmt: skip
TRAIN: tuple[dict[str, Any], ...] = (
    {}, {"optimizer": "adamw_8bit"}, {"optimizer": "adamw_bf16", "master_weights": "bf16", "rounding": "kahan"},
    {"precision": "fp32"}, {"batch_size": 7}, {"micro_batch_size": 2}, {"precision": "fp16"},
)  # fmt: skip
MACHINES = (
    gpus(1, LLAMA_8B, 1), gpus(4, LLAMA_3B, 24), gpus(16, LLAMA_70B, nodes=2), gpus(2, LLAMA_3B, 24, "Voodoo"),
)  # fmt: skip
EVERY = 13  # of the combinations, one in so many; prime to all the numbers of choices


def test_plans_hold_together() -> None:
    planned = 0
    combinations = itertools.product(METHODS, PARALLEL, TRAIN, MACHINES)
    for method, parallel, train, machine in itertools.islice(combinations, 0, None, EVERY):
        recipe = asked(method=dict(method), parallel=dict(parallel), train=dict(train))
        if not any(found.severity == "error" for found in check(recipe, machine)):
            holds_together(recipe, machine)
            planned += 1
    assert planned > 100


def holds_together(recipe: Recipe, machine: Facts) -> None:
    made = plan(recipe, machine)
    told = made.to_json()
    json.dumps(told)
    assert all(size >= 0 and math.isfinite(size) for size in told["memory"]["terms"].values())
    assert told["memory"]["total_bytes"] > 0 and made.host.training >= 0
    if told["speed"]:
        assert 0 < told["speed"]["tokens_per_second"] < 1e6 and min(told["speed"]["seconds"].values()) >= 0
    assert (told["speed"] is None) == (machine.gpu == "Voodoo")
    refused = [bool(one.refused) for one in made.candidates]
    assert refused == sorted(refused)
    warnings = shortage(recipe, plan_resolved(fill(recipe, machine), machine))
    assert len(warnings) == (not made.fits) and not any("\n" in warning.sentence for warning in warnings)
