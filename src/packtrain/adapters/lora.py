"""LoRA through peft, started by us: alike on all ranks and for any number of them.

peft builds the layers on the meta device; A, B and DoRA's magnitudes get their values when the shards exist.
Sources: LoRA https://arxiv.org/abs/2106.09685, rsLoRA https://arxiv.org/abs/2312.03732, DoRA
https://arxiv.org/abs/2402.09353, LoRA+ https://arxiv.org/abs/2402.12354.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import Any

import torch
from torch import nn

from packtrain.adapters.targets import find_targets
from packtrain.config.schema import MethodSection
from packtrain.models.files import WeightFiles
from packtrain.models.names import file_key, is_adapter
from packtrain.models.plan import ModelPlan
from packtrain.models.weights import WeightReader, local_slices, local_tensor, resolve_key


def add_lora(model: nn.Module, plan: ModelPlan, method: MethodSection, base: str) -> Any:
    """The peft model around a meta-device ``model``; only the adapters are trainable.

    Args:
        base: what the adapter's config names as its base model.
    """
    from peft import LoraConfig, get_peft_model

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
    vars(model)["name_or_path"] = base  # where peft looks for the base model's name
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of names that transformers will drop
        return get_peft_model(model, config, autocast_adapter_dtype=False)


def shortest_tails(names: list[str], others: list[str]) -> list[str]:
    """Short names that select exactly ``names`` among ``others``, so that a saved config stays readable."""
    tails = sorted({name.rsplit(".", 1)[-1] for name in names})
    selected = [n for n in others if n.rsplit(".", 1)[-1] in tails]
    return tails if set(selected) == set(names) else sorted(names)


def start_adapters(model: nn.Module, files: WeightFiles, decoder: str, seed: int) -> None:
    """Fill the adapters' local shards: A uniform, B zero, DoRA's magnitudes the norms of the base weight's rows.

    Each tensor's random stream is keyed by (seed, name), so a value depends on nothing else.
    """
    with WeightReader(files) as reader, torch.no_grad():
        for name, parameter in model.named_parameters():
            if not is_adapter(name):
                continue
            local, slices = local_tensor(parameter), local_slices(parameter)
            if ".lora_B." in name:
                local.zero_()
            elif local.numel() == 0:
                continue
            elif ".lora_A." in name:
                local.copy_(random_a(name, tuple(parameter.shape), seed)[slices])
            else:
                local.copy_(_row_norms(reader, name, slices, decoder))


def random_a(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """LoRA's A, (rank, in) float32: uniform in +-1/sqrt(in), which is peft's Kaiming start."""
    digest = hashlib.sha256(f"{seed}:{file_key(name)}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[-1])


def _row_norms(reader: WeightReader, name: str, slices: tuple[slice, ...], decoder: str) -> torch.Tensor:
    """Norms of the rows of the base weight that this rank's magnitudes belong to, (rows,) float32."""
    key = resolve_key(reader.files, file_key(name).split(".lora_")[0] + ".weight", decoder)
    assert key is not None, name
    return reader.read(key, (slices[0], slice(None))).float().norm(dim=1)


def learning_rate_factor(name: str, method: MethodSection) -> float:
    """LoRA+: B learns ``method.lora_plus`` times as fast as A."""
    return method.lora_plus if ".lora_B." in name else 1.0
