"""``packtrain plan``: what a recipe needs on a machine, this one or another, before a GPU is taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from packtrain.config import load_recipe
from packtrain.errors import UserError
from packtrain.launch.machine import Machine, machine_facts, size
from packtrain.launch.measured import apart, history
from packtrain.launch.resolve_recipe import judge
from packtrain.launch.start import adopted
from packtrain.plan.rank import Candidate
from packtrain.plan.report import Plan, named_terms
from packtrain.plan.report import plan as make_plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN = 10
_GIB = 2**30
NOTHING_FITS = 1


def options(gpus: int | None, gpu: str | None, gpu_memory: str | None, nodes: int, host_memory: str | None) -> Machine:
    """The machine that the command line describes.

    Raises:
        UserError: a size is none.
    """
    return Machine(
        gpus,
        gpu,
        size(gpu_memory, "--gpu-memory") if gpu_memory is not None else None,
        nodes,
        size(host_memory, "--host-memory") if host_memory is not None else None,
    )


def show_plan(recipe_path: str, overrides: Sequence[str], machine: Machine, every: bool, as_json: bool) -> int:
    """Print the plan; 0 where something fits.

    Raises:
        UserError: the recipe breaks a rule on that machine, or the machine is not described well enough.
    """
    asked = load_recipe(recipe_path, overrides)
    if not machine.is_this and asked.launch.device == "cpu":
        raise UserError("launch.device", "is cpu, and the plan is for GPUs", "add launch.device=auto")
    facts = machine_facts(asked, machine)
    recipe = adopted(asked, facts.processes)
    warnings = judge(recipe, facts)
    made = make_plan(recipe, facts)
    if as_json:
        print(json.dumps(made.to_json() | {"warnings": warnings}, indent=2))
    else:
        _print(made, warnings, every)
    return 0 if made.fits else NOTHING_FITS


def _print(made: Plan, warnings: list[str], every: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_headline(made), markup=False, soft_wrap=True)
    console.print(_memory(made))
    for line in _needs(made):
        console.print(line, markup=False, soft_wrap=True)
    _print_candidates(console, made, every)
    if made.remedies:
        console.print("what would fit:", markup=False)
        for remedy in made.remedies:
            console.print(f"  {remedy.setting} ({remedy.total / _GIB:.1f} GiB a {_unit(made)})", markup=False)
    elif not made.fits:
        console.print("nothing that Packtrain can change alone would make it fit", markup=False)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _headline(made: Plan) -> str:
    facts, recipe = made.facts, made.recipe
    kind = (facts.gpu or "GPU") if facts.device == "cuda" else "CPU process"
    where = f"{facts.processes} x {kind}"
    answer = "fits" if made.fits else "does not fit" if made.peak.total > made.limit else "host memory is short"
    return f"{recipe.method.type} on {where}: {answer}, {_described(made.candidates[0])}"


def _described(one: Candidate) -> str:
    recipe = one.recipe
    return f"{_spread(one)}, micro-batch {recipe.train.micro_batch_size}, {_recomputed(recipe.parallel.recompute)}"


def _spread(one: Candidate) -> str:
    parallel = one.recipe.parallel
    name = {"deepspeed": f"ZeRO-{parallel.zero_stage}"}.get(parallel.strategy, parallel.strategy)
    if parallel.strategy == "fsdp":
        name += f" over {parallel.shard_size}"
    return name if parallel.offload == "none" else f"{name}, {parallel.offload} in host memory"


def _recomputed(recompute: str | float) -> str:
    if isinstance(recompute, str):
        return {"none": "no recompute", "full": "full recompute"}.get(recompute, f"{recompute} recompute")
    return f"{recompute:.0%} of the blocks recomputed" if recompute else "no recompute"


def _unit(made: Plan) -> str:
    return "GPU" if made.facts.device == "cuda" else "process"


def _memory(made: Plan) -> Table:
    from rich.table import Table

    table = Table("", "GiB", box=None, pad_edge=False, show_header=False)
    table.columns[1].justify = "right"
    for name, size_of in named_terms(made.peak.terms):
        if size_of >= 0.005 * _GIB:
            table.add_row(f"  {name}", f"{size_of / _GIB:.2f}")
    peak = f"memory of a {_unit(made)} at its peak ({_MOMENTS[made.peak.moment]})"
    table.add_row(peak, f"{made.peak.total / _GIB:.2f}")
    table.add_row(f"  of what a plan may fill of its {made.facts.memory / _GIB:.1f}", f"{made.limit / _GIB:.2f}")
    return table


_MOMENTS = {
    "loss": "the loss, at the end of a forward pass",
    "backward": "the last block's backward pass",
    "gradients": "the end of the backward pass",
    "update": "the optimizer's step",
}


def _needs(made: Plan) -> list[str]:
    loading, training = made.host.loading / _GIB, made.host.training / _GIB
    disk, one, final = (size_of / _GIB for size_of in (made.disk.total, made.disk.checkpoint, made.disk.final))
    return [
        f"host memory of a node: {loading:.1f} GiB while loading, {training:.1f} while training",
        f"disk: {disk:.1f} GiB ({made.disk.checkpoints} checkpoints of {one:.2f}, the model {final:.2f}){_write(made)}",
        *_rate(made),
    ]


def _write(made: Plan) -> str:
    """How long a checkpoint is on its way to a disk that was measured."""
    rates = made.facts.rates
    return f"; {made.disk.checkpoint / rates.disk:.1f} s to write a checkpoint" if rates and rates.disk else ""


def _rate(made: Plan) -> list[str]:
    facts, speed = made.facts, made.speed
    if speed is None:
        known = "the rates of this processor" if facts.device == "cpu" else f"the rates of {facts.gpu or 'this GPU'}"
        return [f"speed: not predicted, {known} are not known"]
    every, whole = speed.tokens_per_second * facts.processes, speed.step_seconds
    parts = sorted(speed.seconds.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts if seconds > 0.01 * whole)
    lines = [
        f"speed: {speed.tokens_per_second:,.0f} tokens/s a {_unit(made)}, {every:,.0f} in all; a step of "
        f"{made.recipe.train.batch_size} rows {whole:.2f} s; a billion tokens {1e9 / every / 3600:.1f} h",
        f"  {spent}; {speed.flops.total / 1e9:.1f} GFLOP a token",
    ]
    if speed.sent:
        lines.append(f"  each process sends {speed.sent / _GIB:.2f} GiB a step")
    return [*lines, f"  from {speed.source}; rows full and every token labelled"]


def _print_candidates(console: Console, made: Plan, every: bool) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, justify in (("", "right"), ("strategy", "left"), ("micro-batch", "right"), ("recompute", "right"),
                          ("GiB", "right"), ("tokens/s", "right"), ("", "left")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    shown = made.candidates if every else made.candidates[:SHOWN]
    for place, one in enumerate(shown, 1):
        rate = f"{one.speed.tokens_per_second:,.0f}" if one.speed and not one.refused else ""
        recompute = one.recipe.parallel.recompute
        share = recompute if isinstance(recompute, str) else f"{recompute:.0%}"
        micro, total = str(one.recipe.train.micro_batch_size), f"{one.peak.total / _GIB:.1f}" if one.peak.terms else ""
        table.add_row(str(place), _spread(one), micro, share, total, rate, one.refused)
    console.print()
    console.print(table)
    if len(shown) < len(made.candidates):
        console.print(f"{len(made.candidates) - len(shown)} more with --all", markup=False)


def show_history(folder: str, as_json: bool) -> None:
    """Every run with a plan and a measurement, the newest first: both, and how far apart they are."""
    past = list(history(folder))
    if as_json:
        print(json.dumps([one._asdict() for one in past], indent=2))
        return
    if not past:
        print(f"no run in {folder} has both a plan and a measurement")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, justify in (("run", "left"), ("planned", "right"), ("used GiB", "right"), ("", "right"),
                          ("planned", "right"), ("tokens/s", "right"), ("", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for one in past:
        memory = [f"{value / _GIB:.2f}" for value in (one.planned_bytes, one.measured_bytes)]
        rates = [f"{value:,.0f}" if value else "" for value in (one.planned_rate, one.measured_rate)]
        table.add_row(
            one.name, *memory, apart(one.planned_bytes, one.measured_bytes), *rates,
            apart(one.planned_rate, one.measured_rate),
        )  # fmt: skip
    Console(highlight=False).print(table)
