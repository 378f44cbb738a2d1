"""What lies under torch, on machines that are not this one: a driver made of C, another torch, a taken port."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from packtrain.launch import host as module
from packtrain.launch import ports
from packtrain.launch.host import gather_host
from packtrain.launch.nvml import Device, Driver, look

NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlInit_v2(void) { return STATUS; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "535.104", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) { *out = (void *)(0x7f0000000000UL + i); return 0; }
int nvmlDeviceGetMemoryInfo(void *d, memory_t *out) { out->total = 80UL << 30; return 0; }
int nvmlDeviceGetUUID(void *d, char *out, unsigned n) {
    strncpy(out, d == (void *)0x7f0000000001UL ? "GPU-b" : "GPU-a", n); return 0; }
int nvmlDeviceGetName(void *d, char *out, unsigned n) { strncpy(out, "NVIDIA Test", n); return 0; }
"""
CUDA = "int cuDriverGetVersion(int *out) { *out = 12020; return 0; }"


def library(folder: Path, name: str, source: str, *flags: str) -> None:
    (folder / "source.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", *flags, "-o", str(folder / name), str(folder / "source.c")]
    subprocess.run(command, check=True)


def looked(folder: Path, **env: str) -> dict[str, object]:
    """What ``gather_host`` and ``look`` find in a process that loads the libraries of ``folder``."""
    code = (
        "import json, sys; from dataclasses import asdict; from packtrain.launch import host, nvml;"
        "print(json.dumps([asdict(nvml.look()), asdict(host.gather_host()), 'torch' in sys.modules]))"
    )
    env = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": ":".join(sys.path), **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    driver, host, with_torch = json.loads(done.stdout)
    assert not with_torch
    return {"driver": driver, "host": host}


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_the_driver_is_asked_without_torch(tmp_path: Path) -> None:
    library(tmp_path, "libnvidia-ml.so.1", NVML, "-DSTATUS=0")
    library(tmp_path, "libcuda.so.1", CUDA)
    found = looked(tmp_path)
    devices = tuple(Device(name, "NVIDIA Test", 80 << 30) for name in ("GPU-a", "GPU-b"))
    assert found["driver"] == json.loads(json.dumps(asdict(Driver("535.104", "12.2", devices))))
    assert found["host"]["gpus"] == 2 and found["host"]["driver_cuda"] == "12.2"  # type: ignore[index]
    for named, count in (("1", 1), ("", 0), ("GPU-b", 1)):
        assert looked(tmp_path, CUDA_VISIBLE_DEVICES=named)["host"]["gpus"] == count  # type: ignore[index]


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_a_driver_that_does_not_answer_is_none(tmp_path: Path) -> None:
    library(tmp_path, "libnvidia-ml.so.1", NVML, "-DSTATUS=9")
    assert looked(tmp_path)["driver"] == json.loads(json.dumps(asdict(Driver())))


def test_no_driver_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("packtrain.launch.nvml.ctypes.CDLL", missing)
    assert look() == Driver()


def test_compilers_are_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert not gather_host().c_compiler and not gather_host().cxx_compiler
    for name in ("clang", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", "mine -O2")
    assert gather_host().c_compiler and gather_host().cxx_compiler
    monkeypatch.setenv("CXX", "not-there")
    assert not gather_host().cxx_compiler


def test_python_s_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path / "nowhere"))
    assert not gather_host().python_headers
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}")
    assert gather_host().python_headers


def test_versions_are_read_off_torch_s_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '12.8'\nhip = None\n")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(module, "find_spec", lambda name: spec)
    monkeypatch.setattr(module, "requires", lambda _: ["numpy", 'nvidia-nccl-cu12==2.27.5; platform_system == "Linux"'])
    found = gather_host()
    assert (found.torch_cuda, found.torch_nccl) == ("12.8", "2.27.5")
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\n")
    monkeypatch.setattr(module, "requires", lambda _: None)
    found = gather_host()
    assert (found.torch_cuda, found.torch_nccl) == ("", "")


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert gather_host().resolves and not gather_host(several_nodes=True).resolves
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert gather_host(several_nodes=True).resolves


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert ports.taken_port() is None
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        found = ports.taken_port()
        assert found and found.severity == "warning" and "is taken by another program" in found.message
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        assert ports.taken_port()
        monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # another host's: nothing is known of it here
        assert ports.taken_port() is None
        monkeypatch.delenv("MASTER_ADDR")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "1")
        found = ports.taken_port()
        assert found and found.severity == "error"
    assert ports.taken_port() is None
    for wrong in ("", "x", "0", "65536"):
        monkeypatch.setenv("MASTER_PORT", wrong)
        found = ports.taken_port()
        assert found and f"{wrong!r} is no port" in found.message
