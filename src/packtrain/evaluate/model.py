"""A model as its users will load it: plain transformers, and peft for an adapter."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from packtrain.models.locate import model_folder


def load_for_generation(folder: Path, dtype: str, device: str) -> Any:
    """The model in ``folder`` ready to generate; an adapter is put on its base model and merged in.

    Args:
        dtype: ``bf16`` or ``fp32``. device: ``cpu`` or ``cuda``.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, local_files_only=True)
        return whole.to(device).eval()
    from peft import PeftModel

    base = model_folder(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch_dtype, local_files_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of names that transformers will drop
        return PeftModel.from_pretrained(model, folder).merge_and_unload().to(device).eval()
