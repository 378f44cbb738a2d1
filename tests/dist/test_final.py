"""What a run leaves in final/ loads in a fresh process with plain transformers and peft, and computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import NeverStop, open_job
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_chats

METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "freeze": {"type": "freeze", "freeze_first": 2},
    "lora": {"type": "lora", "rank": 4},
    "dora": {"type": "lora", "rank": 4, "dora": True},
    "rslora": {"type": "lora", "rank": 4, "rslora": True, "targets": ["q_proj", "v_proj"]},
    "pissa": {"type": "lora", "rank": 4, "start": "pissa"},
    "pissa rslora": {"type": "lora", "rank": 4, "start": "pissa", "rslora": True},
}

# Runs without packtrain on its path: what a user elsewhere would type.
LOADER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, base, is_adapter = sys.argv[1], sys.argv[2], sys.argv[3] == "adapter"
if is_adapter:
    from peft import PeftModel
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder)
    trained = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert trained and all(p.abs().sum() > 0 for p in trained.values()), "an adapter is zero"
    missing = []
else:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    missing = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = torch.arange(5, 45)[None]
with torch.no_grad():
    logits = model.eval()(input_ids=ids).logits[0, -1, :8].tolist()
chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
assert "packtrain" not in sys.modules
print(json.dumps({"logits": logits, "missing": missing, "chat": chat}))
"""


def train_and_save(world: Any, recipes: dict[str, dict[str, Any]], folder: str) -> dict[str, list[float]]:
    """Train each recipe, write its final/, and return what the trained model itself computes on fixed tokens."""
    from packtrain.export.final import save_final
    from packtrain.train.loop import train_steps

    found = {}
    for name, recipe in recipes.items():
        run = Path(folder) / name.replace(" ", "-")
        if world.is_main:
            run.mkdir()
        world.barrier()
        session = open_job(world, recipe, str(run))
        assert train_steps(session, NeverStop())
        save_final(session)
        found[name] = logits_of(session)
    return found


def logits_of(session: Any) -> list[float]:
    """The logits of the last of 40 fixed tokens, by the module that was trained, as the loss computes them."""
    import torch

    model = session.built.model.eval()
    ids = torch.arange(5, 45)[None]
    position = torch.arange(40)[None]
    losses = [
        session.built.strategy.forward(
            input_ids=ids, position_ids=position, label_positions=torch.tensor([39]), targets=torch.tensor([target]),
            per_token=True,
        ).item()
        for target in range(8)
    ]  # fmt: skip
    del model
    return losses


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_final_loads_elsewhere(tmp_path: Path, tied: bool) -> None:
    base = make_model(tmp_path / "base", tied=tied)
    data = str(write_chats(tmp_path / "chats.jsonl", 12))
    recipes = {
        name: values(base, data, method=section, parallel={"strategy": "fsdp", "shard_size": 2}, launch={"processes": 2})
        for name, section in METHODS.items()
    }
    trained = run_ranks(2, train_and_save, recipes, str(tmp_path))[0]
    for name in METHODS:
        folder = tmp_path / name.replace(" ", "-") / "final"
        kind = "adapter" if METHODS[name]["type"] == "lora" else "model"
        command = [sys.executable, "-c", LOADER, str(folder), str(base), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["missing"] == []
        assert found["chat"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        # losses are logsumexp - logit, so their differences are those of the logits
        gaps = [trained[name][0] - loss for loss in trained[name]]
        wanted = [logit - found["logits"][0] for logit in found["logits"]]
        assert gaps == pytest.approx(wanted, abs=2e-4), name
        assert (folder / "README.md").read_text().startswith("---\nbase_model:")
    assert not list(tmp_path.glob("*/final.tmp"))
