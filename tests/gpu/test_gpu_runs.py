"""Runs on a GPU: it has one owner at a time, and what goes wrong on it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults import SAVE_EVERY, STEPS, Fault
from tests.tiny import make_model, values, write_chats
from tests.trial import LIMIT, Trial, wait

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def make_recipe(folder: Path, steps: int) -> dict[str, Any]:
    return values(
        make_model(folder / "model"), str(write_chats(folder / "chats.jsonl", 24)),
        method={"type": "lora", "rank": 4}, parallel={"strategy": "auto", "shard_size": "auto"},
        launch={"device": "cuda", "processes": "auto", "gpus": 1, "timeout": "60s"}, checkpoint={"every": SAVE_EVERY},
        evaluate={"every": "never"}, train={"max_steps": steps, "batch_size": 2, "micro_batch_size": 2},
    )  # fmt: skip


def trial(folder: Path, fault: Fault | None, steps: int = STEPS) -> Trial:
    folder.mkdir()
    return Trial(make_recipe(folder, steps), folder, fault)


def test_the_second_run_waits_for_the_gpu_of_the_first(tmp_path: Path) -> None:
    first, second = trial(tmp_path / "first", None, 1_000_000), trial(tmp_path / "second", None)
    before = first.start()
    wait(lambda: first.run.status.exists() and first.run.read_status().state == "running", LIMIT)
    owned = first.run.read_status().gpus
    assert len(owned) == 1 and owned[0].startswith("GPU-")
    after = second.start("train", str(second.recipe), "launch.gpus=[0]")
    wait(lambda: second.run.status.exists() and second.run.read_status().note != "", LIMIT)
    assert second.run.derived_state() == "queued" and str(first.run.path) in second.run.read_status().note
    first.run.ask("stop")
    out, _ = before.communicate(timeout=LIMIT)
    assert before.returncode == 130, out
    out, _ = after.communicate(timeout=LIMIT)
    assert after.returncode == 0 and "queued for 1 free GPU" in out, out
    assert second.run.read_status().state == "done" and second.run.read_status().gpus == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("memory", ["planned", "reserved, of", "what frees most"]),
        ("hang", ["rank 0 hangs: it made no progress", "faulty_worker.py"]),
        ("kill", ["rank 0 was killed by SIGKILL"]),
    ],
)
def test_a_fault_is_named_and_the_run_goes_on(tmp_path: Path, kind: str, words: list[str]) -> None:
    fault = Fault(kind, f"{kind}:0:8", "failed", "", 30, SAVE_EVERY)
    broken = trial(tmp_path / "broken", fault)
    process = broken.start()
    seconds = broken.seconds_to("failed")
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and seconds <= 30
    assert all(word in out for word in words), out
    assert broken.orphans() == []
    broken.resume()
    assert sorted(broken.losses()) == list(range(1, STEPS + 1))
