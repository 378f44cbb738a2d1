"""Parameter names: as the built model has them, and as weight files and adapters have them."""

from __future__ import annotations

_PEFT_PREFIX = "base_model.model."


def file_key(name: str) -> str:
    """The weight file's key of a parameter: without the loss module around the model, peft's prefix and layers."""
    name = name.removeprefix("model.").removeprefix(_PEFT_PREFIX)
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to a LoRA layer rather than to the base model."""
    return ".lora_" in name
