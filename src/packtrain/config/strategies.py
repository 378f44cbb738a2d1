"""Which strategy takes which method with which offload: asked of the rules, so that the table cannot be wrong.

``python -m packtrain.config.strategies`` prints the table of docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.load import build_recipe
from packtrain.config.rules import first_error

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    **{f"deepspeed, ZeRO-{stage}": {"strategy": "deepspeed", "zero_stage": stage} for stage in range(4)},
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "freeze": {"type": "freeze", "freeze_first": 1},
    "lora": {"type": "lora"},
    "qlora": {"type": "qlora"},
    "llama_adapter": {"type": "llama_adapter"},
    "prefix": {"type": "prefix"},
}
DISK = "/nvme"
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload": "optimizer"},
    "params": {"offload": "params"},
    "optimizer on a disk": {"offload": "optimizer", "offload_dir": DISK},
    "params, optimizer on a disk": {"offload": "params", "offload_dir": DISK},
}


@dataclass(frozen=True)
class Cell:
    """One combination, and what the rules say against it. ``instead``: the mend; empty where it runs."""

    strategy: str
    offload: str
    method: str
    instead: str

    @property
    def runs(self) -> bool:
        return not self.instead


def cells() -> Iterator[Cell]:
    """Every combination of strategy, offload and method."""
    for strategy, parallel in STRATEGIES.items():
        for offload, where in OFFLOADS.items():
            for method, section in METHODS.items():
                processes = 1 if strategy == "single" else 2
                yield Cell(strategy, offload, method, _instead({**parallel, **where}, section, processes))


def _instead(parallel: dict[str, Any], method: dict[str, Any], processes: int) -> str:
    model = ModelFacts(8_000_000_000, 32, 4096, 14336, 128256, 8192)
    facts = Facts(processes, processes, "cuda", processes, 80 * 2**30, True, 16, model)
    recipe = build_recipe(
        {"model": {"path": "m"}, "data": {"train": ["d"]}, "method": dict(method), "parallel": dict(parallel)}
    )
    broken = first_error(recipe, facts)
    return broken.mend if broken else ""


def as_markdown() -> str:
    """A row for each strategy and offload."""
    lines = [f"| strategy | offload | {' | '.join(METHODS)} | instead |", "| --- " * (len(METHODS) + 3) + "|"]
    made: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells():
        made.setdefault((cell.strategy, cell.offload), []).append(cell)
    for (strategy, offload), row in made.items():
        words = " | ".join("runs" if cell.runs else "no" for cell in row)
        instead = "; ".join(dict.fromkeys(cell.instead for cell in row if cell.instead))
        lines.append(f"| {strategy} | {offload} | {words} | {instead} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
