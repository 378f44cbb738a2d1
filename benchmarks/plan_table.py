"""The tables of docs/planning.md: what was measured (results.csv) beside the plan as it is now.

python benchmarks/plan_table.py            # prints docs/planning.md with both tables filled in
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.unit.plan.measured import GIB, RESULTS, calibrated, measured  # noqa: E402

from packtrain.plan.memory import recomputed_share, total  # noqa: E402
from packtrain.plan.speed import speed  # noqa: E402


def gpu_table() -> list[str]:
    lines = [
        "| run on one H200 | GiB | planned | | tokens/s | published | | calibrated | |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for run in measured():
        share, micro = recomputed_share(run.recompute), run.recipe.train.micro_batch_size
        assert isinstance(micro, int)
        memory = total(run.recipe, run.facts, micro, share) / GIB
        rates = []
        for facts in (run.facts, calibrated(run)):
            found = speed(run.recipe, facts, micro, share)
            assert found
            rate = found.tokens_per_second
            rates.append(f"{rate:,.0f} | {rate / run.tokens_per_second - 1:+.1%}")
        name = run.name if run.full_rows else rf"{run.name} \*"
        lines.append(
            f"| {name} | {run.gib:.1f} | {memory:.1f} | {memory / run.gib - 1:+.1%} "
            f"| {run.tokens_per_second:,.0f} | {' | '.join(rates)} |"
        )
    return lines


def cpu_table() -> list[str]:
    lines = ["| run on the CPU | MiB | planned | |", "| --- | --: | --: | --: |"]
    found: dict[str, dict[str, float]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["benchmark"].startswith("memory on the CPU: "):
                found.setdefault(row["benchmark"].partition(": ")[2], {})[row["metric"]] = float(row["value"])
    for name, values in found.items():
        measured_, planned = values["peak memory"], values["planned memory"]
        lines.append(f"| {name} | {measured_:,.0f} | {planned:,.0f} | {planned / measured_ - 1:+.1%} |")
    return lines


def filled(text: str) -> str:
    """The page with both tables as they are now, whatever they were."""
    for mark, lines in (("table: gpu", gpu_table()), ("table: cpu", cpu_table())):
        before, _, after = text.partition(f"<!-- {mark} -->\n\n")
        rest = after.splitlines(keepends=True)
        while rest and rest[0].startswith("|"):
            rest.pop(0)
        text = f"{before}<!-- {mark} -->\n\n" + "\n".join(lines) + "\n\n" + "".join(rest).lstrip("\n")
    return text


if __name__ == "__main__":
    print(filled((ROOT / "docs" / "planning.md").read_text()), end="")
