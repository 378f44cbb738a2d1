"""Leading a run: its supervisor in this process, or in one of its own that outlives the terminal.

``python -m packtrain.launch.lead RUN_FOLDER`` is the detached one. Starts without torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from packtrain.config import Recipe, load_recipe
from packtrain.config.schema import seconds
from packtrain.errors import UserError
from packtrain.launch import failure, native, summary
from packtrain.launch.folder import RunFolder
from packtrain.launch.gpus import Reservation
from packtrain.launch.measured import write_measured
from packtrain.launch.process import keep_files_private
from packtrain.launch.progress import open_progress
from packtrain.launch.scores import score_final
from packtrain.launch.supervisor import Outcome, supervise, worker_command
from packtrain.metrics.reader import EventReader

BEGIN_SECONDS = 60.0
SUPERVISOR = -1
"""In place of a rank, where the supervisor itself fails."""


def lead(folder: RunFolder, recipe: Recipe) -> Outcome:
    """Supervise the run to its end, with its progress on stdout."""
    assert isinstance(recipe.launch.processes, int), "resolve comes first"
    progress = open_progress(EventReader(folder.events, from_end=True))
    progress.line(f"run {folder.name} in {folder.path}")
    try:
        outcome = supervise(
            folder,
            worker_command(folder),
            recipe.launch.processes,
            watch=progress.update,
            reservation=_reservation(folder, recipe),
            on_wait=lambda reason: progress.line(f"queued {reason}"),
            heartbeat=seconds(recipe.launch.heartbeat),
        )
        progress.update()
    finally:
        progress.close()
        native.clean(recipe)
        write_measured(folder)
    if outcome.state == "done":
        score_final(folder, recipe)
    return outcome


def report(folder: RunFolder, outcome: Outcome) -> int:
    """Say how the run ended; the exit status. A mistake of the user's that ended it is raised."""
    if outcome.failure is None:
        print("\n".join(summary.ended(folder, outcome.state)), flush=True)
    elif outcome.failure.kind == "user":
        folder.discard_unless_started()
        raise outcome.failure.user_error()
    else:
        print("\n".join(summary.failed(outcome.failure.as_status())), file=sys.stderr, flush=True)
    return outcome.exit


def lead_detached(folder: RunFolder) -> None:
    """Start a supervisor that is a session of its own, and see that it leads.

    Raises:
        UserError: it ended at once; why is in its log.
    """
    folder.error(SUPERVISOR).unlink(missing_ok=True)
    with folder.supervisor_log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "packtrain.launch.lead", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _wait(lambda: process.poll() is not None or _leads(folder, process.pid), BEGIN_SECONDS)
    if process.poll() not in (None, 0):
        told = failure.recorded(folder, SUPERVISOR)
        if told is not None:
            raise told.user_error()
        said = folder.supervisor_log.read_text(errors="replace").strip().splitlines()
        what = f"its supervisor ended at once ({said[-1] if said else 'without a word'})"
        raise UserError(folder.name, what, f"see {folder.supervisor_log}")
    print(f"run {folder.name} in {folder.path}, detached")
    print(f"follow it with: packtrain runs logs {summary.call_it(folder)} --follow", flush=True)


def _leads(folder: RunFolder, pid: int) -> bool:
    supervisor = folder.read_status().supervisor_id
    return supervisor is not None and supervisor.pid == pid


def _wait(condition: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _reservation(folder: RunFolder, recipe: Recipe) -> Reservation | None:
    """The GPUs that the run waits for and owns; none on the CPU."""
    if recipe.launch.device != "cuda":
        return None
    gpus, processes = recipe.launch.gpus, recipe.launch.processes
    assert isinstance(processes, int), "resolve comes first"
    return Reservation(str(folder.path), processes if gpus == "auto" else gpus)


def main(path: str) -> int:
    """Lead a run whose folder is ready. A mistake that only the workers could find stays in the folder."""
    keep_files_private()
    folder = RunFolder(Path(path))
    try:
        outcome = lead(folder, load_recipe(folder.recipe))
    except UserError as error:  # who started this process is still there to be told
        failure.record(folder, failure.describe(error, SUPERVISOR))
        print(f"packtrain: error: {error}", flush=True)
        return 2
    if outcome.failure is not None and outcome.failure.kind == "user":
        print(f"packtrain: error: {outcome.failure.user_error()}", flush=True)
        return outcome.exit
    return report(folder, outcome)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
