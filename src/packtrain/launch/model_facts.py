"""A model as numbers: from config.json and the headers of its weight files, or from config.json alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from packtrain.config.facts import Linear, ModelFacts
from packtrain.errors import UserError
from packtrain.models.files import WeightFiles

_FIRST_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
Shapes = Mapping[str, Sequence[int]]
"""Shapes of parameters by their names in the weight files."""


def model_facts(folder: Path) -> ModelFacts:
    """Sizes of a model that can be trained: config.json and the weights' headers are read.

    Raises:
        UserError: config.json lacks a size, or the weights are missing or damaged.
    """
    config = _read_config(folder / "config.json")
    files = WeightFiles.open(folder)
    if any(".experts.0." in name for name in files.entries):
        raise _mixture(folder)
    shapes = {name: entry.shape for name, entry in files.entries.items()}
    return _facts(folder / "config.json", config, shapes, files.num_parameters)


def planned_model_facts(folder: Path) -> ModelFacts:
    """As ``model_facts``; config.json alone will do, so that a plan can be made before anything is downloaded.

    Raises:
        UserError: config.json lacks a size.
    """
    if next(folder.glob("*.safetensors"), None) is not None:
        return model_facts(folder)
    file = folder / "config.json"
    config = _read_config(file)
    text = config.get("text_config") or config
    if _num_experts(text) > 1:
        raise _mixture(folder)
    family = _FAMILIES.get(str(text.get("model_type", "")))
    shapes = family.shapes(file, text, config) if family else _built(folder)
    return _facts(file, config, shapes, sum(prod(shape) for shape in shapes.values()))


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(str(file), "is not valid JSON", "copy or download the model again") from error
    if config.get("quantization_config"):
        what = f"is quantised already ({config['quantization_config'].get('quant_method', 'unknown method')})"
        mend = "start from the model it was made from: method qlora quantises it on the way in"
        raise UserError(str(file), what, mend)
    return config


def _facts(file: Path, whole: dict[str, Any], shapes: Shapes, num_parameters: int) -> ModelFacts:
    config = whole.get("text_config") or whole
    hidden, blocks = _size(file, config, "hidden_size"), _size(file, config, "num_hidden_layers")
    block = {m[2]: tuple(shape) for name, shape in shapes.items() if (m := _FIRST_BLOCK.search(name)) and m[1] == "0"}
    linears = [
        Linear(name.removesuffix(".weight"), *shape)
        for name, shape in block.items()
        if name.endswith(".weight") and len(shape) == 2
    ]
    keys = [linear.outputs for linear in linears if linear.name.endswith("k_proj")]
    return ModelFacts(
        num_parameters=num_parameters,
        num_blocks=blocks,
        hidden=hidden,
        intermediate=int(config.get("intermediate_size") or 4 * hidden),
        vocabulary=_size(file, config, "vocab_size"),
        max_length=config.get("max_position_embeddings"),
        type=str(config.get("model_type", "")),
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window", True) else None,
        even_heads=_even_heads(config, hidden),
        num_experts=_num_experts(config),
        linears=tuple(sorted(linears, key=lambda linear: linear.name)),
        kv_width=keys[0] if keys else _kv_width(config),
        head_size=_head_size(config),
        tied=_tied(whole, shapes),
        qk_norm=any(name.endswith("q_norm.weight") for name in block),
    )


def _mixture(folder: Path) -> UserError:
    what = "is a mixture of experts, whose files hold each expert apart; that is not read yet"
    return UserError("model.path", f"{folder} {what}", "choose a dense model")


def _num_experts(config: Mapping[str, Any]) -> int:
    return max(int(config.get(key) or 0) for key in _EXPERTS)


def _size(file: Path, config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise UserError(str(file), f"has no {key}", "choose a Llama-like model")
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(str(file), f"{key} is {value!r}, no size", "copy or download the model again")
    return value


def _tied(config: Mapping[str, Any], shapes: Shapes) -> bool:
    text = config.get("text_config") or config
    said = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if said is not None:
        return bool(said)
    return not any(name.endswith(("lm_head.weight", "output.weight", "embed_out.weight")) for name in shapes)


def _kv_width(config: Mapping[str, Any]) -> int:
    """From config.json, where queries, keys and values are one matrix."""
    return int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 0) * _head_size(config)


def _head_size(config: Mapping[str, Any]) -> int:
    """Of an attention head; 0: config.json tells of no heads."""
    heads = int(config.get("num_attention_heads") or 0)
    return int(config.get("head_dim") or (config["hidden_size"] // heads if heads else 0))


def _even_heads(config: Mapping[str, Any], hidden: int) -> bool:
    heads, size = config.get("num_attention_heads"), config.get("head_dim")
    return not heads or not size or heads * size == hidden


@dataclass(frozen=True)
class _Family:
    """Architectures with Llama's matrices, by what they do otherwise; where config.json is silent, transformers'
    defaults.

    Attributes:
        norms: of a block, of the model's width. qk_norm: queries and keys are normalised by head.
        qkv_bias: whether q, k and v always have a bias; else ``attention_bias`` says so, of all four.
    """

    tied: bool = False
    norms: int = 2
    qk_norm: bool = False
    qkv_bias: bool = False

    def shapes(self, file: Path, config: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Of every parameter, as the weight files would have them."""
        hidden, inner = _size(file, config, "hidden_size"), _size(file, config, "intermediate_size")
        heads = _size(file, config, "num_attention_heads")
        size = _head_size(config)
        query, kv = heads * size, _kv_width(config)
        matrices = {
            "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        block: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
        for name, shape in matrices.items():
            if self._biased(name, config):
                block[f"{name}.bias"] = shape[:1]
        block |= {f"norm_{index}.weight": (hidden,) for index in range(self.norms)}
        if self.qk_norm:
            block |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        vocabulary = _size(file, config, "vocab_size")
        made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
        for index in range(_size(file, config, "num_hidden_layers")):
            made |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
        made["model.norm.weight"] = (hidden,)
        if not config.get("tie_word_embeddings", whole.get("tie_word_embeddings", self.tied)):
            made["lm_head.weight"] = (vocabulary, hidden)
        return made

    def _biased(self, name: str, config: Mapping[str, Any]) -> bool:
        if name.startswith("mlp"):
            return bool(config.get("mlp_bias", False))
        return (self.qkv_bias and not name.endswith("o_proj")) or bool(config.get("attention_bias", False))


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True, norms=4),
    "gemma3_text": _Family(tied=True, norms=4, qk_norm=True),
    "granite": _Family(),
    "smollm3": _Family(tied=True),
}


def _built(folder: Path) -> dict[str, tuple[int, ...]]:
    """From the model on the meta device, which takes some seconds."""
    import torch

    from packtrain.models.attention import MASKED
    from packtrain.models.meta import load_config, meta_model

    model = meta_model(load_config(folder), torch.bfloat16, MASKED)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
