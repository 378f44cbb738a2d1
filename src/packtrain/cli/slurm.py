"""``packtrain slurm``: writes the batch script, or submits it and follows the job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from packtrain.errors import UserError
from packtrain.launch.folder import refuse_other_than_file
from packtrain.launch.slurm import Job, Options, make_job


def run_slurm(recipe: str, overrides: Sequence[str], options: Options, output: str | None, submit: bool) -> int:
    """Write the script, to a file or with ``-`` to stdout, or submit it. Returns the exit status."""
    job = make_job(recipe, overrides, options)
    if output == "-":
        print(job.text, end="")
    elif output or not submit:
        _write(job, Path(output or f"{job.name}.sbatch"), submit)
    if not submit:
        return 0
    from packtrain.launch.slurm_job import follow
    from packtrain.launch.slurm_job import submit as give_to_slurm

    number = give_to_slurm(job)
    print(f"job {number} is submitted; its output: {job.log(number)}", flush=True)
    return follow(job, number)


def _write(job: Job, path: Path, submit: bool) -> None:
    """A new file; one that is there may hold its owner's changes."""
    refuse_other_than_file("--output", path)
    job.make_log_folder()
    try:
        if not (path.exists() and path.read_text() == job.text):
            with path.open("x") as file:
                file.write(job.text)
    except FileExistsError:
        raise UserError(str(path), "exists and is different", "remove it, or give --output FILE") from None
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise UserError(str(path), what, "give --output another file") from error
    print(f"wrote {path}" if submit else f"wrote {path}; submit it with: sbatch {shlex.quote(str(path))}")
