"""``final/`` reopened in a fresh process that has never heard of Packtrain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import NeverStop, open_job

# Runs without packtrain on its path: what a user elsewhere would type.
LOADER = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

def load_adapter(folder):
    bits = {}
    if "qlora" in folder:
        bits = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **bits)
    for module in model.modules():  # on some processors bitsandbytes multiplies in bf16, whatever the dtype
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    stored = load_file(folder + "/adapter_model.safetensors")
    assert stored and all(t.abs().sum() > 0 for t in stored.values()), "an adapter is zero"
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    return model, sorted(set(own) ^ set(stored)) + [n for n in own if not torch.equal(own[n], stored[n])]

def load_model(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model, sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])

def look_at(folder, kind):
    model, missing = load_adapter(folder) if kind == "adapter" else load_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.arange(5, 45)[None]
    ids[0, 20] = len(tokenizer) - 1
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0, -1, [*range(7), len(tokenizer) - 1]].tolist()
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"logits": logits, "missing": missing, "chat": chat}

found = {folder: look_at(folder, kind) for folder, kind in json.loads(sys.argv[1]).items()}
assert "packtrain" not in sys.modules
print(json.dumps(found))
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
    tokens = 261 + len(session.recipe.model.add_tokens)
    ids[0, 20] = tokens - 1
    position = torch.arange(40)[None]
    losses = [
        session.built.strategy.forward(
            input_ids=ids, position_ids=position, label_positions=torch.tensor([39]), targets=torch.tensor([target]),
            per_token=True,
        ).item()
        for target in [*range(7), tokens - 1]
    ]  # fmt: skip
    del model
    return losses


def assert_loads(tmp_path: Path, methods: dict[str, dict[str, Any]], trained: dict[str, list[float]]) -> None:
    """Each ``final/`` of runs in ``tmp_path`` loads elsewhere and computes what was trained.

    Args:
        methods: the method section by the run's name, whose folder has dashes for spaces.
        trained: ``logits_of`` each run.
    """
    folders = {name: str(tmp_path / name.replace(" ", "-") / "final") for name in methods}
    kinds = {folders[n]: "model" if s["type"] in ("full", "freeze") else "adapter" for n, s in methods.items()}
    command = [sys.executable, "-c", LOADER, json.dumps(kinds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, folder in folders.items():
        found = json.loads(done.stdout.splitlines()[-1])[folder]
        assert found["missing"] == [], name
        assert found["chat"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        # losses are logsumexp - logit, so their differences are those of the logits
        gaps = [trained[name][0] - loss for loss in trained[name]]
        wanted = [logit - found["logits"][0] for logit in found["logits"]]
        assert gaps == pytest.approx(wanted, abs=2e-4), name
        assert (Path(folder) / "README.md").read_text().startswith("---\nbase_model:")
