"""A run as a user starts it, in a folder of its own, that is watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from packtrain.launch.folder import RunFolder
from tests.faults import Fault

ROOT = Path(__file__).parents[1]
LIMIT = 120.0
SECRET = "hf_aBcDeFgHiJkLmNoP"
"""In the environment of each run, and in the message of one fault."""


class Trial:
    """A run in a folder of its own, started, watched and resumed."""

    def __init__(self, recipe: dict[str, Any], folder: Path, fault: Fault | None) -> None:
        self.folder, self.mark = folder, folder / "happened"
        self.name = uuid.uuid4().hex
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.env = {
            **os.environ,
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": "1",
            "TRIAL": self.name,
            "HF_TOKEN": SECRET,
        }
        if fault is not None:
            self.env |= {"FAULT": fault.kind, "FAULT_MARK": str(self.mark)}
        self.recipe = folder / "recipe.yaml"
        recipe = {**recipe, "output": {"folder": str(folder / "runs"), "name": "run"}}
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.run = RunFolder(folder / "runs" / "run")

    def start(self, *words: str, prefix: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
        module = ["-m", "tests.faulty_train", *(words or ("train", str(self.recipe)))]
        command = [*prefix, *(module if prefix and "torch.distributed.run" in prefix else [sys.executable, *module])]
        return subprocess.Popen(
            command, env=self.env | env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def seconds_to(self, state: str) -> float:
        """From the fault to the moment when a reader sees ``state``."""
        wait(self.mark.exists, LIMIT)
        happened = time.monotonic() - (time.time() - self.mark.stat().st_mtime)
        wait(lambda: self.run.derived_state() == state, LIMIT)
        return time.monotonic() - happened

    def resume(self, *words: str) -> None:
        done = self.start("runs", "resume", str(self.run.path), *words)
        out, _ = done.communicate(timeout=LIMIT)
        assert done.returncode == 0, out

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.run.events.read_text().splitlines()]
        return [event for event in found if event["event"] == kind]

    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events("step")}

    def files_with_secrets(self) -> list[Path]:
        """Files of the run that hold the token of its environment."""
        return [path for path in self.run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]

    def orphans(self) -> list[str]:
        """Living processes that come from this trial: its mark is in their environment."""
        mark, found = f"TRIAL={self.name}".encode(), []
        for process in psutil.process_iter(["pid", "status", "cmdline"]):
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if mark in environment.split(b"\0") and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or []))
        return found


def wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.05)
