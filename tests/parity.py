"""What the parity tests share: methods, worlds, rows with label counts from 1 to 61, and how equal is equal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_model, values, write_uneven_rows

LABELS = [1, 61, 2, 40, 1, 1, 7, 33, 5, 61, 1, 2, 3]
BATCH = 8
WORLDS = {
    "ddp 2": (2, "ddp", 1), "fsdp 2": (2, "fsdp", 2), "fsdp 4": (4, "fsdp", 4), "hsdp 2x2": (4, "fsdp", 2),
}  # fmt: skip
ZERO = {  # small buckets, so that a tiny model has several
    "reduce_bucket_size": 5000, "stage3_prefetch_bucket_size": 5000, "stage3_param_persistence_threshold": 100,
    "sub_group_size": 40_000, "round_robin_gradients": True,
}  # fmt: skip
NEW_TOKENS = ["<call>", "</call>", "<tool>"]

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": {"type": "full"}},
    "freeze": {"method": {"type": "freeze", "freeze_first": 2}},
    "freeze named": {"method": {"type": "freeze", "trainable": ["blocks.1-2", "norm"]}},
    "lora": {"method": {"type": "lora", "rank": 4}},
    "lora variants": {"method": {"type": "lora", "rank": 4, "dora": True, "rslora": True, "lora_plus": 4.0,
                                 "targets": ["q_proj", "down_proj"]}},
    "pissa": {"method": {"type": "lora", "rank": 4, "start": "pissa"}},
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "qlora": {"method": {"type": "qlora", "rank": 4}},
    "qlora double": {"method": {"type": "qlora", "rank": 4, "double_quant": True, "rslora": True}},
    "qlora int8 dora": {"method": {"type": "qlora", "rank": 4, "quantize": "int8", "dora": True}},
    "qlora pissa": {"method": {"type": "qlora", "rank": 4, "start": "pissa"}},
    "llama_adapter": {"method": {"type": "llama_adapter", "virtual_tokens": 5, "adapter_blocks": 3}},
    "prefix": {"method": {"type": "prefix", "virtual_tokens": 5}},
    "lora, parts": {"method": {"type": "lora", "rank": 4, "also_train": ["embedding", "norm", "head"]}},
    "lora, tokens": {"method": {"type": "lora", "rank": 4}, "model": {"add_tokens": NEW_TOKENS}},
    "full, tokens": {"method": {"type": "full"}, "model": {"add_tokens": NEW_TOKENS}},
    "prefix, tokens": {"method": {"type": "prefix", "virtual_tokens": 5}, "model": {"add_tokens": NEW_TOKENS}},
    "full, 8 bit": {"method": {"type": "full"}, "train": {"optimizer": "adamw_8bit"}},
}


def zero(stage: int, offload: str = "none", **parallel: Any) -> dict[str, Any]:
    """The parallel section of a DeepSpeed run."""
    keys = {key: ZERO[key] for key in ZERO if stage == 3 or not key.startswith(("stage3", "sub"))} if stage else {}
    config = {"zero_optimization": keys}
    return {"strategy": "deepspeed", "zero_stage": stage, "offload": offload, "deepspeed_config": config, **parallel}


@dataclass(frozen=True)
class Case:
    """A model and rows for it; ``grown_rows`` hold the ids of added tokens too."""

    model: Path
    rows: str
    grown_rows: str

    def recipe(self, sections: dict[str, dict[str, Any]], **changes: dict[str, Any]) -> dict[str, Any]:
        rows = self.grown_rows if sections.get("model") else self.rows
        merged = {name: {**sections.get(name, {}), **changes.get(name, {})} for name in {*sections, *changes}}
        return values(self.model, rows, **merged)

    def spread(self, sections: dict[str, dict[str, Any]], world: str, accumulation: int, **parallel: Any) -> Any:
        """A recipe for a world, whose process makes so many forward passes in a step; the second setting recomputes."""
        size, strategy, shard_size = WORLDS[world]
        micro = math.ceil(math.ceil(BATCH / size) / accumulation)
        how = {"recompute": "none" if accumulation == 1 else "full", **parallel}
        return self.recipe(
            sections, data={"eval": 0.1}, parallel={"strategy": strategy, "shard_size": shard_size, **how},
            train={"batch_size": BATCH, "micro_batch_size": micro},
        )  # fmt: skip


def make_case(folder: Path, tied: bool = False) -> Case:
    new = range(261, 261 + len(NEW_TOKENS))
    return Case(
        make_model(folder / "model", tied=tied),
        f"{write_uneven_rows(folder / 'rows.py', LABELS)}:rows",
        f"{write_uneven_rows(folder / 'grown.py', LABELS, new)}:rows",
    )


def assert_equal(found: Any, wanted: Any, tolerance: float = 1e-5, name: str = "") -> None:
    """Within the tolerance, of the value where it is above 1: Gemma's LoRA has gradient norms of 0.07, whose last
    digits hang on AdamW's first steps along gradients of rounding size."""
    (steps, loss), (wanted_steps, wanted_loss) = found, wanted
    close = {"rel": tolerance, "abs": tolerance}
    assert [s[0] for s in steps] == pytest.approx([s[0] for s in wanted_steps], **close), name
    assert [s[1] for s in steps] == pytest.approx([s[1] for s in wanted_steps], **close), name
    assert loss == pytest.approx(wanted_loss, **close), name
