"""A setting is changed in a recipe's text and nothing else is; the file is replaced at once or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import yaml

from packtrain.config.rule import Edits
from packtrain.errors import UserError
from packtrain.launch import folder
from packtrain.launch.recipe_edits import edited, replace_recipe

TEXT = """\
# head
model: {path: m}   # where

data:
    train:
    - "d"          # quoted
    max_length: 9000
method:
    rank: 8        # small
    # about alpha
    alpha: 16.0
train: {batch_size: 5, learning_rate: 1.0e-5}

# tail
"""


def changed(edits: Edits, text: str = TEXT) -> list[str]:
    """The lines that are gone and those that are new."""
    before, after = text.splitlines(), edited(text, edits).splitlines()
    return [f"-{line}" for line in before if line not in after] + [f"+{line}" for line in after if line not in before]


@pytest.mark.parametrize(
    ("edits", "lines"),
    [
        ({"data.max_length": 512}, ["-    max_length: 9000", "+    max_length: 512"]),
        ({"method.rank": None}, ["-    rank: 8        # small"]),
        ({"method.rank": None, "method.alpha": None}, ["-method:", "-    rank: 8        # small", "-    alpha: 16.0"]),
        ({"method.type": "qlora"}, ["+    type: qlora"]),
        (
            {"train.batch_size": 6},
            ["-train: {batch_size: 5, learning_rate: 1.0e-5}", "+train: {batch_size: 6, learning_rate: 1.0e-5}"],
        ),
        ({"launch.processes": 2}, ["+launch:", "+    processes: 2"]),
        ({"parallel.offload": None, "a.b.c": None}, []),
        ({"a.b": None, "method.rank": 9}, ["-    rank: 8        # small", "+    rank: 9        # small"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_only_the_setting_changes(edits: Edits, lines: list[str]) -> None:
    assert changed(edits) == lines


@pytest.mark.parametrize("recipe", sorted(Path("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_recipes_keep_every_other_line(recipe: Path) -> None:
    text = recipe.read_text()
    assert edited(text, {}) == text
    made = edited(text, {"train.batch_size": 77, "checkpoint": None})
    assert yaml.safe_load(made)["train"]["batch_size"] == 77 and "checkpoint" not in yaml.safe_load(made)
    kept = [line for line in text.splitlines() if not line.startswith(("  batch_size: ", "checkpoint: "))]
    assert [line for line in made.splitlines() if not line.startswith("  batch_size: ")] == kept


def test_line_ends_and_a_byte_order_mark_stay() -> None:
    text = "\ufeff" + TEXT.replace("\n", "\r\n")
    assert edited(text, {"method.rank": 9}) == text.replace("rank: 8 ", "rank: 9 ")


def test_what_ruamel_writes_on_other_lines_is_still_right() -> None:
    text = "model: {path: m,\n  trust_remote_code: false}\ndata: {train: [d]}\n# a comment\nmethod: {rank: 8}\n"
    made = edited(text, {"method.rank": 9})
    assert yaml.safe_load(made) == {**yaml.safe_load(text), "method": {"rank": 9}} and "# a comment\n" in made


def test_a_setting_inside_a_file_s_name_is_not_edited() -> None:
    with pytest.raises(UserError, match=r"deepspeed_config is 'ds\.json' in the recipe, not a mapping"):
        edited("parallel: {deepspeed_config: ds.json}\n", {"parallel.deepspeed_config.zero_optimization.a": 1})


def test_yaml_of_another_kind_is_not_edited() -> None:
    with pytest.raises(UserError, match=r"--fix: the recipe is not YAML 1\.2"):
        edited("a: @x\n", {"a": 1})


def test_a_link_stays_and_so_do_permissions(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "sub" / "link.yaml"
    link.parent.mkdir()
    real.write_text("a: 1\n")
    real.chmod(0o640)
    link.symlink_to(real)
    replace_recipe(link, "a: 1\n", "a: 2\n")
    assert link.is_symlink() and real.read_text() == "a: 2\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link.yaml", "real.yaml", "sub"]


def test_a_file_that_may_not_be_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("a: 1\n")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        replace_recipe(file, "a: 1\n", "a: 2\n")
    assert file.read_text() == "a: 1\n"


def test_a_file_that_changed_meanwhile_is_left(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("a: 3\n")
    with pytest.raises(UserError, match="has changed in the meantime"):
        replace_recipe(file, "a: 1\n", "a: 2\n")
    assert file.read_text() == "a: 3\n"


def test_a_disk_that_fails_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("a: 1\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.os, "fsync", full)
    with pytest.raises(UserError, match=r"r\.yaml: cannot be written \(No space left on device\)"):
        replace_recipe(file, "a: 1\n", "a: 2\n")
    assert file.read_text() == "a: 1\n" and os.listdir(tmp_path) == ["r.yaml"]
