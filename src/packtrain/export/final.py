"""The ``final`` folder: a PEFT adapter or Hugging Face weights, tokenizer, chat template and model card."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from packtrain.data.tokenizer import load_tokenizer
from packtrain.export.card import model_card
from packtrain.export.tensors import gathered_adapters, gathered_model, peft_key, write_sharded
from packtrain.models.names import file_key
from packtrain.train.session import Session

_COPIED = ("config.json", "generation_config.json")


def save_final(session: Session) -> Path:
    """Write ``final/`` in the run folder, whole or not at all. Every rank calls this; rank 0 writes."""
    final = session.folder / "final"
    temporary = final.with_name("final.tmp")
    if session.world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    if session.recipe.method.type == "lora":
        _save_adapter(session, temporary)
    else:
        _save_model(session, temporary)
    if session.world.is_main:
        _save_tokenizer(session, temporary)
        (temporary / "README.md").write_text(model_card(session), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
    session.world.barrier()
    return final


def _save_model(session: Session, folder: Path) -> None:
    tensors = gathered_model(session)
    if not session.world.is_main:
        for _ in tensors:  # take part in gathering
            pass
        return
    write_sharded(tensors, folder)
    for name in _COPIED:
        if (session.model_folder / name).is_file():
            shutil.copyfile(session.model_folder / name, folder / name)


def _save_adapter(session: Session, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = gathered_adapters(session)
    if not session.world.is_main:
        return
    model: Any = session.built.model.model
    config = copy.deepcopy(model.peft_config["default"])
    if session.built.start is not None:
        tensors = _against_base(session, tensors)
        factor = 2**0.5 if config.use_rslora else 2  # keeps alpha over (the root of) the doubled rank
        config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * factor
    config.inference_mode = True
    config.save_pretrained(folder)
    save_file(
        {peft_key(name): t.contiguous() for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def _against_base(session: Session, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PiSSA's adapters as the difference to their start, which fits the unchanged base model."""
    start = session.built.start
    assert start is not None
    changed = {}
    for name in [n for n in tensors if ".lora_A." in n]:
        other = name.replace(".lora_A.", ".lora_B.")
        key = file_key(name).split(".lora_")[0] + ".weight"
        changed[name], changed[other] = start.difference(key, tensors[name], tensors[other])
    return changed


def _save_tokenizer(session: Session, folder: Path) -> None:
    tokenizer = load_tokenizer(session.model_folder)
    tokenizer.chat_template = session.data.template
    tokenizer.save_pretrained(folder)
