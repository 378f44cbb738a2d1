"""Loading a model takes staging buffers beside what a process keeps, whatever the files look like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "loading.py"
BOUND = 128 * 2**20  # bytes; the models have 600 to 1200 MB, half of which a second copy of a shard would be


def load(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARK), "--billions", "0.3", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["ranks"]
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("--strategy", "fsdp"),
        pytest.param(("--strategy", "fsdp", "--dtype", "fp32", "--tied", "--one-file"), marks=pytest.mark.slow),
        pytest.param(("--strategy", "ddp", "--dtype", "fp16"), marks=pytest.mark.slow),
        pytest.param(("--strategy", "single", "--processes", "1", "--precision", "fp32"), marks=pytest.mark.slow),
        pytest.param(("--strategy", "fsdp", "--method", "qlora"), marks=pytest.mark.slow),
        pytest.param(("--strategy", "ddp", "--method", "prefix"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_memory_beyond_the_shard_is_bounded(arguments: tuple[str, ...]) -> None:
    found = load(*arguments)
    assert min(rank["kept"] for rank in found) > 100 * 2**20
    assert max(rank["beyond"] for rank in found) < BOUND


@pytest.mark.slow
def test_one_process_of_a_node_reads_for_all() -> None:
    first, second = load("--strategy", "ddp")
    assert first["kept"] == second["kept"]
    assert first["read"] >= 0.3e9 * 2 * 0.9
    assert second["read"] == 0
