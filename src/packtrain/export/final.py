"""The ``final`` folder: a PEFT adapter or Hugging Face weights, tokenizer, chat template and model card."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from packtrain.data.tokenizer import load_tokenizer
from packtrain.export.card import model_card
from packtrain.export.tensors import gathered_adapters, gathered_model, gathered_parts, peft_key, write_sharded
from packtrain.models.names import file_key
from packtrain.train.session import Session

COPIED = ("config.json", "generation_config.json")


def save_final(session: Session) -> Path:
    """Write ``final/`` in the run folder, whole or not at all. Every rank calls this; rank 0 writes."""
    final = session.folder / "final"
    temporary = final.with_name("final.tmp")
    if session.world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    if session.recipe.method.is_adapter:
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
    folder.mkdir(exist_ok=True)
    write_sharded(tensors, folder)
    for name in COPIED:
        if (session.model_folder / name).is_file():
            shutil.copyfile(session.model_folder / name, folder / name)
    if session.built.added:
        grow_config(folder / "config.json", session.built.added.end)


def grow_config(file: Path, vocabulary: int) -> None:
    """State the vocabulary's new size where the added tokens made it larger."""
    config = json.loads(file.read_text(encoding="utf-8"))
    owner = config.get("text_config") or config
    owner["vocab_size"] = max(owner["vocab_size"], vocabulary)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _save_adapter(session: Session, folder: Path) -> None:
    """An adapter as peft writes it. Parts of the model trained beside LoRA go into the adapter's file; the other
    adapters have no place for them, so the changed base model is saved too, in ``base/``.
    """
    lora, changed = session.recipe.method.is_lora, changed_modules(session)
    tensors = {peft_key(name): tensor for name, tensor in _adapter_tensors(session).items()}
    if changed and lora:
        # A tied embedding and head are one tensor here, which a file must hold twice.
        tensors |= {f"base_model.model.{key}": t.clone() for key, t in gathered_parts(session, changed).items()}
    elif changed:
        _save_model(session, folder / "base")
    if not session.world.is_main:
        return
    model: Any = session.built.model.model
    config = copy.deepcopy(model.peft_config["default"])
    if session.built.start is not None:
        factor = 2**0.5 if config.use_rslora else 2  # keeps alpha over (the root of) the doubled rank
        config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * factor
    if changed and lora:
        config.modules_to_save = changed
    elif changed:
        config.base_model_name_or_path = str((session.folder / "final" / "base").absolute())
    config.inference_mode = True
    config.save_pretrained(folder)
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def changed_modules(session: Session) -> list[str]:
    """Modules of the base model that were trained beside an adapter, an embedding and its head together where tied."""
    plan, built = session.built.plan, session.built
    names = {"embedding": plan.embedding, "norm": plan.norm, "head": plan.head}
    found = {names[part] for part in session.recipe.method.also_train}
    if built.added or (plan.tied and found & {plan.embedding, plan.head}):
        found |= {plan.embedding, plan.head}
    return sorted(name for name in found if name)


def _adapter_tensors(session: Session) -> dict[str, torch.Tensor]:
    tensors = gathered_adapters(session)
    return _against_base(session, tensors) if tensors and session.built.start is not None else tensors


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
    tokenizer = load_tokenizer(session.model_folder, session.recipe.model.add_tokens)
    tokenizer.chat_template = session.data.template
    tokenizer.save_pretrained(folder)
