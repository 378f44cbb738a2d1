"""A model as numbers: from config.json and the headers of its weight files, or from config.json alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from packtrain.config.facts import Linear, ModelFacts
from packtrain.errors import UserError
from packtrain.models.files import WeightFiles
from packtrain.models.model_config import ModelConfig, read_model_config

_FIRST_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")
Shapes = Mapping[str, Sequence[int]]
"""Shapes of parameters by their names in the weight files."""


def model_facts(folder: Path) -> ModelFacts:
    """Sizes of a model that can be trained: config.json and the weights' headers are read.

    Raises:
        UserError: config.json lacks a size, or the weights are missing or damaged.
    """
    config = _trainable_config(folder / "config.json")
    files = WeightFiles.open(folder)
    if any(".experts.0." in name for name in files.entries):
        raise _mixture(folder)
    shapes = {name: entry.shape for name, entry in files.entries.items()}
    return _facts(config, shapes, files.num_parameters)


def planned_model_facts(folder: Path) -> ModelFacts:
    """As ``model_facts``; config.json alone will do, so that a plan can be made before anything is downloaded.

    Raises:
        UserError: config.json lacks a size.
    """
    if next(folder.glob("*.safetensors"), None) is not None:
        return model_facts(folder)
    config = _trainable_config(folder / "config.json")
    if config.experts > 1:
        raise _mixture(folder)
    family = _FAMILIES.get(config.model_type or "")
    shapes = family.shapes(config) if family else _built(folder)
    return _facts(config, shapes, sum(prod(shape) for shape in shapes.values()))


def _trainable_config(file: Path) -> ModelConfig:
    """config.json of a model that is not quantised already."""
    config = read_model_config(file)
    if config.quantization_config:
        what = f"is quantised already ({config.quantization_config.get('quant_method', 'unknown method')})"
        mend = "start from the model it was made from: method qlora quantises it on the way in"
        raise UserError(str(file), what, mend)
    return config


def _facts(config: ModelConfig, shapes: Shapes, num_parameters: int) -> ModelFacts:
    hidden, blocks = config.size("hidden_size"), config.size("num_hidden_layers")
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
        intermediate=config.intermediate_size or 4 * hidden,
        vocabulary=config.size("vocab_size"),
        max_length=config.max_position_embeddings,
        type=config.model_type or "",
        sliding_window=None if config.use_sliding_window is False else config.sliding_window,
        even_heads=config.even_heads,
        num_experts=config.experts,
        linears=tuple(sorted(linears, key=lambda linear: linear.name)),
        kv_width=keys[0] if keys else config.kv_width,
        head_size=config.head_size,
        tied=_tied(config, shapes),
        qk_norm=any(name.endswith("q_norm.weight") for name in block),
    )


def _mixture(folder: Path) -> UserError:
    what = "is a mixture of experts, whose files hold each expert apart; that is not read yet"
    return UserError("model.path", f"{folder} {what}", "choose a dense model")


def _tied(config: ModelConfig, shapes: Shapes) -> bool:
    if config.tie_word_embeddings is not None:
        return config.tie_word_embeddings
    return not any(name.endswith(("lm_head.weight", "output.weight", "embed_out.weight")) for name in shapes)


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

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Of every parameter, as the weight files would have them."""
        hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
        heads, size = config.size("num_attention_heads"), config.head_size
        query, kv = heads * size, config.kv_width
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
        vocabulary = config.size("vocab_size")
        made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
        for index in range(config.size("num_hidden_layers")):
            made |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
        made["model.norm.weight"] = (hidden,)
        tied = self.tied if config.tie_word_embeddings is None else config.tie_word_embeddings
        if not tied:
            made["lm_head.weight"] = (vocabulary, hidden)
        return made

    def _biased(self, name: str, config: ModelConfig) -> bool:
        if name.startswith("mlp"):
            return bool(config.mlp_bias)
        return (self.qkv_bias and not name.endswith("o_proj")) or bool(config.attention_bias)


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
