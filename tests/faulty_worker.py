"""A rank of a real run in which something goes wrong: ``python -m tests.faulty_worker RUN_FOLDER``.

What goes wrong, where and when is in the environment: ``FAULT=hang:1:8`` is the kind, the rank and the step before
whose update it happens; ``FAULT_MARK`` is a file that says that it did, so that a resumed run goes on. ``CLOCK_SKEW``
are seconds that this process's clock is wrong.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from packtrain.launch import worker
from packtrain.launch.process import SUPERVISOR_PID


def skew_clock() -> None:
    skew, real = float(os.environ.get("CLOCK_SKEW", "0")), time.time
    if skew:
        time.time = lambda: real() + skew  # type: ignore[assignment]


def arm() -> None:
    """Wrap the training step of this rank."""
    kind, rank, step = os.environ["FAULT"].split(":")
    mark = Path(os.environ["FAULT_MARK"])
    if os.environ["RANK"] != rank or mark.exists():
        return
    from packtrain.train import loop

    real = loop.train_step

    def faulty(session: Any, prepared: Any, stop: Any) -> Any:
        if prepared.batch.step + 1 == int(step):
            mark.write_text("")
            happen(kind, session.folder)
        elif prepared.batch.step + 1 == int(step) + 2:
            (session.folder / "filler").unlink(missing_ok=True)
        return real(session, prepared, stop)

    loop.train_step = faulty


def happen(kind: str, folder: Path) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "leave":
        os._exit(7)
    elif kind == "raise":
        raise ValueError(f"an odd row, and {os.environ['HF_TOKEN']}")
    elif kind == "memory":
        import torch

        torch.empty(10**15, device="cuda" if torch.cuda.is_available() else "cpu")
    elif kind == "hang":
        time.sleep(600)
    elif kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "kill_supervisor":
        os.kill(int(os.environ[SUPERVISOR_PID]), signal.SIGKILL)
        time.sleep(600)
    elif kind == "kill_agent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    elif kind == "terminate":
        os.kill(int(os.environ[SUPERVISOR_PID]), signal.SIGTERM)
        time.sleep(1)
    elif kind == "fill":
        fill(folder)
    elif kind == "fill_late":
        from packtrain.checkpoint import store

        save = store.dcp.save

        def full(*arguments: Any, **named: Any) -> Any:
            store.dcp.save = save
            fill(folder)
            return save(*arguments, **named)

        store.dcp.save = full


def fill(folder: Path) -> None:
    """Leave no byte on the disk of a folder. A guard: it must be a small one."""
    assert shutil.disk_usage(folder).total < 64 << 20
    with open(folder / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(b"\0" * 4096):
                pass
        except OSError:
            return


if __name__ == "__main__":
    skew_clock()
    if "FAULT" in os.environ:
        arm()
    worker.main(sys.argv[1])
