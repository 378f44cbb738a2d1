"""What this machine is: GPUs, versions, compilers, memory and disks. Starts without torch."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from packtrain.config.cache_folder import cache_root
from packtrain.launch.disk_space import existing
from packtrain.launch.gpus import visible
from packtrain.launch.host import SHARED_MEMORY, torch_cuda
from packtrain.launch.nvml import look

OPTIONAL = ("deepspeed", "bitsandbytes", "datasets", "tensorboard", "wandb")
NEEDED = ("torch", "transformers", "peft", "triton")
PROGRAMS = ("gcc", "g++", "ninja")


def inventory() -> dict[str, Any]:
    """The machine as plain values: bytes, versions, and None where something is not there."""
    driver = look()
    return {
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory} for gpu in driver.devices],
        "visible_gpus": len(visible([(gpu.id, 0) for gpu in driver.devices])) if driver.devices else 0,
        "driver": driver.version or None,
        "driver_cuda": driver.cuda or None,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in NEEDED},
        "torch_cuda": torch_cuda() or None,
        "optional_packages": {name: _version(name) for name in OPTIONAL},
        "programs": {name: shutil.which(name) for name in PROGRAMS},
        "num_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": psutil.virtual_memory().total,
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        "free_disk_bytes": {str(folder): shutil.disk_usage(existing(folder)).free for folder in _folders()},
        "master_port": os.environ.get("MASTER_PORT"),
    }


def _folders() -> tuple[Path, ...]:
    """Where runs go by default, and where models and tokenised data are kept."""
    return Path("runs").absolute(), cache_root().absolute()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
