"""The most memory that this process has used."""

from __future__ import annotations

import os
import threading
from types import TracebackType

import torch

_SAMPLE_SECONDS = 0.02


class PeakMemory:
    """A context that watches this process's memory, in bytes.

    On a GPU torch's allocator keeps count. On the CPU the process's anonymous memory is sampled by a thread: the
    kernel's own high-water mark counts pages of mapped files.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._peak, self._ended = device, 0, threading.Event()

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cpu":
            threading.Thread(target=self._sample, name="memory", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    @property
    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        self._peak = max(self._peak, anonymous_memory())
        return self._peak

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, anonymous_memory())


def anonymous_memory() -> int:
    """Bytes of this process that belong to no file and to no shared memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
