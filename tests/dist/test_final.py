"""What a run leaves in final/ loads in a fresh process with plain transformers and peft, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.final import assert_loads, train_and_save
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_chats

TOKENS = {"add_tokens": ["<call>", "</call>"]}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "freeze": {"type": "freeze", "freeze_first": 2},
    "lora": {"type": "lora", "rank": 4},
    "dora": {"type": "lora", "rank": 4, "dora": True},
    "rslora": {"type": "lora", "rank": 4, "rslora": True, "targets": ["q_proj", "v_proj"]},
    "pissa": {"type": "lora", "rank": 4, "start": "pissa"},
    "pissa rslora": {"type": "lora", "rank": 4, "start": "pissa", "rslora": True},
    "qlora": {"type": "qlora", "rank": 4},
    "qlora dora": {"type": "qlora", "rank": 4, "dora": True},
    "llama_adapter": {"type": "llama_adapter", "virtual_tokens": 5, "adapter_blocks": 3},
    "prefix": {"type": "prefix", "virtual_tokens": 5},
    "lora parts": {"type": "lora", "rank": 4, "also_train": ["embedding", "norm", "head"]},
    "lora tokens": {"type": "lora", "rank": 4},
    "full tokens": {"type": "full"},
    "freeze tokens": {"type": "freeze", "trainable": ["blocks.3"]},
    "prefix tokens": {"type": "prefix", "virtual_tokens": 5},
    "llama_adapter parts": {"type": "llama_adapter", "virtual_tokens": 5, "adapter_blocks": 2, "also_train": ["norm"]},
}

TIED = ("full", "lora", "qlora", "lora parts", "lora tokens", "full tokens", "freeze tokens", "prefix tokens")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_final_loads_elsewhere(tmp_path: Path, tied: bool) -> None:
    base = make_model(tmp_path / "base", tied=tied, intermediate_size=128)
    data = str(write_chats(tmp_path / "chats.jsonl", 12))
    methods = {name: METHODS[name] for name in TIED} if tied else METHODS
    recipes = {
        name: values(
            base, data, method=section, parallel={"strategy": "fsdp", "shard_size": 2}, launch={"processes": 2},
            model=TOKENS if "tokens" in name else {},
        )
        for name, section in methods.items()
    }  # fmt: skip
    trained = run_ranks(2, train_and_save, recipes, str(tmp_path))[0]
    assert_loads(tmp_path, methods, trained)
    assert not list(tmp_path.glob("*/final.tmp"))
