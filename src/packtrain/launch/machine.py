"""A machine that is not this one: what a plan is made for, from numbers on the command line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import psutil

from packtrain.config.facts import Facts
from packtrain.config.schema import Recipe
from packtrain.errors import UserError, listed
from packtrain.launch.calibration import known_rates
from packtrain.launch.facts import gather_facts, num_processes
from packtrain.launch.model_facts import planned_model_facts
from packtrain.models.locate import model_folder
from packtrain.plan.rates import has_bf16, known_gpus, published_memory

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", re.IGNORECASE)
_UNITS = {"": 2**30, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Machine:
    """What the command line says of the machine; None: as here.

    Attributes:
        gpus: of each node. gpu: the name. gpu_memory, host_memory: bytes of a GPU, of a node.
    """

    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None
    nodes: int = 1
    host_memory: int | None = None

    @property
    def is_this(self) -> bool:
        return self == Machine()


def machine_facts(recipe: Recipe, machine: Machine) -> Facts:
    """Facts for a plan: of this machine, or of the one that was described. The weights need not be here.

    Raises:
        UserError: the description lacks what a plan needs.
    """
    if machine.is_this:
        return gather_facts(recipe, planned=True)
    here = None
    if machine.gpus is None or (machine.gpu_memory is None and machine.gpu is None):
        here = gather_facts(recipe, planned=True)
    gpus = machine.gpus or (here.num_gpus if here else 0)
    if not gpus:
        mend = "give --gpus, and --gpu or --gpu-memory"
        raise UserError("packtrain plan", "this machine has no GPU to plan for", mend)
    name = machine.gpu or (here.gpu if here else "")
    memory = machine.gpu_memory or _memory_of(name, here)
    model = planned_model_facts(model_folder(recipe.model.path, config_only=True))
    local = num_processes(recipe, gpus)
    return Facts(
        processes=local * machine.nodes,
        local_processes=local,
        device="cuda",
        num_gpus=gpus,
        memory=memory,
        bf16=here.bf16 if here is not None and name == here.gpu else has_bf16(name),
        num_cores=len(os.sched_getaffinity(0)),
        model=model,
        gpu=name,
        host_memory=machine.host_memory or (psutil.virtual_memory().total if machine.gpus is None else 0),
        rates=known_rates(name, recipe, model, machine.nodes),
    )


def _memory_of(name: str, here: Facts | None) -> int:
    if here is not None and here.num_gpus and (not name or name == here.gpu):
        return here.memory
    known = published_memory(name)
    if known is None:
        what = f"the memory of {name!r} is not known" if name else "the memory of the GPUs is not given"
        raise UserError("--gpu", what, f"give --gpu-memory 80GiB, or one of {listed(known_gpus())}")
    return known


def size(text: str, option: str) -> int:
    """Bytes of ``80GiB``, ``80GB`` or ``80`` (GiB).

    Raises:
        UserError: it is no size.
    """
    found = _SIZE.fullmatch(text)
    unit = found[2].lower().removesuffix("b") if found else ""
    scale = _BINARY.get(unit, _UNITS.get(unit))
    if found is None or scale is None or float(found[1]) <= 0:
        raise UserError(option, f"{text!r} is no size", "write it as 80GiB")
    return round(float(found[1]) * scale)
