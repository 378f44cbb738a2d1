"""What a block keeps for the backward pass, counted beside the tensors that autograd really saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_chats

LENGTH = 256
BF16, FP32 = {"precision": "bf16"}, {"precision": "fp32"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {  # family, method, train, packed
    "lora": ("llama", {"type": "lora", "rank": 8}, FP32, False),
    "lora of two": ("llama", {"type": "lora", "rank": 8, "targets": ["q_proj", "v_proj"]}, FP32, False),
    "qlora": ("llama", {"type": "qlora", "rank": 8}, FP32, False),
    "full": ("llama", {"type": "full"}, FP32, False),
    "full, packed": ("llama", {"type": "full"}, FP32, True),
    "full, bf16": ("llama", {"type": "full"}, BF16, False),
    "lora, bf16": ("llama", {"type": "lora", "rank": 8}, BF16, False),
    "qwen3": ("qwen3", {"type": "lora", "rank": 8}, FP32, False),
    "mistral": ("mistral", {"type": "full"}, FP32, False),
}


def test_counts_are_what_autograd_saves(tmp_path: Path) -> None:
    """A model of three blocks keeps as much more than one of two as one block keeps."""
    rows = str(write_chats(tmp_path / "rows.jsonl", 4))
    recipes = {}
    for name, (family, method, train, packed) in CASES.items():
        for blocks in (2, 3):
            folder = tmp_path / f"{family}-{blocks}"
            if not folder.exists():
                make_model(folder, family, hidden_size=128, intermediate_size=384, num_attention_heads=8,
                           num_hidden_layers=blocks)  # fmt: skip
            data = {"max_length": LENGTH, "packing": packed}
            recipes[f"{name} {blocks}"] = values(folder, rows, data=data, method=method, train=train)
    saved, planned = run_ranks(1, count_saved, recipes)[0]
    for name in CASES:
        found = saved[f"{name} 3"] - saved[f"{name} 2"]
        assert found == pytest.approx(planned[f"{name} 3"] * LENGTH, rel=0.01), name


def count_saved(world: Any, recipes: dict[str, dict[str, Any]]) -> tuple[dict[str, int], dict[str, float]]:
    """(bytes that autograd saves in a forward pass, bytes planned for a token of a block) of each recipe."""
    import torch
    from tests.jobs import open_job

    from packtrain.launch.model_facts import model_facts
    from packtrain.plan.activations import block

    saved, planned = {}, {}
    for name, recipe in recipes.items():
        session = open_job(world, recipe)
        model = session.built.model
        own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        seen: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, own: set[int] = own, seen: dict[int, torch.Tensor] = seen) -> torch.Tensor:
            place = tensor.untyped_storage().data_ptr()
            if place not in own and LENGTH in tensor.shape:  # a cast weight has no token in it
                seen[place] = tensor
            return tensor

        ids = torch.randint(3, 200, (1, LENGTH))
        batch: dict[str, Any] = {
            "input_ids": ids, "position_ids": torch.arange(LENGTH)[None], "label_positions": torch.arange(LENGTH - 1),
            "targets": ids[0, 1:],
        }  # fmt: skip
        if session.recipe.data.packing:
            batch["document_ids"] = torch.arange(LENGTH)[None] // 100
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            session.built.strategy.forward(**batch)
        saved[name] = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
        planned[name] = block(session.recipe, model_facts(Path(recipe["model"]["path"])), wide_stream=False).kept
    return saved, planned
