"""What config.json alone says of a model, beside the model itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import make_model

from packtrain.errors import UserError
from packtrain.launch import model_facts as module
from packtrain.launch.model_facts import model_facts, planned_model_facts

EXTRA: dict[str, dict[str, Any]] = {"granite": {}, "llama": {"attention_bias": True, "mlp_bias": True}}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", sorted(module._FAMILIES))
def test_config_alone_says_what_the_weights_say(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(tmp_path / "model", family, tied, **EXTRA.get(family, {}))
    wanted = model_facts(model)
    (tmp_path / "config").mkdir()
    shutil.copy(model / "config.json", tmp_path / "config")
    found = planned_model_facts(tmp_path / "config")
    assert found.num_parameters == wanted.num_parameters and found.tied == wanted.tied == tied
    assert sorted(map(repr, found.linears)) == sorted(map(repr, wanted.linears))
    assert (found.kv_width, found.qk_norm) == (wanted.kv_width, wanted.qk_norm)


def test_another_architecture_is_built_without_memory(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "phi3")
    wanted = model_facts(model)
    for file in model.glob("*.safetensors"):
        file.unlink()
    found = planned_model_facts(model)
    assert found.num_parameters == wanted.num_parameters and found.linears == wanted.linears
    assert found.kv_width == 2 * 16


def test_the_weights_count_where_they_are(tmp_path: Path) -> None:
    assert planned_model_facts(make_model(tmp_path / "model")) == model_facts(tmp_path / "model")


@pytest.mark.parametrize("value, told", [("many", "vocab_size is 'many'"), (None, "has no vocab_size")])
def test_a_size_that_is_none_is_named(tmp_path: Path, value: Any, told: str) -> None:
    model = make_model(tmp_path / "model")
    made = json.loads((model / "config.json").read_text()) | {"vocab_size": value}
    for folder in (tmp_path, model):  # config.json alone, and beside its weights
        (folder / "config.json").write_text(json.dumps(made))
        with pytest.raises(UserError, match=told):
            planned_model_facts(folder)


def test_a_mixture_of_experts_is_refused_without_its_weights_too(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="mixture of experts"):
        planned_model_facts(tmp_path)


def test_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(UserError, match="intermediate_size"):
        planned_model_facts(tmp_path)
