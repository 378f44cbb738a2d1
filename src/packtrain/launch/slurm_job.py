"""A job of Slurm's, submitted and followed to its end. Starts without torch."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from typing import TextIO

from packtrain.errors import UserError
from packtrain.launch import summary
from packtrain.launch.folder import RunFolder
from packtrain.launch.progress import Progress, open_progress
from packtrain.launch.slurm import Job
from packtrain.metrics.reader import EventReader

POLL_SECONDS = 5.0
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)  # fmt: skip
_LOOKS = 5
"""At the run's events, for each question to Slurm."""
_UNKNOWN = "Invalid job id"
"""What Slurm says of a job that it has forgotten, minutes after its end."""
_EXITS = {"done": 0, "stopped": 130}


def submit(job: Job) -> str:
    """Give the script to sbatch; the job's number.

    Raises:
        UserError: there is no Slurm here, or it refuses.
    """
    job.make_log_folder()
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=job.text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("sbatch", "no such program here", "submit on a login node of the cluster") from None
    if done.returncode != 0:
        said = re.sub(r"sbatch: (error|fatal): ", "", " ".join(done.stderr.split())).rstrip(".")
        raise UserError("sbatch", said or f"exit status {done.returncode}", "mend what it names")
    return done.stdout.strip().partition(";")[0]  # a federation adds the cluster's name


def follow(job: Job, number: str, poll_seconds: float = POLL_SECONDS, stream: TextIO | None = None) -> int:
    """Show the job's states and the run's progress until the job ends; 0 done, 130 stopped, 1 failed.

    A job that is queued again is followed further. Ctrl-C ends the following, not the job.
    """
    folder = RunFolder(job.run_folder(number))
    progress = open_progress(EventReader(folder.events), stream)
    try:
        end = _watch(number, progress, poll_seconds)
        progress.update()
    except KeyboardInterrupt:
        progress.line(f"job {number} goes on; end it with `scancel {number}`, its output is {job.log(number)}")
        progress.line(f"the run: packtrain runs logs {summary.call_it(folder)} --follow")
        return 130
    finally:
        progress.close()
    return _tell_end(job, number, folder, end, progress)


def _watch(number: str, progress: Progress, poll_seconds: float) -> str:
    """The state in which the job ended."""
    shown = ""
    while True:
        now = _queued(number)
        if now is None and (end := _end_state(number)) is not None:
            return end
        if now and now != shown:
            progress.line(f"job {number}: {now}")
            shown = now
        for _ in range(_LOOKS):
            progress.update()
            time.sleep(poll_seconds / _LOOKS)


def _queued(number: str) -> str | None:
    """``PENDING (Priority)`` or ``RUNNING on n[1-2]``; None where the job is in the queue no more, or nobody says."""
    done = _slurm("squeue", "--noheader", f"--jobs={number}", "--format=%T|%r|%N")
    if done.returncode != 0 or not done.stdout.strip():
        return None
    state, reason, nodes = done.stdout.strip().splitlines()[0].split("|")
    if state == "PENDING":
        return f"{state} ({reason})"
    return f"{state} on {nodes}" if nodes else state


def _end_state(number: str) -> str | None:
    """The state of a job that has ended; None where it has not, or Slurm does not answer now."""
    done = _slurm("scontrol", "show", "job", number)
    if done.returncode != 0:
        return "forgotten" if _UNKNOWN in done.stderr else None
    found = re.search(r"JobState=(\w+)", done.stdout)
    return found.group(1) if found and found.group(1) in _ENDED else None


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(command[0], "no such program here", "follow the job on a login node") from None


def _tell_end(job: Job, number: str, folder: RunFolder, end: str, progress: Progress) -> int:
    """What became of the run; of a job that never had one, where Slurm keeps its output."""
    progress.line(f"job {number}: {end}")
    state, lines = "none", _log_tail(job, number)
    if folder.status.exists():
        status = folder.read_status()
        # The job is gone: whoever led the run from it is gone too.
        state = status.state if status.state in ("done", "stopped", "failed") else "lost"
        lines = summary.failed(status.error) if status.error else summary.ended(folder, state)
    for line in lines:
        progress.line(line)
    if state not in _EXITS:
        progress.line(f"output of the job: {job.log(number)}")
    return _EXITS.get(state, 1)


def _log_tail(job: Job, number: str) -> Sequence[str]:
    """Why there is no run: the user's mistake, which torchrun's traces have buried, or the end of the output."""
    log = job.log(number)
    if not log.exists():
        return [f"the run did not start, and there is no {log}"]
    lines = log.read_text(errors="replace").splitlines()
    mistakes = list(dict.fromkeys(line for line in lines if line.startswith("packtrain: error: ")))
    return mistakes or ["the run did not start", *(f"  | {line}" for line in lines[-summary.LOG_LINES :])]
