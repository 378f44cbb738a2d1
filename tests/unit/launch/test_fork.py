from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from packtrain.checkpoint.folders import faults, newest, whole
from packtrain.config import build_recipe, dump_recipe, load_recipe
from packtrain.config.difference import difference
from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder
from packtrain.launch.fork import adopt_checkpoint, chosen, forked_recipe, refuse_what_does_not_fit, rewind


def checkpoint(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / f"step-{step}"
    path.mkdir()
    (path / "shard").write_bytes(b"weights")
    files = {"shard": {"size": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}}
    (path / "manifest.json").write_text(json.dumps({"files": files}))
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs", "first")
    values = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "output": {"folder": str(tmp_path / "runs"), "name": "first"},
    }
    folder.asked.write_text(dump_recipe(build_recipe(values)))
    for step in (2, 4, 6):
        checkpoint(folder, step)
    return folder


def test_rewind_sets_later_ones_aside(run: RunFolder) -> None:
    rewind(run, 4)
    assert list(whole(run.checkpoints)) == [2, 4]
    checkpoint(run, 6)
    rewind(run, 2)
    assert {path.name for path in run.checkpoints.iterdir()} == {
        "step-2", "step-4.aside", "step-6.aside", "step-6.aside-2",
    }  # fmt: skip


def test_only_a_whole_checkpoint_is_chosen(run: RunFolder) -> None:
    assert chosen(run, None) == run.checkpoints / "step-6"
    (run.checkpoints / "step-6" / "shard").write_bytes(b"weighty")
    assert chosen(run, None) == run.checkpoints / "step-4"
    with pytest.raises(UserError, match=r"--step 6: step-6: shard is damaged"):
        rewind(run, 6)
    with pytest.raises(UserError, match="choose from 2, 4 or 6"):
        chosen(run, 3)
    assert list(whole(run.checkpoints)) == [2, 4, 6]


@pytest.mark.parametrize("manifest", ["", "{}", "[]", '{"files": 3}', "\xff"])
def test_a_manifest_that_is_none(run: RunFolder, manifest: str) -> None:
    (run.checkpoints / "step-6" / "manifest.json").write_text(manifest, encoding="latin-1")
    assert "no readable manifest.json" in str(faults(run.checkpoints / "step-6"))
    assert newest(run.checkpoints)[0] == run.checkpoints / "step-4"


def test_a_fork_shares_files_and_has_a_name_of_its_own(run: RunFolder) -> None:
    asked = forked_recipe(run, ["train.learning_rate=0.5"], None)
    assert (asked.output.name, asked.train.learning_rate) == ("first-fork", 0.5)
    child = RunFolder.create(run.path.parent, "first-fork")
    assert forked_recipe(run, [], None).output.name == "first-fork-2"
    assert forked_recipe(run, ["output.name=mine"], None).output.name == "mine"
    assert forked_recipe(run, [], "yours").output.name == "yours"
    adopt_checkpoint(child, run.checkpoints / "step-4")
    twin = child.checkpoints / "step-4" / "shard"
    assert twin.samefile(run.checkpoints / "step-4" / "shard") and faults(twin.parent) is None


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", "", "a" * 101])
def test_a_name_cannot_leave_the_folder(run: RunFolder, name: str) -> None:
    with pytest.raises(UserError):
        forked_recipe(run, [], name)
    with pytest.raises(UserError):
        forked_recipe(run, [f"output.name={name}"], None)


@pytest.mark.parametrize(
    ("word", "fits"),
    [
        ("train.learning_rate=0.5", True),
        ("train.batch_size=64", True),
        ("train.max_steps=900", True),
        ("method.dropout=0.1", True),
        ("parallel.recompute=full", True),
        ("method.rank=4", False),
        ("method.type=full", False),
        ("data.train=[other.jsonl]", False),
        ("data.max_length=64", False),
        ("model.path=other", False),
        ("train.optimizer=adamw_8bit", False),
    ],
)
def test_what_a_checkpoint_stands_on_cannot_change(run: RunFolder, word: str, fits: bool) -> None:
    changes = difference([load_recipe(run.asked), forked_recipe(run, [word], None)])
    assert [setting.key for setting in changes] == [word.partition("=")[0]]
    if fits:
        refuse_what_does_not_fit(run.checkpoints / "step-6", changes)
        return
    with pytest.raises(UserError, match=r"does not fit step-6, which was trained with the former; .* --scratch"):
        refuse_what_does_not_fit(run.checkpoints / "step-6", changes)
