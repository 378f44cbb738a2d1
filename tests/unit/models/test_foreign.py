"""A file that a library cannot use, or that is damaged, is one sentence."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import make_model

from packtrain.config.cache_folder import writable
from packtrain.data import load_tokenizer
from packtrain.errors import UserError
from packtrain.models.attention import MASKED
from packtrain.models.files import WeightFiles
from packtrain.models.foreign import refused
from packtrain.models.meta import load_config, meta_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.mark.parametrize(
    "key, value",
    [
        ("rms_norm_eps", "a"),
        ("dtype", "float7"),
        ("rope_parameters", "x"),
        ("layer_types", ["x"]),
        ("hidden_act", "y"),
    ],
)
def test_a_config_that_transformers_refuses(model: Path, key: str, value: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError) as caught:
        meta_model(load_config(model), torch.float32, MASKED)
    told = str(caught.value)
    assert "\n" not in told and (key in told or str(value) in told), told


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_a_tokenizer_that_cannot_be_read(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(UserError) as caught:
        load_tokenizer(model)
    assert caught.value.where == str(model) and "\n" not in str(caught.value)


HEADERS = ["[]", "3", '{"a": 3}', '{"a": {}}', '{"a": {"data_offsets": []}}', '{"a": {"data_offsets": [0, "x"]}}', "{"]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_of_weights_that_is_none(model: Path, header: str) -> None:
    file = model / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(UserError, match="not a whole safetensors file"):
        WeightFiles.open(model)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="not a whole safetensors file"):
        WeightFiles.open(model)


def test_the_cause_is_told_where_the_error_is_a_heading() -> None:
    with (
        pytest.raises(UserError, match=r"f: cannot be used \(it is 3\); mend it"),
        refused("f", "cannot be used", "mend it"),
    ):
        raise RuntimeError("Error of x:\nmore") from ValueError("it is 3")


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    assert writable(tmp_path / "a" / "b", "data.cache").is_dir()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(UserError, match=r"data\.cache"):
            writable(folder, "data.cache")
