"""Random-weight models of real shapes, and random rows, so that a measurement needs no download."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "llama-3.2-3b": {
        "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2.5-3b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Llama's, where no model_type is given."""


def shape_of(folder: Path) -> str:
    """The name of a model's shape; empty: none of ours."""
    config = json.loads((folder / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")
    return next((name for name, one in SHAPES.items() if all(one[size] == config.get(size) for size in sizes)), "")


def make_model(shape: str, folder: Path, num_blocks: int | None = None) -> None:
    """Write config, bf16 weights and a byte-level tokenizer; weights are drawn block by block."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict({"model_type": "llama"} | SHAPES[shape], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if num_blocks:
        values["num_hidden_layers"] = num_blocks
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, dtype=torch.bfloat16))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="4GB")
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


ROWS = '''\
"""Random token rows, all labelled."""

import numpy as np


def rows():
    random = np.random.default_rng(0)
    for i in range({count}):
        length = {length}
        yield {{"input_ids": random.integers(3, {vocabulary}, size=length).tolist()}}
'''


def write_rows(file: Path, count: int, length: str, vocabulary: int) -> None:
    """A data function for a recipe; ``length`` is an expression, e.g. ``4096`` or ``int(random.integers(60, 340))``."""
    file.write_text(ROWS.format(count=count, length=length, vocabulary=vocabulary))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int)
    args = parser.parse_args()
    make_model(args.shape, args.folder, args.blocks)
