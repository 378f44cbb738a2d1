"""A model as its users will load it: plain transformers, and peft for an adapter."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from packtrain.models.locate import model_folder


def load_for_generation(folder: Path, dtype: str, device: str, vocabulary: int) -> Any:
    """The model in ``folder`` ready to generate; a LoRA adapter is put on its base model and merged in.

    Args:
        dtype: ``bf16`` or ``fp32``. device: ``cpu`` or ``cuda``.
        vocabulary: tokens of the tokenizer; a base model that knows fewer grows.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return _load(folder, torch_dtype, vocabulary).to(device).eval()
    from peft import PeftModel

    config = json.loads(adapter.read_text(encoding="utf-8"))
    own = folder / "base"  # where the adapter's file cannot hold all that was trained
    base = own if own.is_dir() else model_folder(config["base_model_name_or_path"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of names that transformers will drop
        warnings.simplefilter("ignore", UserWarning)  # of tied tables in an adapter, which holds both alike
        model: Any = PeftModel.from_pretrained(_load(base, torch_dtype, vocabulary), folder)
        if config["peft_type"] == "LORA":
            model = model.merge_and_unload()
        return model.to(device).eval()


def _load(folder: Path, dtype: Any, vocabulary: int) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    if vocabulary > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(vocabulary)
    return model
