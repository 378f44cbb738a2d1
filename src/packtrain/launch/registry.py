"""The runs of an output folder: listed, found by name, stopped. Starts without torch."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import UserError, nearest
from packtrain.launch.folder import RunFolder
from packtrain.metrics.reader import last_events


@dataclass(frozen=True)
class RunSummary:
    """One line of ``packtrain runs``."""

    name: str
    path: str
    state: str
    step: int | None
    total_steps: int | None
    loss: float | None
    created: float
    updated: float


def list_runs(output_folder: str | Path) -> list[RunSummary]:
    """Every run in the folder, the newest first."""
    statuses = Path(output_folder).glob("*/status.json")
    runs = [summarise(RunFolder(path.parent)) for path in statuses]
    return sorted(runs, key=lambda run: run.created, reverse=True)


def summarise(folder: RunFolder) -> RunSummary:
    """The numbers of one run; of one whose status.json is damaged, that it is."""
    try:
        status = folder.read_status()
    except UserError:
        changed = folder.path.stat().st_mtime
        return RunSummary(folder.name, str(folder.path), "damaged", None, None, None, changed, changed)
    events = last_events(folder.events)
    step, start = events.get("step", {}), events.get("start", {})
    return RunSummary(
        name=folder.name,
        path=str(folder.path),
        state=folder.derived_state(status),
        step=step.get("step"),
        total_steps=start.get("total_steps"),
        loss=step.get("loss"),
        created=status.created,
        updated=status.updated,
    )


def find_run(name_or_path: str, output_folder: str | Path = "runs") -> RunFolder:
    """A run by its name in the output folder, or by its path."""
    candidates = [Path(output_folder) / name_or_path, Path(name_or_path)]
    for path in candidates:
        if (path / "status.json").is_file():
            return RunFolder(path.absolute())
    names = [path.parent.name for path in Path(output_folder).glob("*/status.json")]
    guess = nearest(name_or_path, names)
    mend = f"did you mean '{guess}'" if guess else "see `packtrain runs`, or give --folder"
    raise UserError(name_or_path, f"no such run in {output_folder}", mend)


def stop_run(folder: RunFolder, at_once: bool = False, wait_seconds: float = 0.0) -> str:
    """Ask a run to write a checkpoint and stop, or end it at once. Returns its state afterwards."""
    status = folder.read_status()
    supervisor = status.supervisor_id
    if supervisor is None or not folder.alive(status):
        state = folder.derived_state(status)
        raise UserError(folder.name, f"is not running (it is {state})", "see `packtrain runs`")
    if not supervisor.here:
        raise UserError(folder.name, f"runs on {supervisor.host}", f"stop it on {supervisor.host}")
    os.kill(supervisor.pid, signal.SIGTERM)
    if at_once:
        time.sleep(0.3)  # two signals at the same moment would arrive as one
        if supervisor.alive():
            os.kill(supervisor.pid, signal.SIGTERM)
    deadline = time.monotonic() + wait_seconds
    while supervisor.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    return folder.derived_state()
