"""A LoRA adapter merged into its base model, tensor by tensor: no more than one weight is in memory.

A QLoRA adapter was trained on the quantised base, so that is what it is merged into, in 16 bits: each weight passes
through its quantised form first. Merging into four bits again would move the logits by a tenth of their spread.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from packtrain.adapters.pissa import START_FILE, PissaStart
from packtrain.config import Recipe
from packtrain.errors import UserError
from packtrain.export.final import COPIED, grow_config
from packtrain.export.tensors import write_sharded
from packtrain.models import attention
from packtrain.models.files import WeightFiles
from packtrain.models.meta import load_config, meta_model
from packtrain.models.plan import find_plan
from packtrain.models.quantize import Quantization
from packtrain.models.weights import WeightReader, torch_dtype
from packtrain.train.build import DTYPES, quantize

_PREFIX = "base_model.model."


@dataclass
class Adapter:
    """A peft LoRA adapter on the CPU.

    Attributes:
        tensors: by peft's names, without the prefix that all have.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def load(cls, folder: Path) -> Adapter:
        stored = load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return cls(config, {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()})

    def targets(self, key: str) -> bool:
        """Whether the weight ``key`` has an update of its own."""
        return key.removesuffix("weight") + "lora_A.weight" in self.tensors

    def merged(self, key: str, weight: torch.Tensor, own_rank: int | None = None) -> torch.Tensor:
        """``weight`` (out, in) with its update, float32: W + s B A, or DoRA's rows of learned length.

        Args:
            own_rank: take the first so many of the adapter's directions only.
        """
        module = key.removesuffix(".weight")
        a, b = (self.tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
        a, b = a[:own_rank], b[:, :own_rank]
        rank = self.config["r"]
        scale = self.config["lora_alpha"] / (rank**0.5 if self.config["use_rslora"] else rank)
        merged = weight.float() + scale * (b @ a)
        magnitude = self.tensors.get(f"{module}.lora_magnitude_vector")
        if magnitude is not None:
            merged *= (magnitude.float() / merged.norm(dim=1)).unsqueeze(1)
        return merged


def merge(recipe: Recipe, final: Path, base: Path, target: Path) -> int:
    """Write the merged model into ``target``, whole or not at all.

    Args:
        recipe: of the run, resolved. final: its ``final/``. base: the folder of the model it started from.

    Returns:
        The number of weights that were changed.

    Raises:
        UserError: the folder cannot be made.
    """
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        what = f"{temporary.parent} cannot be written ({error.strerror})"
        raise UserError("--to", what, "name a folder of yours") from error
    adapter, layout = Adapter.load(final), _layout(recipe, base)
    start_file = final.with_name(START_FILE)
    quantized_start = recipe.method.type == "qlora" and recipe.method.start == "pissa"
    start = PissaStart.load(start_file, recipe.method) if quantized_start else None
    write_sharded(_tensors(recipe, layout, adapter, start), temporary)
    _copy_rest(base, final, temporary, adapter)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(temporary, target)
    return sum(key in adapter.tensors or adapter.targets(key) for key in layout.keys.values())


@dataclass(frozen=True)
class _Layout:
    """The base model's files.

    Attributes:
        keys: of each tensor in the files, its name in the whole model.
        quantized: the weights that training had quantised.
    """

    files: WeightFiles
    keys: dict[str, str]
    quantized: frozenset[str]


def _layout(recipe: Recipe, base: Path) -> _Layout:
    files, config = WeightFiles.open(base), load_config(base, recipe.model.trust_remote_code)
    compute = DTYPES[recipe.train.precision]
    model = meta_model(config, compute, attention.MASKED, recipe.model.trust_remote_code)
    plan, known = find_plan(model, config), set(model.state_dict())
    keys = {name: name if name in known else f"{plan.decoder}.{name}" for name in files.entries}
    return _Layout(files, keys, frozenset(f"{name}.weight" for name in quantize(model, plan, recipe, compute)))


def _tensors(
    recipe: Recipe, layout: _Layout, adapter: Adapter, start: PissaStart | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the merged model, in the dtype of the base model's files and under their names.

    Args:
        start: where PiSSA started on a quantised base: what was quantised is the weight without it, and the first half
            of the adapter's directions is what was trained on that.
    """
    own_rank = recipe.method.rank if start else None
    with WeightReader(layout.files) as reader:
        for name, key in layout.keys.items():
            entry = layout.files.entries[name]
            dtype = torch_dtype(entry)
            if key in adapter.tensors:  # trained whole
                yield name, adapter.tensors[key].to(dtype)
                continue
            everything = tuple(slice(0, size) for size in entry.shape)
            weight = reader.read(name, everything)
            if start:
                weight = start.residual(key, everything, weight)
            if key in layout.quantized:
                weight = as_trained(recipe, weight)
            yield name, (adapter.merged(key, weight, own_rank) if adapter.targets(key) else weight).to(dtype)


def as_trained(recipe: Recipe, weight: torch.Tensor) -> torch.Tensor:
    """A quantised weight as the forward pass of training saw it."""
    quantization = Quantization(recipe.method.quantize, recipe.method.double_quant)
    return quantization.dequantize(*quantization.quantize(weight), DTYPES[recipe.train.precision])


def _copy_rest(base: Path, final: Path, target: Path, adapter: Adapter) -> None:
    for name in COPIED:
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)
    for file in final.iterdir():
        if file.is_file() and not file.name.startswith("adapter_") and file.name != "README.md":
            shutil.copyfile(file, target / file.name)
    tables = [t.shape[0] for key, t in adapter.tensors.items() if key.endswith("embed_tokens.weight")]
    if tables:
        grow_config(target / "config.json", max(tables))
