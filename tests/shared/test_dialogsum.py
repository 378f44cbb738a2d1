"""Trained on dialogues nobody here wrote, the demo model's ROUGE-L rises by at least a third."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "dialogsum"


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.timeout(3000)
def test_rouge_rises_by_a_third(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from dialogsum import measure

    found = measure(DATA, tmp_path)
    assert found["after"]["rows"] == 50
    assert found["after"]["rougeL"] >= found["before"]["rougeL"] * 4 / 3, found
