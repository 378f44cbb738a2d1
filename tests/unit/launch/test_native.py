"""What DeepSpeed must compile is compiled, or refused, before anything waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtrain.config import Recipe, build_recipe
from packtrain.errors import UserError
from packtrain.launch import native


def recipe(device: str = "cpu", **parallel: Any) -> Recipe:
    return build_recipe(
        {
            "model": {"path": "m"}, "data": {"train": ["d"]}, "launch": {"device": device},
            "parallel": {"strategy": "deepspeed", **parallel},
        }
    )  # fmt: skip


def refused(recipe: Recipe) -> str:
    with pytest.raises(UserError) as caught:
        native.build(recipe)
    return str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    assert "pip install 'packtrain[deepspeed]'" in refused(recipe())


def test_what_cannot_be_compiled_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_BUILD", "raise RuntimeError('no compiler')")
    assert "RuntimeError: no compiler" in refused(recipe()) and "g++" in refused(recipe())
    on_disk = refused(recipe("cuda", offload="optimizer", offload_dir="/nowhere"))
    assert "libaio-dev" in on_disk and "\n" not in on_disk


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_BUILD", "")
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in refused(recipe("cuda", offload="optimizer", offload_dir=str(file)))


def test_other_strategies_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("compiled"))
    native.build(recipe(strategy="fsdp"))
