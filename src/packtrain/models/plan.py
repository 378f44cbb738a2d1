"""ModelPlan: where a decoder-only model of transformers keeps its blocks, embedding, final norm and head.

Data, not code. It is read off the meta-device model, so any architecture works whose blocks can be found; what an
architecture does beyond ``head(decoder(ids))`` (a soft cap, a logit scale) is a value here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packtrain.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelPlan:
    """Module names, dotted, relative to the causal language model."""

    decoder: str
    blocks: str
    embedding: str
    norm: str | None
    head: str
    num_blocks: int
    tied: bool
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def block_names(self) -> list[str]:
        return [f"{self.blocks}.{i}" for i in range(self.num_blocks)]


def find_plan(model: nn.Module, config: Any) -> ModelPlan:
    """Read the plan off a causal language model (on any device, meta included).

    Raises:
        UserError: the blocks, the embedding or the head cannot be found.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    decoder = getattr(model, model.base_model_prefix, None)  # type: ignore[call-overload]
    if embedding is None or head is None or decoder is None or decoder is model:
        raise UserError(
            "model.path", f"{type(model).__name__} is not a decoder-only language model", "choose a causal LM"
        )
    blocks = _blocks(decoder, _text_config(config).num_hidden_layers)
    if blocks is None:
        raise UserError(
            "model.path", f"the blocks of {type(model).__name__} cannot be found", "choose a Llama-like model"
        )
    return ModelPlan(
        decoder=names[id(decoder)],
        blocks=names[id(blocks)],
        embedding=names[id(embedding)],
        norm=_norm(decoder, blocks, names),
        head=names[id(head)],
        num_blocks=len(blocks),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=_logit_scale(config),
    )


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _blocks(decoder: nn.Module, count: int) -> nn.ModuleList | None:
    from torch import nn

    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return lists[0] if lists else None


def _norm(decoder: nn.Module, blocks: nn.ModuleList, names: dict[int, str]) -> str | None:
    """The last direct child of the decoder that is called a norm."""
    found = [m for name, m in decoder.named_children() if "norm" in name.lower() or name in ("ln_f", "final_layernorm")]
    return names[id(found[-1])] if found else None


def _logit_scale(config: Any) -> float:
    scaling = getattr(config, "logits_scaling", None)
    if scaling:  # Granite divides by it, HyperCLOVA X multiplies
        return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)
    return float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
