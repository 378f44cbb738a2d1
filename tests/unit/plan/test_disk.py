"""What a run is said to write, beside what it writes; and the setting that frees most memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tiny import make_model, values, write_chats

from packtrain.config import build_recipe
from packtrain.config.resolve import resolve
from packtrain.errors import UserError
from packtrain.launch import prepare
from packtrain.launch.facts import gather_facts
from packtrain.launch.model_facts import model_facts
from packtrain.plan.disk import disk
from packtrain.plan.savings import planned, savings

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("disk") / "model")


def recipe(model: Path, **sections: dict[str, Any]) -> Any:
    return build_recipe(values(model, "rows.jsonl", **sections))


@pytest.mark.parametrize(
    ("optimizer", "weights", "bytes_each"),
    [("adamw", "fp32", 12), ("adamw_8bit", "fp32", 6 + 8 / 256), ("adamw_bf16", "bf16", 6)],
)
def test_bytes_of_a_checkpoint(model: Path, optimizer: str, weights: str, bytes_each: float) -> None:
    facts = model_facts(model)
    plan = disk(recipe(model, train={"optimizer": optimizer, "master_weights": weights}, checkpoint={"keep": 3}), facts)
    assert plan.checkpoint == facts.num_parameters * bytes_each and plan.checkpoints == 4
    assert plan.total > 4 * plan.checkpoint + plan.final


def test_a_disk_that_cannot_hold_the_run_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(model, output={"folder": str(tmp_path / "new" / "runs"), "name": "run"})
    plan = disk(asked, model_facts(model))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=plan.total - 1))
    with pytest.raises(UserError, match=r"MiB free, and the run will write .* lower checkpoint.keep") as caught:
        prepare._refuse_full_disk(asked, model)
    assert str(tmp_path) in str(caught.value) and not (tmp_path / "new").exists()
    written = tmp_path / "new" / "runs" / "run"  # a resumed run has some of it already
    written.mkdir(parents=True)
    (written / "shard").write_bytes(bytes(2))
    prepare._refuse_full_disk(asked, model)


def test_what_frees_most(model: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "rows.jsonl", 4)
    long = recipe(
        model, data={"max_length": 8192}, train={"micro_batch_size": 16, "batch_size": 16}, method={"type": "full"}
    )
    resolved = resolve(long, gather_facts(long))
    facts = gather_facts(resolved, 1)
    found = savings(resolved, facts)
    by_name = {saving.setting: saving.freed for saving in found}
    assert [saving.freed for saving in found] == sorted(by_name.values(), reverse=True)
    assert {"train.micro_batch_size=1", "parallel.recompute=full", "data.max_length=4096"} <= set(by_name)
    smaller = resolved.model_copy(deep=True)
    smaller.train.micro_batch_size = 1
    assert by_name["train.micro_batch_size=1"] == planned(resolved, facts) - planned(smaller, facts) > 0
    least = resolved.model_copy(deep=True)
    least.train.micro_batch_size, least.parallel.recompute, least.data.max_length = 1, "full", 256
    least.method.type, least.train.optimizer = "qlora", "adamw_8bit"
    assert savings(least, facts) == []
