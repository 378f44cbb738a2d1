"""What the NVIDIA driver says of itself and its GPUs, by its own libraries: no program is started, no GPU touched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU as the driver shows it. ``memory``: bytes."""

    id: str
    name: str
    memory: int


@dataclass(frozen=True)
class Driver:
    """The driver's version, the newest CUDA that it runs, and its GPUs; empty where there is none."""

    version: str = ""
    cuda: str = ""
    devices: tuple[Device, ...] = ()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def look() -> Driver:
    """Ask the driver; an empty answer where there is none, or it does not answer."""
    with _library("libnvidia-ml.so.1") as nvml:
        if nvml is None or nvml.nvmlInit_v2():
            return Driver()
        try:
            version = _text(nvml.nvmlSystemGetDriverVersion)
            count = ctypes.c_uint()
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            return Driver(version, _cuda(), tuple(_device(nvml, index) for index in range(count.value)))
        finally:
            nvml.nvmlShutdown()


@contextmanager
def _library(name: str) -> Iterator[ctypes.CDLL | None]:
    try:
        yield ctypes.CDLL(name)
    except OSError:
        yield None


def _device(nvml: ctypes.CDLL, index: int) -> Device:
    handle, memory = ctypes.c_void_p(), _Memory()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Device(_text(nvml.nvmlDeviceGetUUID, handle), _text(nvml.nvmlDeviceGetName, handle), memory.total)


def _text(function: ctypes._NamedFuncPointer, *first: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    function(*first, buffer, ctypes.c_uint(len(buffer)))
    return buffer.value.decode(errors="replace")


def _cuda() -> str:
    """Of the library that torch will load, which a compatibility package may have made newer than the driver."""
    with _library("libcuda.so.1") as cuda:
        number = ctypes.c_int()
        if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(number)):
            return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
