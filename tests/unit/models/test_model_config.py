"""config.json is read once and checked: what no model can have is one sentence, before anything is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import UserError
from packtrain.models.model_config import ModelConfig, read_model_config

GOOD: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 261, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
)  # fmt: skip
NO_SIZE = ("many", "64", [64], {}, True, 0, -5, 64.5, 64.0, float("nan"), 10**15)
OTHERS = {
    "model_type": (1, [1], {}),
    "tie_word_embeddings": ("abc", 1, []),
    "use_sliding_window": ("no",),
    "attention_bias": ("yes",),
    "mlp_bias": (0,),
    "num_experts": ("8", -1, True),
    "num_local_experts": ([8],),
    "n_routed_experts": (2.5,),
    "quantization_config": ("nf4", [1], 4, True),
    "text_config": ("x", [1], 5, True),
}


def write(folder: Path, values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize("key", [*SIZES, *OTHERS])
def test_a_value_that_no_model_has_is_named(tmp_path: Path, key: str) -> None:
    for value in OTHERS.get(key, NO_SIZE):
        file = write(tmp_path, GOOD | {key: value})
        with pytest.raises(UserError) as caught:
            read_model_config(file)
        assert caught.value.where == str(file)
        assert caught.value.what.startswith(f"{key} is {value!r}, not "), caught.value


@pytest.mark.parametrize("key", [*SIZES, *OTHERS])
def test_null_is_silence(tmp_path: Path, key: str) -> None:
    silent = {name: value for name, value in GOOD.items() if name != key}
    expected = read_model_config(write(tmp_path, silent))
    assert read_model_config(write(tmp_path, GOOD | {key: None})) == expected


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'"x"', b"3", b"true", b"\xef\xbb\xbf{}", b"\xff\xfe{}", b"[" * 100_000, b"{'a': 1}"],
    ids=["empty", "cut", "list", "null", "text", "number", "bool", "bom", "utf16", "deep", "python"],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match="JSON"):
        read_model_config(tmp_path / "config.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_model_config(tmp_path)  # a folder


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_model_config(write(tmp_path, GOOD | {"hidden_size": "x" * 10_000}))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 does not divide num_attention_heads 4"),
        ({"num_attention_heads": 6}, "num_attention_heads 6 does not divide hidden_size 64"),
    ],
)
def test_heads_divide(tmp_path: Path, changes: dict[str, int], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_model_config(write(tmp_path, GOOD | changes))


def test_heads_of_a_size_of_their_own(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, GOOD | {"num_attention_heads": 6, "head_dim": 16}))
    assert (config.head_size, config.kv_width, config.even_heads) == (16, 32, False)
    assert read_model_config(write(tmp_path, GOOD)).even_heads


def test_the_text_part_goes_before_the_rest(tmp_path: Path) -> None:
    whole = {"model_type": "seen", "hidden_size": 8, "tie_word_embeddings": True, "text_config": GOOD}
    config = read_model_config(write(tmp_path, whole))
    assert (config.model_type, config.hidden_size, config.tie_word_embeddings) == ("llama", 64, True)


def test_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, {"model_type": "llama"}))
    assert isinstance(config, ModelConfig) and (config.kv_width, config.experts) == (0, 0)
    with pytest.raises(UserError, match="has no hidden_size"):
        config.size("hidden_size")
