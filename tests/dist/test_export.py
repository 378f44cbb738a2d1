"""`packtrain export` after `packtrain train`: a merged model that computes what was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.tiny import make_model, values, write_chats

TOKENS = {"add_tokens": ["<call>"]}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": {"type": "lora", "rank": 4, "rslora": True}, "model": TOKENS},
    "dora": {"method": {"type": "lora", "rank": 4, "dora": True, "also_train": ["norm"], "targets": ["q_proj"]}},
    "pissa": {"method": {"type": "lora", "rank": 4, "start": "pissa"}},
    "qlora": {"method": {"type": "qlora", "rank": 4, "targets": ["q_proj", "down_proj"]}, "model": TOKENS},
    "qlora_pissa": {"method": {"type": "qlora", "rank": 4, "start": "pissa"}},
    "qlora_dora": {"method": {"type": "qlora", "rank": 4, "quantize": "int8", "dora": True}},
}


def packtrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packtrain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def train(folder: Path, name: str, sections: dict[str, dict[str, Any]]) -> None:
    recipe = values(folder / "base", str(folder / "chats.jsonl"), **sections, output={"name": name})
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    done = packtrain("train", f"{name}.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    make_model(folder / "base", intermediate_size=128)
    write_chats(folder / "chats.jsonl", 12)
    return folder


@pytest.mark.parametrize("name", [n if n == "qlora" else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_merged_is_what_was_trained(runs: Path, name: str) -> None:
    train(runs, name, METHODS[name])
    done = packtrain("export", name, "--json", cwd=runs)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gap = found["gap"]
    assert found["changed"] > 0
    assert gap["spread"] > 0.1 and gap["positions"] > 50
    # float32 files: merging rounds nothing away, and a wrong merge is off by a share of the spread
    assert gap["largest"] < 1e-4 and gap["same_choice"] == 1.0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged, info = AutoModelForCausalLM.from_pretrained(
        runs / found["folder"], dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(runs / found["folder"])
    assert merged.get_input_embeddings().weight.shape[0] >= len(tokenizer)
    assert not (runs / "runs" / name / "merged" / "adapter_config.json").exists()


def test_what_cannot_be_merged(runs: Path) -> None:
    train(runs, "prefix", {"method": {"type": "prefix", "virtual_tokens": 5}})
    done = packtrain("export", "prefix", cwd=runs)
    assert done.returncode == 2 and "has nothing to merge" in done.stderr
    (runs / "taken").mkdir()
    (runs / "taken" / "something").touch()
    recipe = runs / "runs" / "prefix" / "recipe.yaml"  # as if LoRA had been trained: neither folder may be touched
    recipe.write_text(recipe.read_text().replace("type: prefix", "type: lora"))
    for folder, why in (("taken", "exists already"), ("/proc/nowhere", "cannot be written")):
        done = packtrain("export", "prefix", "--to", folder, cwd=runs)
        assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert [p.name for p in (runs / "taken").iterdir()] == ["something"]
