"""What DeepSpeed compiles, once and before any process waits for another: its ranks would time out meanwhile.

AdamW in host memory is not among it: torch's own fused one needs no compiler and is as fast as DeepSpeed's
(docs/deepspeed.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

from packtrain.config.deepspeed import swap_folder
from packtrain.config.schema import Recipe
from packtrain.errors import UserError
from packtrain.launch.abandoned import extensions_folder, remove_abandoned_locks

_BUILD = """
import sys
from deepspeed.ops import op_builder
from deepspeed.accelerator import get_accelerator
for name in sys.argv[1:]:
    get_accelerator().create_op_builder(name).load(verbose=False)
"""
_SHARED_MEMORY, _DISK = "ShareMemCommBuilder", "AsyncIOBuilder"


def build(recipe: Recipe) -> None:
    """Compile what this recipe's DeepSpeed needs and this machine lacks; torch's extensions folder keeps it.

    Raises:
        UserError: DeepSpeed is missing, it cannot be compiled here, or the folder to swap to cannot be made.
    """
    if recipe.parallel.strategy != "deepspeed":
        return
    if find_spec("deepspeed") is None:  # the rules have said so, but not to a run that is resumed elsewhere
        mend = "run `pip install 'packtrain[deepspeed]'`"
        raise UserError("parallel.strategy", "the package deepspeed is not installed", mend)
    if recipe.launch.device == "cpu":
        failed = "parallel.strategy", "on a CPU, DeepSpeed compiles its collectives, which failed"
        _build(_SHARED_MEMORY, recipe, *failed, "install g++ and ninja, or set parallel.strategy to fsdp")
    if recipe.parallel.offload_dir:
        failed = "parallel.offload_dir", "DeepSpeed's access to disks cannot be compiled"
        _build(_DISK, recipe, *failed, "install libaio-dev, g++ and ninja, or leave offload_dir out")
        try:
            os.makedirs(os.path.expanduser(recipe.parallel.offload_dir), exist_ok=True)
        except OSError as error:
            what = f"{recipe.parallel.offload_dir} cannot be written ({error.strerror})"
            raise UserError("parallel.offload_dir", what, "give a folder you may write to") from error


def clean(recipe: Recipe) -> None:
    """Remove what this run has swapped to a disk of this machine."""
    if recipe.parallel.offload_dir:
        shutil.rmtree(swap_folder(recipe), ignore_errors=True)


def _build(name: str, recipe: Recipe, where: str, what: str, mend: str) -> None:
    remove_abandoned_locks(extensions_folder())
    environment = os.environ | {"DS_ACCELERATOR": recipe.launch.device, "DS_LOG_LEVEL": "error"}
    running = subprocess.Popen(
        [sys.executable, "-c", _BUILD, name],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = running.communicate(timeout=15)  # what is built already loads in a few seconds
    except subprocess.TimeoutExpired:
        note = "DeepSpeed compiles a part of itself, once; this takes some minutes"
        print(f"packtrain: {note}", file=sys.stderr, flush=True)
        output, _ = running.communicate()
    if running.returncode:
        reason = next((line for line in reversed(output.splitlines()) if "Error" in line or "error" in line), "")
        raise UserError(where, f"{what} ({reason.strip()[:200]})" if reason else what, mend)
