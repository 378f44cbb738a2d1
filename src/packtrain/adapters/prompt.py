"""Prompt learners of peft: LLaMA-Adapter and prefix tuning, started by us alike on all ranks.

Sources: LLaMA-Adapter https://arxiv.org/abs/2303.16199, prefix tuning https://arxiv.org/abs/2101.00190.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from packtrain.adapters.lora import wrap
from packtrain.adapters.start import normal
from packtrain.config.schema import MethodSection
from packtrain.errors import UserError
from packtrain.models.plan import ModelPlan
from packtrain.models.prefix import Prefix
from packtrain.models.weights import local_slices, local_tensor

# peft starts a prefix at standard deviation 1, which drowns the model's own values at first.
_PREFIX_DEVIATION = 0.02


def add_llama_adapter(model: nn.Module, method: MethodSection, base: str) -> Any:
    """The peft model around a meta-device ``model`` with gated prompts in its last ``adapter_blocks`` blocks."""
    from peft import AdaptionPromptConfig

    length, count = method.virtual_tokens, method.adapter_blocks
    assert isinstance(length, int) and isinstance(count, int), "resolve comes first"
    return wrap(model, AdaptionPromptConfig(adapter_len=length, adapter_layers=count, task_type="CAUSAL_LM"), base)


def add_prefix(model: nn.Module, plan: ModelPlan, method: MethodSection, base: str) -> tuple[Any, Prefix]:
    """The peft model around a meta-device ``model``, and its prefix.

    Raises:
        UserError: blocks with keys of different shapes.
    """
    from peft import PrefixTuningConfig

    assert isinstance(method.virtual_tokens, int), "resolve comes first"
    wrapped = wrap(model, PrefixTuningConfig(num_virtual_tokens=method.virtual_tokens, task_type="CAUSAL_LM"), base)
    made = wrapped.peft_config["default"]
    widths = {m.out_features for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.endswith(".k_proj")}
    if widths - {made.token_dim}:
        raise UserError("method.type", "prefix tuning needs blocks with keys of one shape", "choose lora")
    encoder = wrapped.prompt_encoder["default"]
    return wrapped, Prefix(encoder, method.virtual_tokens, plan.num_blocks, made.num_attention_heads)


def start_prompts(named: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Fill the local shards of prompts and gates among ``named``: prompts normal, gates zero, as in the papers."""
    with torch.no_grad():
        for name, parameter in named:
            local = local_tensor(parameter)
            if name.endswith(".adaption_gate"):
                local.zero_()
            elif name.endswith(".adaption_prompt"):
                local.copy_(normal(name, tuple(parameter.shape), seed, 1.0)[local_slices(parameter)])
            elif ".prompt_encoder." in name:
                local.copy_(normal(name, tuple(parameter.shape), seed, _PREFIX_DEVIATION)[local_slices(parameter)])
