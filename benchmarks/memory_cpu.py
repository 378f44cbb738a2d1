"""Peak memory of CPU processes beside the plan, through `packtrain train`.

    python benchmarks/memory_cpu.py [--save] [NAME ...]

Every rank's anonymous memory, sampled. glibc is told to give blocks of 64 KiB and more back at once (MALLOC_*), so that
what is measured is what is alive: left to itself it keeps a fifth to two thirds more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import results
from shapes import write_rows

MODEL = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
FULL, LORA, QLORA = "method.type=full", "method.type=lora", "method.type=qlora"
TWO, FOUR = "launch.processes=2", "launch.processes=4"
MICRO = "train.micro_batch_size="
ZERO = "parallel.strategy=deepspeed parallel.zero_stage="
SETTINGS = {
    "full": f"{FULL} {MICRO}4",
    "full, accumulated": f"{FULL} {MICRO}1",
    "full, micro-batch 8": f"{FULL} {MICRO}8",
    "full, recompute": f"{FULL} {MICRO}8 parallel.recompute=full",
    "full, half recomputed": f"{FULL} {MICRO}8 parallel.recompute=0.5",
    "full, packed": f"{FULL} {MICRO}4 data.packing=true",
    "full, bf16 states": f"{FULL} {MICRO}2 train.optimizer=adamw_bf16",
    "full, 8-bit states": f"{FULL} {MICRO}2 train.optimizer=adamw_8bit",
    "freeze": f"method.type=freeze method.freeze_first=6 {MICRO}4",
    "lora": f"{LORA} {MICRO}4",
    "lora, micro-batch 8": f"{LORA} {MICRO}8",
    "lora, rank 64": f"{LORA} {MICRO}4 method.rank=64",
    "lora, recompute": f"{LORA} {MICRO}8 parallel.recompute=full",
    "lora, embedding trained": f"{LORA} {MICRO}4 method.also_train=[embedding]",
    "dora": f"{LORA} {MICRO}4 method.dora=true",
    "qlora": f"{QLORA} {MICRO}4",
    "qlora, int8": f"{QLORA} {MICRO}4 method.quantize=int8",
    "prefix": f"method.type=prefix {MICRO}4",
    "llama_adapter": f"method.type=llama_adapter {MICRO}4",
    "ddp 2, full": f"{FULL} {MICRO}2 {TWO} parallel.strategy=ddp",
    "ddp 2, lora": f"{LORA} {MICRO}4 {TWO} parallel.strategy=ddp",
    "fsdp 2, full": f"{FULL} {MICRO}2 {TWO} parallel.strategy=fsdp",
    "fsdp 2, full, recompute": f"{FULL} {MICRO}4 {TWO} parallel.strategy=fsdp parallel.recompute=full",
    "fsdp 2, lora": f"{LORA} {MICRO}4 {TWO} parallel.strategy=fsdp",
    "fsdp 2, qlora": f"{QLORA} {MICRO}4 {TWO} parallel.strategy=fsdp",
    "fsdp 4, full": f"{FULL} {MICRO}2 {FOUR} parallel.strategy=fsdp",
    "hsdp 2x2, full": f"{FULL} {MICRO}2 {FOUR} parallel.strategy=fsdp parallel.shard_size=2",
    "zero 1, full": f"{FULL} {MICRO}4 {TWO} {ZERO}1",
    "zero 2, full": f"{FULL} {MICRO}4 {TWO} {ZERO}2",
    "zero 3, full": f"{FULL} {MICRO}4 {TWO} {ZERO}3",
}
LENGTH = 512


def make_model(folder: Path) -> None:
    import torch
    from shapes import byte_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL, dtype=torch.float32)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def run(work: Path, name: str) -> dict:
    overrides = SETTINGS[name].split()
    recipe = {
        "model": {"path": f"{work}/model"},
        "data": {"train": [f"{work}/rows.py:rows"], "eval": 0.0, "max_length": LENGTH, "packing": False, "workers": 1},
        "train": {"max_steps": 4, "batch_size": 8, "precision": "fp32"},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "never"},
        "launch": {"device": "cpu", "processes": 1},
        "output": {"folder": f"{work}/runs", "name": "".join(c if c.isalnum() else "-" for c in name)},
    }
    file = work / "memory.yaml"
    file.write_text(yaml.safe_dump(recipe))
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "packtrain", "train", str(file), *overrides]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: exit {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    folder = work / "runs" / recipe["output"]["name"]
    found = json.loads((folder / "measured.json").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    return {"measured": max(found["peak_bytes"]), "planned": found["memory"]["planned"], "terms": plan["memory"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="settings to run; all if none is given")
    parser.add_argument("--save", action="store_true", help="append to results.csv")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="memory"))
    make_model(work / "model")
    write_rows(work / "rows.py", 64, str(LENGTH), MODEL["vocab_size"])
    for name in args.names or SETTINGS:
        found = run(work, name)
        mib = {key: found[key] / 2**20 for key in ("measured", "planned")}
        off = found["planned"] / found["measured"] - 1
        terms = {key: round(size / 2**20) for key, size in found["terms"]["terms"].items() if size > 2**20}
        print(f"{name:26s} measured {mib['measured']:7.1f} planned {mib['planned']:7.1f} MiB {off:+6.1%}", end="  ")
        print(found["terms"]["moment"], terms, flush=True)
        if args.save:
            metrics = {"peak memory": (mib["measured"], "MiB"), "planned memory": (mib["planned"], "MiB")}
            command = "python benchmarks/memory_cpu.py --save"
            results.add(f"memory on the CPU: {name}", "packtrain", metrics, {"overrides": SETTINGS[name]}, command)


if __name__ == "__main__":
    main()
