"""Anonymous host memory while a model is loaded, by its size.

    python benchmarks/loading.py --billions 1 2 4 --strategy fsdp --processes 2 [--save]

Makes random-weight models, loads each as `packtrain train` would (frozen weights under LoRA, so that a rank keeps its
shard and nothing else of that size), and samples RssAnon of every process. "Beyond the shard" is what loading took at
its peak over what the process had before and what it keeps: staging buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import results

HIDDEN, INTERMEDIATE, KV_HEADS, VOCABULARY = 2048, 8192, 8, 32000
FILE_BYTES = 2 * 2**30
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def make_model(folder: Path, billions: float, dtype: str, tied: bool, one_file: bool) -> None:
    """Config, weights and tokenizer of a Llama with about so many parameters, written tensor by tensor."""
    import torch
    from shapes import byte_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from packtrain.export.tensors import write_sharded

    block = 2 * HIDDEN * HIDDEN + HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INTERMEDIATE
    tables = (1 if tied else 2) * VOCABULARY * HIDDEN
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=32,
        num_key_value_heads=KV_HEADS, num_hidden_layers=max(round((billions * 1e9 - tables) / block), 1),
        tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype=DTYPES[dtype],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    folder.mkdir()
    wanted = getattr(torch, DTYPES[dtype])
    tensors = ((name, torch.empty(shape, dtype=wanted).uniform_(-0.02, 0.02)) for name, shape in shapes.items())
    write_sharded(tensors, folder, 2**50 if one_file else FILE_BYTES)
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def load(recipe_file: str, out: str) -> None:
    """One process: build the model of a recipe and write down what that took."""
    import peft  # noqa: F401 - imported before measuring, as are all that follow
    import torch
    import transformers  # noqa: F401

    from packtrain.config import build_recipe
    from packtrain.models.weights import local_tensor
    from packtrain.parallel.world import join, leave
    from packtrain.train.build import build

    recipe = build_recipe(json.loads(Path(recipe_file).read_text()))
    world = join(recipe.launch.device, 300)
    if world.device.type == "cuda":
        torch.zeros(1, device=world.device)
    world.barrier()
    started, sampler = time.perf_counter(), Sampler()
    built = build(recipe, Path(recipe.model.path), world, Path(out).parent)
    seconds = time.perf_counter() - started
    world.barrier()
    peak = sampler.stop()
    tensors = [local_tensor(p) for p in built.model.parameters()]
    kept = sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu")
    found = {"beyond": peak - sampler.before - kept, "kept": kept, "read": built.bytes_read, "seconds": seconds}
    Path(f"{out}-{world.rank}.json").write_text(json.dumps(found))
    leave()


class Sampler(threading.Thread):
    """The peak of this process's anonymous memory, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = anonymous()
        self.running = True
        self.start()

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.002)

    def stop(self) -> int:
        self.running = False
        self.join()
        return self.peak


def anonymous() -> int:
    """RssAnon of this process in bytes: file pages, which the kernel can drop, are not in it."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def measure(model: Path, args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Load ``model`` in fresh processes; what each of them found."""
    recipe = {
        "model": {"path": str(model)},
        "data": {"train": ["unused"], "max_length": 512},
        "method": {"type": args.method, "targets": ["q_proj"], "virtual_tokens": 30, "adapter_blocks": 1},
        "parallel": {
            "strategy": args.strategy, "shard_size": args.processes if args.strategy == "fsdp" else 1,
            "recompute": "none", "compile": False,
        },
        "train": {"precision": args.precision, "batch_size": 8, "micro_batch_size": 1},
        "launch": {"device": args.device, "processes": args.processes},
    }  # fmt: skip
    (work / "recipe.json").write_text(json.dumps(recipe))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = str(args.processes)
    common = {**os.environ, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, "--worker", str(work / "recipe.json"), str(work / "found")]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(args.processes)
    ]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise SystemExit("a process failed")
    return [json.loads((work / f"found-{rank}.json").read_text()) for rank in range(args.processes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--strategy", choices=["single", "ddp", "fsdp"], default="fsdp")
    parser.add_argument("--method", default="lora")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the files")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--one-file", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="append to results.csv")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return load(*args.worker)
    for billions in args.billions:
        work = Path(tempfile.mkdtemp(prefix="loading"))
        try:
            make_model(work / "model", billions, args.dtype, args.tied, args.one_file)
            report(billions, measure(work / "model", args, work), args)
        finally:
            shutil.rmtree(work)


def report(billions: float, found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    most, node = max(f["beyond"] for f in found), sum(f["beyond"] for f in found)
    if args.json:
        print(json.dumps({"billions": billions, "ranks": found}))
        return
    print(
        f"{billions:g} B, {args.method}, {args.strategy} on {args.processes}: beyond the shard {most / 2**20:.0f} MiB "
        f"a process, {node / 2**20:.0f} MiB on the node; kept {found[0]['kept'] / 2**20:.0f} MiB a process; read "
        f"{[round(f['read'] / 2**20) for f in found]} MiB; {found[0]['seconds']:.1f} s",
        flush=True,
    )
    if args.save:
        names = ("strategy", "method", "processes", "device", "precision", "dtype", "tied", "one_file")
        configuration = {"billions": billions} | {name: getattr(args, name) for name in names}
        metrics = {
            "host memory beyond the shard, a process": (most / 2**20, "MiB"),
            "host memory beyond the shard, the node": (node / 2**20, "MiB"),
            "time to load": (found[0]["seconds"], "s"),
        }
        command = "python benchmarks/loading.py " + " ".join(a for a in sys.argv[1:])
        results.add("loading", "packtrain", metrics, configuration, command)


if __name__ == "__main__":
    main()
