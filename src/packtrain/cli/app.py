"""``packtrain``: the commands, and the exit status of each way to end.

Nothing here imports torch, the schema or rich before a command runs: ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from packtrain import __version__
from packtrain.cli import runs
from packtrain.errors import UserError
from packtrain.launch.group import quiet_rank
from packtrain.launch.process import keep_files_private, leave_at_once
from packtrain.launch.secrets import redact

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""click's UsageError: newer versions of typer bring their own click, whose modules are private."""

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings in place of the recipe's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]

app = typer.Typer(
    name="packtrain",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models on as many GPUs as there are, from one recipe.",
)
app.add_typer(runs.app, name="runs")


def main() -> None:
    """The console script."""
    # OpenMP's threads wait by spinning; on cores that others use too, CPU runs then lose half of their speed.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_files_private()
    status = run(sys.argv[1:])
    if "torch" in sys.modules:
        leave_at_once(status)
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; 0 done, 2 the user's mistake, 130 interrupted. A bug keeps its traceback (1)."""
    command = typer.main.get_command(app)
    try:
        status = command.main(list(arguments) or ["--help"], prog_name="packtrain", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except UserError as error:
        return _mistake(str(error))
    except _UsageError as error:
        return _mistake(_misuse(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _misuse(error: Any) -> str:
    """One sentence for an argument that the command line does not take."""
    from pydantic import ValidationError

    place = error.ctx.command_path if error.ctx else "packtrain"
    if isinstance(error.__cause__, ValidationError):  # typer checks values with pydantic, and leaves them out
        from packtrain.config.load import expectation

        fault = error.__cause__.errors(include_url=False)[0]
        what = f"{fault['input']!r} is not allowed"
        return str(UserError(f"{place} {error.param.opts[-1]}", what, f"give {expectation(fault)}"))
    return f"{error.format_message().rstrip('.')}; see `{place} --help`."


def _mistake(sentence: str) -> int:
    if not quiet_rank():
        print(f"packtrain: error: {redact(sentence)}", file=sys.stderr)
    return 2


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"packtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    detach: runs.Detach = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run of this output.name if it exists, else start it.")
    ] = False,
) -> int:
    """Train a recipe on all GPUs of this machine, once they are free.

    With launch.processes=N on N processes, on a CPU too. Under torchrun or srun it joins the group it finds.
    """
    from packtrain.launch.start import start

    return start(recipe, overrides or [], detach, resume)


@app.command()
def data(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show with their label masks.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Show what a recipe's data becomes.

    Rows kept and dropped, lengths, label masks, packing.
    """
    from packtrain.cli.data import show_data

    show_data(recipe, overrides or [], rows, as_json)


@app.command()
def demo() -> int:
    """Fine-tune a 135M model on data that ships with it.

    Dialogues to summarise, two processes, and what it learned.
    """
    from packtrain.cli.demo import run_demo

    return run_demo()


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
    loss: Annotated[bool, typer.Option("--loss/--no-loss", help="The loss on all rows, beside ROUGE.")] = True,
    folder: Annotated[str, typer.Option(help="Where the runs are.")] = "runs",
) -> int:
    """Evaluate a run and the model it started from: loss, perplexity and ROUGE."""
    from packtrain.cli.evaluate import run_eval

    return run_eval(target, overrides or [], as_json, loss, folder)


@app.command()
def export(
    target: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")],
    to: Annotated[str | None, typer.Option(help="Folder to write; merged/ in the run folder if not given.")] = None,
    compare: Annotated[bool, typer.Option(help="Compare its logits with the trained model's.")] = True,
    as_json: AsJson = False,
    folder: Annotated[str, typer.Option(help="Where the runs are.")] = "runs",
) -> int:
    """Merge a run's LoRA or QLoRA adapter into its base model.

    In the dtype of the base model's files; a QLoRA base passes through its quantised form.
    """
    from packtrain.cli.export import run_export

    return run_export(target, to, compare, as_json, folder)


@app.command()
def plan(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")] = None,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of each node; this machine's if not given.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Which GPU, as H100 or 'RTX 4090'.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a GPU, as 80GiB.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes.")] = 1,
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a node, as 512GiB.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every setting that was tried, not the first ten.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine first, and keep it.")] = False,
    history: Annotated[bool, typer.Option("--history", help="How far past plans were from what was measured.")] = False,
    folder: Annotated[str, typer.Option(help="Where the runs of the history are.")] = "runs",
    as_json: AsJson = False,
) -> int:
    """Say what a recipe needs before a GPU is taken.

    Memory by term, host memory, disk, speed, and the settings that fit, fastest first. The model's config.json is
    enough. Exit status 1: nothing fits.
    """
    from packtrain.cli import plan as face

    options = face.options(gpus, gpu, gpu_memory, nodes, host_memory)
    if history:
        if recipe is not None or calibrate or every or not options.is_this:
            raise UserError(
                "packtrain plan --history", "is of past runs alone", "leave out all but --folder and --json"
            )
        face.show_history(folder, as_json)
        return 0
    if calibrate:
        from packtrain.cli.calibrate import run_calibration

        return run_calibration(recipe, overrides or [], options, as_json)
    if recipe is None:
        raise UserError("packtrain plan", "no recipe is given", "give one, --calibrate or --history")
    return face.show_plan(recipe, overrides or [], options, every, as_json)


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe file (YAML); none: the machine alone.")
    ] = None,
    overrides: Overrides = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write the mends into the recipe and show the difference.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Say what would stop a run on this machine, and what mends it.

    The rules, memory, disk, a sample of the data, driver, compilers. Exit status 1: an error was found.
    """
    from packtrain.cli.doctor import run_doctor

    return run_doctor(recipe, overrides or [], fix, as_json)


@app.command()
def kubernetes(
    recipe: RecipePath,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Pods.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of each pod, one process each.")],
    image: Annotated[str, typer.Option("--image", help="An image with Packtrain in it.")],
    claim: Annotated[
        list[str],
        typer.Option(metavar="PVC[:/PATH]", help="A PersistentVolumeClaim; the first at /work if it does not say."),
    ],
    secret: Annotated[
        list[str] | None, typer.Option(help="A Secret whose keys become environment variables, as HF_TOKEN.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The Job's and the run's name; the recipe's if not given.")] = None,
    namespace: Annotated[str | None, typer.Option(help="The Job's namespace.")] = None,
    grace: Annotated[int, typer.Option(min=30, help="Seconds for a checkpoint when a pod must go.")] = 600,
    retries: Annotated[int, typer.Option(min=0, help="Pods that may fail for each node; preempted ones aside.")] = 3,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Where to write it; stdout if not given.")] = None,
) -> None:
    """Write a Kubernetes manifest that trains a recipe on several nodes.

    A headless Service, the recipe and an indexed Job; a preempted pod is made again and the run resumes.
    """
    from packtrain.cli.kubernetes import run_kubernetes

    run_kubernetes(
        recipe, image=image, nodes=nodes, gpus=gpus, claims=claim, name=name, namespace=namespace,
        secrets=secret or [], retries=retries, grace=grace, output=output,
    )  # fmt: skip


@app.command()
def slurm(
    recipe: RecipePath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 1,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs of each node, one process a GPU; as the recipe's launch section if not given."),
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="CPU cores of each node; one a process if not given.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition.")] = None,
    time: Annotated[str | None, typer.Option(help="The time limit: 90 (minutes), 2:30:00, 1-12:00:00.")] = None,
    account: Annotated[str | None, typer.Option(help="The account that is charged.")] = None,
    qos: Annotated[str | None, typer.Option(help="The quality of service.")] = None,
    signal: Annotated[int, typer.Option(help="Seconds before the time limit for the checkpoint.")] = 120,
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="Go on after a preemption, a lost node or the time limit.")
    ] = True,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A shell line before the run; repeat it. Default: this virtual environment."),
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Another option of sbatch, as --sbatch=--mem=0; repeat it.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="The script's file, or - to print it; RECIPE.sbatch if not given.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit it and follow the job to its end.")] = False,
) -> int:
    """Write a batch script for Slurm, or submit it and follow the job."""
    from packtrain.cli.slurm import run_slurm
    from packtrain.launch.slurm import Options

    options = Options(nodes, gpus, cpus, partition, time, account, qos, signal, requeue, setup or (), sbatch or ())
    return run_slurm(recipe, overrides or [], options, output, submit)


@app.command(name="recipe")
def recipe_reference(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/recipe.md.")] = False,
) -> None:
    """Print the reference of all settings of a recipe."""
    from packtrain.cli.reference import show_reference

    show_reference(markdown)
