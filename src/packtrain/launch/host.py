"""What lies under torch on this machine: the driver, compilers, shared memory. Starts without torch."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from packtrain.config.facts import Host
from packtrain.launch.gpus import visible
from packtrain.launch.nvml import look

SHARED_MEMORY = Path("/dev/shm")


def gather_host(several_nodes: bool = False) -> Host:
    """Look at the machine; takes a fraction of a second.

    Args:
        several_nodes: whether other nodes must find this one, so that its name is looked up.
    """
    driver = look()
    return Host(
        gpus=len(visible([(device.id, 0) for device in driver.devices])) if driver.devices else 0,
        driver=driver.version,
        driver_cuda=driver.cuda,
        torch_cuda=torch_cuda(),
        nccl=_loaded_nccl(),
        torch_nccl=_own_nccl(),
        c_compiler=_program("CC", "gcc", "clang"),
        cxx_compiler=_program("CXX", "g++", "c++", "clang++"),
        python_headers=any((Path(folder) / "Python.h").is_file() for folder in _include_folders()),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        bitsandbytes=find_spec("bitsandbytes") is not None,
        resolves=not several_nodes or "GLOO_SOCKET_IFNAME" in os.environ or _resolves(socket.gethostname()),
    )


def torch_cuda() -> str:
    """The CUDA that torch was built for, from its files; empty for a CPU build."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ""
    said = re.search(r"^cuda\b.*=\s*'([\d.]+)'", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE)
    return said[1] if said else ""


def _own_nccl() -> str:
    """The NCCL that the torch package asks for; empty where it names none, as one built from source."""
    try:
        needed = " ".join(requires("torch") or [])
    except PackageNotFoundError:
        return ""
    found = re.search(r"nvidia-nccl-cu\d+==([\d.]+)", needed)
    return found[1] if found else ""


def _loaded_nccl() -> str:
    """The NCCL that torch has loaded, where a look for GPUs has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.version.cuda or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()[:3]))


def _program(variable: str, *names: str) -> bool:
    """Whether there is a compiler: the one that the environment names, or else any of these."""
    named = os.environ.get(variable, "").split()
    return any(shutil.which(name) for name in (named[:1] or names))


def _include_folders() -> list[str]:
    named = ":".join(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))
    return [sysconfig.get_path("include"), *filter(None, named.split(":"))]


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
