"""LoRA through peft, started by us: alike on all ranks and for any number of them.

peft builds the layers on the meta device, around plain or quantised linears; A, B and DoRA's magnitudes get their
values when the shards exist. Sources: LoRA https://arxiv.org/abs/2106.09685, QLoRA https://arxiv.org/abs/2305.14314,
rsLoRA https://arxiv.org/abs/2312.03732, DoRA https://arxiv.org/abs/2402.09353, LoRA+ https://arxiv.org/abs/2402.12354.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from packtrain.adapters.start import uniform
from packtrain.adapters.targets import find_targets
from packtrain.config.schema import MethodSection
from packtrain.models.plan import ModelPlan
from packtrain.models.quantized import QuantizedLinear, dequantize
from packtrain.models.weights import local_slices, local_tensor

_ROWS = 512  # of a weight, whose norms are taken at once


def add_lora(model: nn.Module, plan: ModelPlan, method: MethodSection, base: str) -> Any:
    """The peft model around a meta-device ``model``; only the adapters are trainable.

    Args:
        base: what the adapter's config names as its base model.
    """
    from peft import LoraConfig

    names = find_targets(model, plan, method.targets)
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,  # type: ignore[arg-type]
        lora_dropout=method.dropout,
        target_modules=shortest_tails(names, [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]),
        use_rslora=method.rslora,
        use_dora=method.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return wrap(model, config, base)


def wrap(model: nn.Module, config: Any, base: str) -> Any:
    """peft's model around a meta-device ``model``, whose adapter will name ``base`` as what it belongs to."""
    from peft import get_peft_model

    vars(model)["name_or_path"] = base  # where peft looks for the base model's name
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of names that transformers will drop
        return get_peft_model(model, config, autocast_adapter_dtype=False)


def shortest_tails(names: list[str], others: list[str]) -> list[str]:
    """Short names that select exactly ``names`` among ``others``, so that a saved config stays readable."""
    tails = sorted({name.rsplit(".", 1)[-1] for name in names})
    selected = [n for n in others if n.rsplit(".", 1)[-1] in tails]
    return tails if set(selected) == set(names) else sorted(names)


def start_adapters(model: nn.Module, named: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Fill the local shards of adapters among the parameters ``named`` of ``model``: A uniform, B zero, DoRA's
    magnitudes the norms of the base weight's rows.

    The base weights are in already. Each tensor's random stream is keyed by (seed, name), so a value depends on
    nothing else.
    """
    with torch.no_grad():
        for name, parameter in named:
            local = local_tensor(parameter)
            if ".lora_A." in name:
                local.copy_(uniform(name, tuple(parameter.shape), seed)[local_slices(parameter)])
            elif ".lora_B." in name:
                local.zero_()
            elif ".lora_magnitude_vector." in name:
                local.copy_(_row_norms(model.get_submodule(name.split(".lora_")[0] + ".base_layer")))


def _row_norms(linear: nn.Module) -> torch.Tensor:
    """Norms of this rank's rows of a weight as it is stored, (rows,) float32; magnitudes are sharded like rows."""
    if isinstance(linear, QuantizedLinear):
        packed, scales = local_tensor(linear.packed), local_tensor(linear.scales)
        parts = [
            dequantize(linear.quantization, p, s, linear.storage)
            for p, s in zip(packed.split(_ROWS), scales.split(_ROWS), strict=True)
            if len(p)
        ]
    else:
        weight: torch.Tensor = linear.weight  # type: ignore[assignment]
        parts = list(local_tensor(weight).split(_ROWS))
    norms = [part.float().norm(dim=1) for part in parts]
    return torch.cat(norms) if norms else torch.empty(0)


def learning_rate_factor(name: str, method: MethodSection) -> float:
    """LoRA+: B learns ``method.lora_plus`` times as fast as A."""
    return method.lora_plus if ".lora_B." in name else 1.0
