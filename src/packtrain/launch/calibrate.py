"""Measure this machine for ``packtrain plan --calibrate``: a process on each GPU, all at once. Starts without torch."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from packtrain.config.schema import Recipe
from packtrain.errors import UserError
from packtrain.launch.calibration import LLAMA_8B, Calibration, Measured, Shapes, keep, shapes
from packtrain.launch.facts import gpu_name, visible_gpus
from packtrain.launch.folder import RunFolder, write_json
from packtrain.launch.gpus import Reservation, Wanted
from packtrain.launch.model_facts import planned_model_facts
from packtrain.launch.supervisor import supervise
from packtrain.models.locate import model_folder

WHAT = "packtrain plan --calibrate"
_HANG_SECONDS = 300.0


@dataclass(frozen=True)
class Kept:
    """A calibration, the GPU it is for, and the file it is in."""

    gpu: str
    calibration: Calibration
    file: Path


def calibrate(recipe: Recipe | None, tell: Callable[[str], None]) -> Kept | None:
    """Measure at the shapes of a recipe's model, or of Llama 3 8B, and keep the result; None: the user stopped it.

    Args:
        tell: is given a line for the user before the minute that it takes.

    Raises:
        UserError: there is no GPU, none is free, or the measurement failed.
    """
    wanted = _wanted(recipe)
    chosen = LLAMA_8B
    if recipe is not None:
        chosen = shapes(recipe, planned_model_facts(model_folder(recipe.model.path, config_only=True)))
    reservation, note = _free(wanted)
    count = _count(reservation.wanted)
    tell(f"measuring {count} x {gpu_name()}, about a minute" + (f" ({note})" if note else ""))
    try:
        found = probe("cuda", chosen, _disk_of(recipe), count, reservation)
    finally:
        reservation.close()
    if found is None:
        return None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    made = Calibration(
        shapes=chosen, measured=found, num_gpus=count, host=socket.gethostname(), date=now, torch=version("torch")
    )
    return Kept(gpu_name(), made, keep(gpu_name(), made))


def probe(
    device: str, chosen: Shapes, disk: Path, processes: int, reservation: Reservation | None = None, **sizes: float
) -> Measured | None:
    """What ``processes`` ranks of ``launch/probe.py`` measure; None where the user stopped them.

    Args:
        disk: the folder whose disk is written to. sizes: of the measurements, where not the usual ones.

    Raises:
        UserError: one failed; what it said is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="packtrain-") as temporary:
        folder = RunFolder.create(temporary, "calibration")
        spec, out = folder.path / "spec.json", folder.path / "rates.json"
        write_json(spec, {"device": device, "folder": str(disk), "shapes": chosen.model_dump(), **sizes})
        command = [sys.executable, "-m", "packtrain.launch.probe", str(folder.path), str(spec), str(out)]
        outcome = supervise(folder, command, processes, reservation=reservation, heartbeat=_HANG_SECONDS)
        if outcome.state == "stopped":
            return None
        if outcome.failure is not None:
            log = folder.log(max(outcome.failure.rank, 0))
            print(log.read_text(errors="replace") if log.exists() else "", file=sys.stderr)
            mend = "see the lines above; nothing was kept"
            raise UserError(WHAT, f"the measurement failed ({outcome.failure.message})", mend)
        return Measured.model_validate({"link": None} | json.loads(out.read_text()))


def _wanted(recipe: Recipe | None) -> Wanted:
    """The GPUs that a recipe lets a run have."""
    there = visible_gpus()
    if recipe is not None and recipe.launch.device == "cpu":
        raise UserError("launch.device", "is cpu, and the speed of a CPU is not predicted", "add launch.device=auto")
    if not there:
        raise UserError(WHAT, "this machine has no GPU to measure", "run it where the run will be")
    asked = recipe.launch.gpus if recipe is not None else "auto"
    return asked if isinstance(asked, list) else min(asked, there) if isinstance(asked, int) and asked else there


def _free(wanted: Wanted) -> tuple[Reservation, str]:
    """A reservation that can be had now: of all that are wanted, else of one, and what the others wait for."""
    note = ""
    for ask in (wanted, 1):
        reservation = Reservation(WHAT, ask)
        claim = reservation.attempt()
        if claim is not None:
            claim.close()
            return reservation, note
        reservation.close()
        note = note or f"not on all: it would wait {reservation.reason}"
    raise UserError(WHAT, f"would wait {reservation.reason}", "run it again when a GPU is free")


def _count(wanted: Wanted) -> int:
    return wanted if isinstance(wanted, int) else len(wanted)


def _disk_of(recipe: Recipe | None) -> Path:
    """Where checkpoints will be written: the part of that path that exists."""
    folder = Path(recipe.output.folder if recipe is not None else "runs").expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        raise UserError("output.folder", f"{there} cannot be written", "give a folder of yours")
    return there
