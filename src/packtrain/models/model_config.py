"""What Packtrain reads off a model's config.json, checked once; the names are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from packtrain.config.load import expectation
from packtrain.errors import UserError

Size = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
_AGAIN = "copy or download the model again"
_SHOWN = 60  # characters of a value that is at fault


class ModelConfig(BaseModel):
    """Sizes of a language model; of one that also sees or hears, those of its text part. None: config.json is silent.

    Attributes:
        source: the file, for messages.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())

    source: str
    model_type: str | None = None
    vocab_size: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    num_local_experts: Count | None = None
    num_experts: Count | None = None
    n_routed_experts: Count | None = None
    quantization_config: dict[str, Any] | None = None

    def size(self, key: str) -> int:
        """A size that a model cannot do without.

        Raises:
            UserError: config.json does not give it.
        """
        value = getattr(self, key)
        if value is None:
            raise UserError(self.source, f"has no {key}", "choose a Llama-like model")
        return int(value)

    @property
    def experts(self) -> int:
        """Of a mixture of experts; 0: a dense model."""
        return max(self.num_local_experts or 0, self.num_experts or 0, self.n_routed_experts or 0)

    @property
    def head_size(self) -> int:
        """Of an attention head; 0: config.json tells of no heads."""
        heads = self.num_attention_heads
        return self.head_dim or (self.size("hidden_size") // heads if heads else 0)

    @property
    def kv_width(self) -> int:
        """Key (or value) heads x head size; 0: config.json tells of no heads."""
        return (self.num_key_value_heads or self.num_attention_heads or 0) * self.head_size

    @property
    def even_heads(self) -> bool:
        """Whether the hidden size is attention heads x head size."""
        heads, size = self.num_attention_heads, self.head_dim
        return not heads or not size or heads * size == self.hidden_size


def read_model_config(file: Path) -> ModelConfig:
    """Read config.json, whose ``text_config``, if it has one, goes before the rest.

    Raises:
        UserError: the file cannot be read, is not a JSON object, or says what no model can have.
    """
    whole = _json_object(file)
    text = whole.get("text_config") or {}
    if not isinstance(text, dict):
        raise _wrong(file, "text_config", text, "a mapping")
    values = whole | text | {"source": str(file)}
    try:
        config = ModelConfig.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise _wrong(file, ".".join(map(str, fault["loc"])), fault["input"], expectation(fault)) from None
    _check_heads(config)
    return config


def _json_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(str(file), f"cannot be read ({error.strerror})", "give a readable file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(str(file), "is not valid JSON", _AGAIN) from error
    if not isinstance(values, dict):
        raise UserError(str(file), f"is {_short(values)}, not a JSON object", _AGAIN)
    return values


def _check_heads(config: ModelConfig) -> None:
    heads, groups, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    if heads and groups and heads % groups:
        what = f"num_key_value_heads {groups} does not divide num_attention_heads {heads}"
        raise UserError(config.source, what, _AGAIN)
    if heads and hidden and not config.head_dim and hidden % heads:
        what = f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is no head_dim"
        raise UserError(config.source, what, _AGAIN)


def _wrong(file: Path, key: str, value: Any, expected: str) -> UserError:
    return UserError(str(file), f"{key} is {_short(value)}, not {expected}", _AGAIN)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
