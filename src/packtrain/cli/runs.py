"""``packtrain runs``: every run of an output folder, alive or done."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from packtrain.errors import UserError

Name = Annotated[str, typer.Argument(metavar="NAME", help="A run's name, or the path of its folder.")]
Folder = Annotated[str, typer.Option("--folder", help="Where run folders are (output.folder).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]

STOP_WAIT_SECONDS = 60.0

app = typer.Typer(help="List, show, stop and resume runs.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def list_(context: typer.Context, folder: Folder = "runs", as_json: AsJson = False) -> None:
    """List, show, stop and resume the runs of a folder."""
    if context.invoked_subcommand:
        return
    from packtrain.launch.registry import list_runs

    found = list_runs(folder)
    if as_json:
        print(json.dumps([asdict(run) for run in found], indent=2))
        return
    if not found:
        print(f"no runs in {folder}")
        return
    rows = [("NAME", "STATE", "STEP", "LOSS", "AGE")]
    for run in found:
        step = "-" if run.step is None else f"{run.step}/{run.total_steps or '?'}"
        loss = "-" if run.loss is None else f"{run.loss:.4f}"
        rows.append((run.name, run.state, step, loss, age(time.time() - run.created)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command()
def show(name: Name, folder: Folder = "runs", as_json: AsJson = False) -> None:
    """Show one run: state, numbers, checkpoints, and why it failed."""
    from packtrain.launch.registry import find_run, summarise

    run = find_run(name, folder)
    status, summary = run.read_status(), summarise(run)
    if as_json:
        print(json.dumps({**asdict(status), **asdict(summary)}, indent=2))
        return
    from packtrain.launch.progress import describe
    from packtrain.metrics.reader import last_events

    print(f"{run.name}: {summary.state}, started {age(time.time() - status.created)} ago, in {run.path}")
    if summary.step is not None:
        print(f"step {summary.step}/{summary.total_steps or '?'}, loss {summary.loss:.4f}")
    for kind, event in last_events(run.events).items():
        if kind not in ("step", "start") and (line := describe(event)):
            print(line)
    if status.error:
        rank, message = status.error["rank"], status.error["message"]
        who = f"rank {rank} failed: " if rank >= 0 else "the supervisor failed: "
        print(message if message.startswith("rank ") else who + message)
    for path in (*sorted(run.checkpoints.glob("step-*")), run.final):
        if path.is_dir() and path.suffix != ".tmp":
            print(path)
    if summary.state in ("stopped", "failed", "lost"):
        print(f"continue it with: packtrain runs resume {name}")


@app.command()
def logs(
    name: Name,
    rank: Annotated[int, typer.Option(min=0, help="Whose output.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print until the run ends.")] = False,
    folder: Folder = "runs",
) -> None:
    """Print what one rank wrote to stdout and stderr."""
    from packtrain.launch.registry import find_run

    run = find_run(name, folder)
    path = run.log(rank)
    if not path.exists():
        known = len(list(run.logs.glob("rank-*.log")))
        mend = f"give --rank 0 to {known - 1}" if known else "its launcher keeps the output"
        raise UserError(f"--rank {rank}", f"{run.name} has no log of that rank", mend)
    with path.open(errors="replace") as file:
        while True:
            alive = run.alive()
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if not (follow and alive):
                return
            time.sleep(0.5)


@app.command()
def stop(
    name: Name,
    now: Annotated[bool, typer.Option("--now", help="End it at once, without a checkpoint.")] = False,
    folder: Folder = "runs",
) -> None:
    """Have a run write a checkpoint and stop."""
    from packtrain.launch.registry import find_run, stop_run

    run = find_run(name, folder)
    state = stop_run(run, now, STOP_WAIT_SECONDS)
    if run.alive():
        print(f"{run.name} is still saving; see `packtrain runs show {run.name}`, or stop it with --now")
    else:
        print(f"{run.name}: {state}")


@app.command()
def resume(
    name: Name,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[launch.processes=N]", help="Continue with another number of processes."),
    ] = None,
    folder: Folder = "runs",
) -> int:
    """Continue a run from its newest whole checkpoint.

    It was stopped, failed or lost; a run that is done stays as it is.
    """
    from packtrain.launch.start import resume as resume_run

    return resume_run(name, overrides or [], folder)


def age(seconds: float) -> str:
    """90 as 1m, 7200 as 2h."""
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{letter}"
    return f"{max(0, seconds):.0f}s"
