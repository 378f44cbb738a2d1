"""docs/planning.md shows the plan as it is now, beside what was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "plan_table.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / "docs" / "planning.md").read_text(), "python benchmarks/plan_table.py > docs/planning.md"
