"""``packtrain slurm``: from a recipe to a batch script for Slurm. Starts without torch."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from packtrain.config import Recipe, load_recipe
from packtrain.errors import UserError
from packtrain.launch.secrets import refuse_secrets

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*")
_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")
_SIGNAL_MOST = 65535
"""Slurm keeps the seconds of ``--signal`` in 16 bits."""


@dataclass(frozen=True)
class Options:
    """What the job asks Slurm for.

    Attributes:
        gpus: GPUs and processes of each node; None: as the recipe's launch section says.
        cpus: CPU cores of each node; None: one a process.
        time: the time limit as Slurm writes it.
        signal: seconds before the time limit at which the run is told to write its checkpoint.
        requeue: whether Slurm starts the job again after a preemption, a lost node or its time limit.
        setup: shell lines that make Packtrain available; empty: the virtual environment that runs now.
        extra: further sbatch options, such as ``--mem=0``.
    """

    nodes: int = 1
    gpus: int | None = None
    cpus: int | None = None
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    qos: str | None = None
    signal: int = 120
    requeue: bool = True
    setup: Sequence[str] = ()
    extra: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """A batch script and where its run will be.

    Attributes:
        run: the run's name, in which ``$SLURM_JOB_ID`` may stand.
    """

    text: str
    name: str
    folder: Path
    run: str

    @property
    def logs(self) -> Path:
        return self.folder / "slurm"

    def make_log_folder(self) -> None:
        """Without it Slurm drops the job's output."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"{self.logs} cannot be made ({error.strerror})"
            raise UserError("output.folder", what, "give a folder you may write to") from error

    def log(self, number: str) -> Path:
        return self.logs / f"{self.name}-{number}.out"

    def run_folder(self, number: str) -> Path:
        return self.folder / self.run.replace("$SLURM_JOB_ID", number)


def make_job(recipe_path: str | Path, overrides: Sequence[str], options: Options) -> Job:
    """Check the recipe and the options, and write the script.

    Raises:
        UserError: the recipe or an option is wrong.
    """
    recipe = load_recipe(recipe_path, overrides)
    _check(options)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_path).stem).strip("._-")[:70] or "run"
    run = f"{stem}-$SLURM_JOB_ID" if recipe.output.name == "auto" else recipe.output.name
    folder = Path(recipe.output.folder).expanduser().absolute()
    gpus, processes = _per_node(recipe, options)
    source = Template((files("packtrain") / "launch" / "slurm.sh").read_text(encoding="utf-8"))
    text = source.substitute(
        directives="\n".join(_directives(options, stem, folder, gpus, options.cpus or processes)),
        setup="\n".join(options.setup or _own_environment()),
        recipe=shlex.quote(str(Path(recipe_path).absolute())),
        folder=shlex.quote(str(folder)),
        run=run,
        overrides="".join(shlex.quote(word) + " " for word in overrides),
        processes=processes,
        seconds=options.signal,
        requeue="yes" if options.requeue else "no",
    )
    refuse_secrets(text, "the script")
    return Job(text, stem, folder, run)


def _per_node(recipe: Recipe, options: Options) -> tuple[int, int]:
    """GPUs and processes of each node."""
    launch = recipe.launch
    processes = launch.processes if isinstance(launch.processes, int) else None
    asked = launch.num_gpus if options.gpus is None else options.gpus
    if launch.device == "cpu":
        if options.gpus:
            raise UserError("--gpus", f"{options.gpus} with launch.device: cpu", "drop one of the two")
        return 0, processes or 1
    if asked is None and processes is None:
        raise UserError("--gpus", "not given, and the recipe does not say it", "give the GPUs of each node: --gpus N")
    gpus = processes if asked is None else asked
    assert gpus is not None
    if processes is not None and gpus not in (0, processes):
        mend = "drop launch.processes: there is one process a GPU"
        raise UserError("--gpus", f"{gpus} a node with launch.processes: {processes}", mend)
    return gpus, processes or gpus or 1


def _directives(options: Options, name: str, folder: Path, gpus: int, cpus: int) -> list[str]:
    log = str(folder / "slurm").replace("%", "%%") + "/%x-%j.out"
    values = {
        "job-name": name,
        "nodes": str(options.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "gpus-per-node": str(gpus) if gpus else None,
        "partition": options.partition,
        "time": options.time,
        "account": options.account,
        "qos": options.qos,
        "chdir": os.getcwd(),
        "output": log,
        "open-mode": "append",
        "signal": f"B:USR1@{options.signal}",
    }
    words = [f"--{key}={_quoted(key, value)}" for key, value in values.items() if value is not None]
    words += ["--requeue" if options.requeue else "--no-requeue", *options.extra]
    return [f"#SBATCH {word}" for word in words]


def _quoted(option: str, value: str) -> str:
    """As sbatch reads it: between quotes, with nothing of a shell's rules."""
    if not value.isprintable() or any(letter in value for letter in "'\"\\"):
        what = f"{value!r} has quotes, backslashes or line breaks, which sbatch cannot read"
        raise UserError(f"#SBATCH --{option}", what, "use a folder without them")
    return value if shlex.quote(value) == value else f'"{value}"'


def _own_environment() -> list[str]:
    if sys.prefix == sys.base_prefix:
        return ["# Packtrain is taken from the PATH that sbatch passes on."]
    return [f"source {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))}"]


def _check(options: Options) -> None:
    least = {"--nodes": (options.nodes, 1), "--gpus": (options.gpus, 0), "--cpus": (options.cpus, 1)}
    for where, (count, minimum) in least.items():
        if count is not None and count < minimum:
            raise UserError(where, f"{count} is not allowed", f"give a number of at least {minimum}")
    if not 1 <= options.signal <= _SIGNAL_MOST:
        raise UserError("--signal", f"{options.signal} is not allowed", f"give seconds from 1 to {_SIGNAL_MOST}")
    names = {"--partition": options.partition, "--account": options.account, "--qos": options.qos}
    for where, name in names.items():
        if name is not None and not _NAME.fullmatch(name):
            raise UserError(where, f"{name!r} is not a name in Slurm", "give one without spaces or signs")
    if options.time is not None and (limit := time_limit(options.time)) is not None and limit <= options.signal:
        what = f"{options.time} is no longer than the {options.signal} s of --signal"
        raise UserError("--time", what, "give the run more time")
    for word in options.extra:
        if not word.startswith("-") or not word.isprintable():
            raise UserError("--sbatch", f"{word!r} is not an option of sbatch", "write it like --sbatch=--mem=0")


def time_limit(text: str) -> int | None:
    """Slurm's ``90`` (minutes), ``1:30:00``, ``2-12`` or ``2-12:30`` in seconds; None for UNLIMITED."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise UserError("--time", f"{text!r} is not a time limit", "write it like 90, 2:30:00 or 1-12:00:00")
    days, a, b, c = (int(part) if part else None for part in found.groups())
    if days is not None:
        return days * 86400 + (a or 0) * 3600 + (b or 0) * 60 + (c or 0)
    if c is not None:
        return (a or 0) * 3600 + (b or 0) * 60 + c
    return (a or 0) * 60 + (b or 0)
