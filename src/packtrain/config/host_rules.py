"""What the machine under torch lacks: a part of the table in ``rules.py``. None holds where nobody has looked."""

from __future__ import annotations

from packtrain.config.facts import Facts
from packtrain.config.rule import Broken, Rule
from packtrain.config.schema import Recipe

SHARED_MEMORY = 2**30
"""Bytes of /dev/shm from which NCCL has enough for the GPUs of a node; containers have 64 MiB unless asked for more."""


def _driver_old(recipe: Recipe, facts: Facts) -> Broken | None:
    """A driver that is older than the CUDA of this torch."""
    host = facts.host
    if host is None or recipe.launch.device == "cpu" or not (host.driver_cuda and host.torch_cuda):
        return None
    if _major(host.driver_cuda) >= _major(host.torch_cuda):  # any driver of a major version runs all of its minor ones
        return None
    what = f"driver {host.driver} runs CUDA up to {host.driver_cuda}, and torch was built for {host.torch_cuda}"
    return Broken(what, f"update the driver, or install a torch for CUDA {_major(host.driver_cuda)}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _torch_blind(recipe: Recipe, facts: Facts) -> Broken | None:
    """The driver shows GPUs and torch sees none."""
    host = facts.host
    if host is None or recipe.launch.device == "cpu" or facts.num_gpus or not host.gpus or _driver_old(recipe, facts):
        return None
    what = f"driver {host.driver} shows {host.gpus} GPU{'s' * (host.gpus > 1)}, and torch sees none"
    if not host.torch_cuda:
        return Broken(
            f"{what}: it is built for the CPU", "install the CUDA build of torch, or set launch.device to cpu"
        )
    mend = "see what `python -c 'import torch; torch.cuda.init()'` says, or set launch.device to cpu"
    return Broken(what, mend)


def _nccl_other(recipe: Recipe, facts: Facts) -> Broken | None:
    """Another NCCL is loaded than torch came with."""
    host = facts.host
    if host is None or facts.device != "cuda" or facts.processes == 1 or not (host.nccl and host.torch_nccl):
        return None
    if host.nccl == host.torch_nccl:
        return None
    what = f"NCCL {host.nccl} is loaded, and torch came with {host.torch_nccl}"
    return Broken(what, "take the other one out of LD_PRELOAD and LD_LIBRARY_PATH, or reinstall torch")


def _shared_memory(recipe: Recipe, facts: Facts) -> Broken | None:
    """Less than 1 GiB of shared memory for several GPUs."""
    host = facts.host
    if host is None or facts.device != "cuda" or facts.local_processes == 1 or host.shared_memory >= SHARED_MEMORY:
        return None
    what = f"/dev/shm holds {host.shared_memory / 2**20:.0f} MiB, which NCCL may fill with {facts.local_processes} GPUs"
    return Broken(what, "start the container with --shm-size=1g or more, or mount a larger /dev/shm")


def _missing(facts: Facts) -> tuple[str, str] | None:
    """What compiling for the run's device lacks, and how it is installed."""
    host = facts.host
    if host is None:
        return None
    if facts.device == "cuda" and not host.c_compiler:
        return "a C compiler, and there is none", "install gcc"
    if facts.device == "cpu" and not host.cxx_compiler:
        return "a C++ compiler, and there is none", "install g++"
    if not host.python_headers:
        return "Python.h, which this Python lacks", "install python3-dev"
    return None


def _compile(recipe: Recipe, facts: Facts) -> Broken | None:
    """Compiled blocks without a compiler, or without Python's headers."""
    if recipe.parallel.compile is not True or not (missing := _missing(facts)):
        return None
    edits = {"parallel.compile": False}
    return Broken(f"torch.compile needs {missing[0]}", f"{missing[1]}, or set parallel.compile to false", edits)


def _uncompiled(recipe: Recipe, facts: Facts) -> Broken | None:
    """Blocks that ``auto`` leaves uncompiled on a GPU, for want of a compiler."""
    if recipe.parallel.compile != "auto" or facts.device != "cuda" or not (missing := _missing(facts)):
        return None
    mend = f"{missing[1]}, or set parallel.compile to false"
    return Broken(f"blocks stay uncompiled, and slower: that needs {missing[0]}", mend, {"parallel.compile": False})


def _kernels(recipe: Recipe, facts: Facts) -> Broken | None:
    """``qlora`` on a GPU, whose kernels are compiled, without a compiler."""
    if recipe.method.type != "qlora" or facts.device != "cuda" or not (missing := _missing(facts)):
        return None
    return Broken(f"qlora's kernels are compiled on the machine, which needs {missing[0]}", missing[1])


def _deepspeed_compiler(recipe: Recipe, facts: Facts) -> Broken | None:
    """DeepSpeed on a CPU, or with a folder to swap to, without a compiler."""
    parallel, host = recipe.parallel, facts.host
    if parallel.strategy != "deepspeed" or host is None or (host.cxx_compiler and host.python_headers):
        return None
    missing = "Python.h, which this Python lacks" if host.cxx_compiler else "a C++ compiler, and there is none"
    if facts.device == "cpu":
        what = f"on a CPU, DeepSpeed compiles its collectives, which needs {missing}"
        return Broken(what, "install g++, python3-dev and ninja, or set parallel.strategy to fsdp")
    if parallel.offload_dir:
        what = f"DeepSpeed compiles its access to disks, which needs {missing}"
        return Broken(what, "install g++, python3-dev, libaio-dev and ninja, or leave parallel.offload_dir out")
    return None


def _bitsandbytes(recipe: Recipe, facts: Facts) -> Broken | None:
    """``qlora`` in NF4 on a CPU without bitsandbytes: slower."""
    host, method = facts.host, recipe.method
    if host is None or facts.device != "cpu" or host.bitsandbytes or method.type != "qlora" or method.quantize != "nf4":
        return None
    what = "without bitsandbytes, NF4 weights are dequantised by torch on a CPU, with the same values and slower"
    return Broken(what, "run `pip install 'packtrain[quant]'`")


def _host_name(recipe: Recipe, facts: Facts) -> Broken | None:
    """A host name without an address, on several nodes: gloo then offers the others its loopback."""
    host = facts.host
    if host is None or host.resolves or facts.processes == facts.local_processes:
        return None
    what = "the host's own name has no address, so gloo gives other nodes the loopback's"
    return Broken(what, "add the name to /etc/hosts, or export GLOO_SOCKET_IFNAME with the network's interface")


HOST_RULES: tuple[Rule, ...] = (
    Rule("driver-old", "driver", "error", _driver_old, "no"),
    Rule("torch-blind", "launch.device", "error", _torch_blind, "no"),
    Rule("nccl-other", "nccl", "warning", _nccl_other, "no"),
    Rule("shared-memory", "/dev/shm", "warning", _shared_memory, "no"),
    Rule("compile", "parallel.compile", "error", _compile, "yes"),
    Rule("uncompiled", "parallel.compile", "warning", _uncompiled, "yes"),
    Rule("kernels", "method.type", "error", _kernels, "no"),
    Rule("deepspeed-compiler", "parallel.strategy", "error", _deepspeed_compiler, "no"),
    Rule("bitsandbytes", "method.quantize", "warning", _bitsandbytes, "no"),
    Rule("host-name", "host name", "warning", _host_name, "no"),
)
