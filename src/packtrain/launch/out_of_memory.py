"""What a run that ran out of memory is told: what was planned, what was used, and which setting frees most."""

from __future__ import annotations

import sys

import psutil

from packtrain.config import Recipe, load_recipe
from packtrain.errors import UserError
from packtrain.launch.facts import gather_facts
from packtrain.launch.folder import RunFolder
from packtrain.plan.savings import planned, savings

SHOWN = 3
_GIB = 2**30


def memory_advice(folder: RunFolder) -> str:
    """``explain`` for a run's own recipe. It is made where memory is short, and says so where it cannot be made."""
    try:
        return explain(load_recipe(folder.recipe))
    except (MemoryError, RuntimeError, OSError, UserError) as problem:
        return f"lower train.micro_batch_size or data.max_length (no plan could be made: {problem})"


def explain(recipe: Recipe) -> str:
    """One sentence for a resolved recipe, said by the rank that ran out or by its supervisor."""
    processes = recipe.launch.processes
    assert isinstance(processes, int), "resolve comes first"
    facts = gather_facts(recipe, processes)
    freeing = [f"{saving.setting} (about {saving.freed / _GIB:.1f} GiB)" for saving in savings(recipe, facts)[:SHOWN]]
    mend = f"what frees most: {', '.join(freeing)}" if freeing else "more processes, or a smaller model, are left"
    return f"planned {planned(recipe, facts) / _GIB:.1f} GiB a process, {_used(facts.device)}; {mend}"


def _used(device: str) -> str:
    if device == "cuda" and (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        peak = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.memory_reserved()
        return f"used {peak / _GIB:.1f} GiB at the peak, {reserved / _GIB:.1f} reserved, of {total / _GIB:.1f} GiB"
    memory = psutil.virtual_memory()
    peak = _peak_rss()
    return f"used {peak / _GIB:.1f} GiB at the peak of the host's {memory.total / _GIB:.1f} GiB"


def _peak_rss() -> int:
    """The most that this process, or any child of it that has ended, had in memory."""
    import resource

    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
