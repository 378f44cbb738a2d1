"""Parameter names: as the built model has them, and as weight files and adapters have them."""

from __future__ import annotations

from torch import nn

_PEFT_PREFIX = "base_model.model."


def original_names(model: nn.Module) -> dict[nn.Module, str]:
    """The name of each module before adapters are put around some of them: the one that weight files use."""
    return {module: name for name, module in model.named_modules()}


def file_key(name: str) -> str:
    """The weight file's key of a parameter of a LoRA layer's base, from the name it has in the built model."""
    name = name.removeprefix("model.").removeprefix(_PEFT_PREFIX)
    return name.replace(".base_layer.", ".")


NEW_ROWS = "new_rows"
"""The parameter that holds the rows of added tokens, in the embedding and in the head."""


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter rather than to the base model."""
    return any(part in name for part in (".lora_", ".adaption_", ".prompt_encoder."))
