"""``packtrain runs``: every run of an output folder, alive or done."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.errors import UserError

if TYPE_CHECKING:
    from packtrain.launch.folder import RunFolder

Name = Annotated[str, typer.Argument(metavar="NAME", help="A run's name, or the path of its folder.")]
Folder = Annotated[str, typer.Option("--folder", help="Where run folders are (output.folder).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Step = Annotated[
    int | None, typer.Option("--step", min=1, help="The checkpoint; the newest that verifies if not given.")
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Leave it to a supervisor of its own and return.")]

STOP_WAIT_SECONDS = 60.0
SHOWN_LOG_LINES = 8

app = typer.Typer(help="List, show, follow, stop, resume, fork, compare and delete runs.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def list_(context: typer.Context, folder: Folder = "runs", as_json: AsJson = False) -> None:
    """List, show, follow, stop, resume, fork, compare and delete the runs of a folder."""
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
        rows.append((run.name, run.state, step, _loss(run.loss), age(time.time() - run.created)))
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
    print(f"{run.name}: {summary.state}, started {age(time.time() - status.created)} ago, in {run.path}")
    if status.parent:
        print(f"fork of {status.parent}")
    if status.note:
        print(f"waits {status.note}")
    if status.gpus:
        print(f"GPUs: {', '.join(status.gpus)}")
    if summary.step is not None:
        print(f"step {summary.step}/{summary.total_steps or '?'}, loss {_loss(summary.loss)}")
    _show_events(run)
    if status.error:
        from packtrain.launch.summary import failed

        print("\n".join(failed(status.error, SHOWN_LOG_LINES)))
    _show_files(run)
    if summary.state in ("stopped", "failed", "lost"):
        print(f"continue it with: packtrain runs resume {name}")


def _show_events(run: RunFolder) -> None:
    from packtrain.launch.progress import describe
    from packtrain.metrics.reader import last_events

    for kind, event in last_events(run.events).items():
        if kind not in ("step", "start") and (line := describe(event)):
            print(line)


def _show_files(run: RunFolder) -> None:
    from packtrain.checkpoint.folders import whole

    for path in (*whole(run.checkpoints).values(), run.final):
        if path.is_dir():
            print(path)


@app.command()
def logs(
    name: Name,
    rank: Annotated[int | None, typer.Option(min=0, help="This rank's own output, in place of the progress.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print until the run ends.")] = False,
    folder: Folder = "runs",
) -> None:
    """Print a run's progress, or what one rank wrote to stdout and stderr. Ctrl-C ends the printing, not the run."""
    from packtrain.launch import follow as following
    from packtrain.launch.registry import find_run

    run = find_run(name, folder)
    if rank is None:
        following.follow(run, to_the_end=follow)
    else:
        _print_log(run, rank, follow)


def _print_log(run: RunFolder, rank: int, follow: bool) -> None:
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
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until it has ended, for a minute at most.")] = True,
    folder: Folder = "runs",
) -> None:
    """Have a run write a checkpoint and end, on whatever host it is."""
    from packtrain.launch.registry import find_run, stop_run

    run = find_run(name, folder)
    state = stop_run(run, STOP_WAIT_SECONDS if wait else 0.0)
    if not run.alive():
        print(f"{run.name}: {state}")
    elif wait:
        print(
            f"{run.name} is still at it; see `packtrain runs show {name}`, or end it with `packtrain runs kill {name}`"
        )
    else:
        print(f"{run.name} was asked to stop")


@app.command()
def kill(name: Name, folder: Folder = "runs") -> None:
    """End a run at once, without a checkpoint; its older checkpoints stay."""
    from packtrain.launch.registry import find_run, kill_run

    run = find_run(name, folder)
    print(f"{run.name}: {kill_run(run)}")


@app.command()
def resume(
    name: Name,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[launch.processes=N]", help="Continue with another number of processes."),
    ] = None,
    step: Step = None,
    detach: Detach = False,
    folder: Folder = "runs",
) -> int:
    """Continue a run from its newest whole checkpoint.

    It was stopped, failed or lost; a run that is done stays as it is. With --step N it goes back to that checkpoint;
    later ones are set aside.
    """
    from packtrain.launch.start import resume as resume_run

    return resume_run(name, overrides or [], folder, step, detach)


@app.command()
def fork(
    name: Name,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="What is to be changed.")
    ] = None,
    new: Annotated[str | None, typer.Option("--name", help="Of the new run; NAME-fork if not given.")] = None,
    step: Step = None,
    scratch: Annotated[bool, typer.Option("--scratch", help="Begin at step 0, with other data too.")] = False,
    detach: Detach = False,
    folder: Folder = "runs",
) -> int:
    """Start a new run from a run's checkpoint, with some settings changed; the difference is shown."""
    from packtrain.launch.start import fork as fork_run

    return fork_run(name, overrides or [], folder, new, step, scratch, detach)


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="NAME NAME [NAME]...", help="Runs, by name or path.")],
    png: Annotated[str | None, typer.Option("--png", metavar="FILE", help="Draw the curves into a PNG too.")] = None,
    folder: Folder = "runs",
    as_json: AsJson = False,
) -> None:
    """Compare runs: loss curves, numbers, and the settings that differ."""
    from packtrain.cli.compare import run_compare

    run_compare(names, png, as_json, folder)


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names or paths of runs.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    folder: Folder = "runs",
) -> None:
    """Remove runs with all their checkpoints and models."""
    from packtrain.launch.registry import delete_run, find_run, size_of

    runs = {run.path: run for run in (find_run(name, folder) for name in names)}.values()  # each once
    for run in runs:
        if not yes:
            _confirm(run, size_of(run))
        delete_run(run)
        print(f"{run.name}: deleted")


def _confirm(run: RunFolder, size: int) -> None:
    if not sys.stdin.isatty():
        raise UserError("runs delete", "nobody is there to confirm it", "give --yes")
    model = " and its model" if run.final.is_dir() else ""
    if not typer.confirm(f"delete {run.path} ({size / 2**20:,.1f} MiB){model}?"):
        raise typer.Abort


def _loss(value: float | str | None) -> str:
    """A loss that is no number is text in events.jsonl."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4f}"


def age(seconds: float) -> str:
    """90 as 1m, 7200 as 2h."""
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{letter}"
    return f"{max(0, seconds):.0f}s"
