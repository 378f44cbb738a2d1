"""What this machine and this model are, for the rules and for ``auto``."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import psutil

from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe
from packtrain.launch.calibration import known_rates
from packtrain.launch.host import gather_host
from packtrain.launch.model_facts import model_facts, planned_model_facts
from packtrain.models.locate import model_folder


def gather_facts(recipe: Recipe, processes: int | None = None, planned: bool = False) -> Facts:
    """Look at the machine and at the model that ``recipe`` names.

    Args:
        processes: the size of a group that exists already; None: as the recipe says.
        planned: config.json of the model will do, and what lies under torch is not looked at; nothing is trained.
    """
    joined = processes is not None
    num_gpus = usable_gpus(recipe)
    device = "cuda" if num_gpus else "cpu"
    if processes is None:
        processes = num_processes(recipe)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if joined else processes
    if joined and num_gpus == 1:  # srun --gpus-per-task shows each process its own GPU only
        local = 1
    gpu = gpu_name() if num_gpus else ""
    folder = model_folder(recipe.model.path, config_only=planned)
    model = planned_model_facts(folder) if planned else model_facts(folder)
    return Facts(
        processes=processes,
        local_processes=local,
        device=device,
        num_gpus=num_gpus,
        memory=_gpu_memory() if num_gpus else psutil.virtual_memory().total,
        bf16=_gpu_bf16() if num_gpus else _cpu_bf16(),
        num_cores=len(os.sched_getaffinity(0)),
        model=model,
        deepspeed=find_spec("deepspeed") is not None,
        gpu=gpu,
        host_memory=psutil.virtual_memory().total,
        rates=known_rates(gpu, recipe, model, nodes=-(-processes // local)),
        host=None if planned else gather_host(several_nodes=processes > local),
    )


def num_processes(recipe: Recipe, gpus: int | None = None) -> int:
    """Processes of a run that a machine of so many GPUs starts; None: this machine."""
    launch = recipe.launch
    if launch.processes != "auto":
        return launch.processes
    if launch.num_gpus and launch.device != "cpu":
        return launch.num_gpus
    return max(usable_gpus(recipe) if gpus is None else gpus, 1)


def usable_gpus(recipe: Recipe) -> int:
    """The GPUs that a recipe lets a run have."""
    return 0 if recipe.launch.device == "cpu" else visible_gpus()


def visible_gpus() -> int:
    """GPUs that torch sees; without a driver torch is not even imported."""
    if not (Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi")):
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


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
