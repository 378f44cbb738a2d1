"""What this machine and this model are, for the rules and for ``auto``."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.schema import Recipe
from packtrain.errors import UserError
from packtrain.models.files import WeightFiles
from packtrain.models.locate import model_folder


def gather_facts(recipe: Recipe, processes: int | None = None) -> Facts:
    """Look at the machine and at the model that ``recipe`` names.

    Args:
        processes: the size of a group that exists already; None: as the recipe says.
    """
    joined = processes is not None
    num_gpus = usable_gpus(recipe)
    device = "cuda" if num_gpus else "cpu"
    if processes is None:
        processes = num_processes(recipe)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if joined else processes
    if joined and num_gpus == 1:  # srun --gpus-per-task shows each process its own GPU only
        local = 1
    return Facts(
        processes=processes,
        local_processes=local,
        device=device,
        num_gpus=num_gpus,
        memory=_gpu_memory() if num_gpus else psutil.virtual_memory().total,
        bf16=_gpu_bf16() if num_gpus else _cpu_bf16(),
        num_cores=len(os.sched_getaffinity(0)),
        model=model_facts(model_folder(recipe.model.path)),
        deepspeed=find_spec("deepspeed") is not None,
    )


def num_processes(recipe: Recipe) -> int:
    """Processes of a run that this machine starts."""
    launch = recipe.launch
    if launch.processes != "auto":
        return launch.processes
    if launch.num_gpus and launch.device != "cpu":
        return launch.num_gpus
    return max(usable_gpus(recipe), 1)


def usable_gpus(recipe: Recipe) -> int:
    """The GPUs that a recipe lets a run have."""
    return 0 if recipe.launch.device == "cpu" else visible_gpus()


def visible_gpus() -> int:
    """GPUs that torch sees; without a driver torch is not even imported."""
    if not (Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi")):
        return 0
    import torch

    return torch.cuda.device_count()


def model_facts(folder: Path) -> ModelFacts:
    """Sizes of a model, from config.json and the headers of its weight files.

    Raises:
        UserError: config.json lacks a size, or the weights are missing or damaged.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(str(file), "is not valid JSON", "copy or download the model again") from error
    if config.get("quantization_config"):
        what = f"is quantised already ({config['quantization_config'].get('quant_method', 'unknown method')})"
        mend = "start from the model it was made from: method qlora quantises it on the way in"
        raise UserError(str(file), what, mend)
    config = config.get("text_config") or config
    try:
        hidden, blocks = int(config["hidden_size"]), int(config["num_hidden_layers"])
        vocabulary = int(config["vocab_size"])
    except KeyError as error:
        raise UserError(str(file), f"has no {error.args[0]}", "choose a Llama-like model") from error
    files = WeightFiles.open(folder)
    if any(".experts.0." in name for name in files.entries):
        what = "is a mixture of experts, whose files hold each expert apart; that is not read yet"
        raise UserError("model.path", f"{folder} {what}", "choose a dense model")
    return ModelFacts(
        num_parameters=files.num_parameters,
        num_blocks=blocks,
        hidden=hidden,
        intermediate=int(config.get("intermediate_size") or 4 * hidden),
        vocabulary=vocabulary,
        max_length=config.get("max_position_embeddings"),
        type=str(config.get("model_type", "")),
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window", True) else None,
        even_heads=_even_heads(config, hidden),
        num_experts=max(int(config.get(key) or 0) for key in _EXPERTS),
    )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _even_heads(config: dict[str, Any], hidden: int) -> bool:
    heads, size = config.get("num_attention_heads"), config.get("head_dim")
    return not heads or not size or heads * size == hidden


def _gpu_memory() -> int:
    import torch

    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def _gpu_bf16() -> bool:
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def _cpu_bf16() -> bool:
    """Whether the processor has bf16 products (AVX512-BF16 or AMX); elsewhere torch emulates them."""
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    return "avx512_bf16" in flags or "amx_bf16" in flags
