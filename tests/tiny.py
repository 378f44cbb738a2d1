"""Tiny models and data that tests train: real architectures, random weights, a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = ("llama", "qwen3", "mistral", "gemma")


def make_tokenizer(folder: Path, template: str | None = CHATML) -> Any:
    """A byte-level tokenizer without merges, 261 tokens, saved into ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def make_model(
    folder: Path, shape: str = "llama", tied: bool = False, max_shard_size: str = "5GB", **changes: Any
) -> Path:
    """A random-weight model of about 200k parameters with its tokenizer, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape, vocab_size=261, tie_word_embeddings=tied, dtype=torch.float32, **{**SIZES, **changes}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms away from 1, so that a wrong norm is seen
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(folder)
    return folder


def write_uneven_rows(file: Path, label_counts: list[int], also: range = range(0)) -> Path:
    """Ready-made token rows with exactly these label counts, as ``file.py:rows`` for a recipe; ids of ``also`` are
    among their prompts and labels."""
    random = np.random.default_rng(7)
    rows = []
    for count in label_counts:
        prompt = random.integers(5, 261, size=int(random.integers(3, 20))).tolist()
        answer = random.integers(5, 261, size=count).tolist()
        for new in also:
            prompt[int(random.integers(len(prompt)))] = answer[int(random.integers(count))] = new
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    data = file.with_suffix(".json")
    data.write_text(json.dumps(rows))
    file.write_text(
        "import json\nfrom pathlib import Path\n\n"
        f"def rows():\n    return json.loads(Path(__file__).with_name({data.name!r}).read_text())\n"
    )
    return file


def write_chats(file: Path, num_rows: int, seed: int = 0) -> Path:
    """Small chats with answers of uneven length, as JSONL messages."""
    random = np.random.default_rng(seed)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "what", "it", "had", "been", "sent", "by", "friends"]
    with open(file, "w", encoding="utf-8") as out:
        for i in range(num_rows):
            question = " ".join(random.choice(words, size=int(random.integers(1, 8)))) + f" {i}?"
            answer = " ".join(random.choice(words, size=int(random.integers(1, 14))))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


def values(model: Path, source: str, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe as a mapping: float32, no warm-up, no evaluation, and what ``sections`` change."""
    recipe: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {"train": [source], "eval": 0.0, "packing": False, "max_length": 128, "workers": 1},
        "method": {"type": "full"},
        "parallel": {"strategy": "single", "shard_size": 1, "recompute": "none", "compile": False},
        "train": {
            "batch_size": 8, "micro_batch_size": 8, "learning_rate": 3e-3, "warmup": 0, "schedule": "constant",
            "max_grad_norm": 0.5, "precision": "fp32", "max_steps": 3, "seed": 5,
        },
        "launch": {"device": "cpu", "processes": 1, "timeout": "30s"},
    }  # fmt: skip
    for name, changes in sections.items():
        recipe.setdefault(name, {}).update(changes)
    return recipe
