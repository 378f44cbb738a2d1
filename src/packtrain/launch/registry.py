"""The runs of an output folder: listed, found by name, stopped, deleted. Starts without torch."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import UserError, nearest
from packtrain.launch.folder import ACTIVE, RunFolder
from packtrain.metrics.reader import last_events

KILL_SECONDS = 10.0


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


def stop_run(folder: RunFolder, wait_seconds: float = 0.0) -> str:
    """Ask a run, on whatever host, to write a checkpoint and end. Returns its state after the wait."""
    _refuse_unless_running(folder)
    folder.ask("stop")
    _wait_for_end(folder, wait_seconds)
    return folder.derived_state()


def kill_run(folder: RunFolder) -> str:
    """End a run at once, without a checkpoint. Returns its state afterwards.

    One whose supervisor does not answer is killed: its workers go with it.
    """
    _refuse_unless_running(folder)
    folder.ask("kill")
    _wait_for_end(folder, KILL_SECONDS)
    status = folder.read_status()
    supervisor = status.supervisor_id
    if supervisor is not None and supervisor.here and supervisor.alive():
        os.kill(supervisor.pid, signal.SIGKILL)
        _wait_for_end(folder, KILL_SECONDS)
        folder.update_status(state="stopped", exit=130)
    return folder.derived_state()


def delete_run(folder: RunFolder) -> None:
    """Remove a run's folder. It disappears from the list at once, even if the removal is interrupted.

    Raises:
        UserError: the run is alive, or its folder is a link.
    """
    if folder.path.is_symlink():
        raise UserError(folder.name, f"{folder.path} is a link", "delete what it points to")
    if folder.alive():
        raise UserError(folder.name, "is running", f"stop it first: `packtrain runs stop {folder.name}`")
    doomed = folder.path.with_name(f".{folder.name}.deleted-{os.getpid()}")
    os.rename(folder.path, doomed)
    shutil.rmtree(doomed)


def size_of(folder: RunFolder) -> int:
    """Bytes of all files of a run; of those that runs share by links too."""
    return sum(path.lstat().st_size for path in folder.path.rglob("*") if path.is_file())


def _refuse_unless_running(folder: RunFolder) -> None:
    status = folder.read_status()
    if status.state not in ACTIVE or not folder.alive(status):
        state = folder.derived_state(status)
        raise UserError(folder.name, f"is not running (it is {state})", "see `packtrain runs`")


def _wait_for_end(folder: RunFolder, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while folder.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
