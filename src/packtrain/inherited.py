"""What a process has from the one that started it: its own end, and a socket."""

from __future__ import annotations

import ctypes
import os
import signal

STORE_FD = "PACKTRAIN_STORE_FD"
"""In a supervised run: rank 0's number of the listening socket on which the ranks meet, and -1 at the others."""
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when ``parent``, which started this process, is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # It may have died between fork and the line above: then the kernel has nothing left to tell us.
    if os.getppid() != parent:
        os._exit(1)
