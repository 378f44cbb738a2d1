"""A causal language model without memory: built on the meta device from its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from packtrain.models import attention
from packtrain.models.foreign import refused


def load_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The transformers config of a model folder.

    Raises:
        UserError: config.json is damaged, or its architecture is unknown to the installed transformers.
    """
    from transformers import AutoConfig

    with refused(str(folder / "config.json"), "cannot be used", "check the folder and your transformers"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def meta_model(config: Any, dtype: torch.dtype, attention_name: str, trust_remote_code: bool = False) -> nn.Module:
    """The model on the meta device, all parameters in ``dtype``."""
    from transformers import AutoModelForCausalLM

    attention.register()
    with (
        refused("model.path", f"{type(config).__name__} cannot be trained", "choose a causal LM"),
        torch.device("meta"),
    ):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_name, trust_remote_code=trust_remote_code
        )


def rebuild_buffers(model: nn.Module) -> None:
    """Recompute what no weight file holds and ``to_empty`` lost: rotary tables, Gemma's embedding scale.

    transformers' own ``_init_weights`` does it, module by module; the parameters beside such a buffer are marked
    as initialised so that it leaves them alone.
    """
    for module in model.modules():
        if not module._non_persistent_buffers_set:
            continue
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        model._init_weights(module)  # type: ignore[operator]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put all buffers on the device that computes; parameters may lie elsewhere."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
