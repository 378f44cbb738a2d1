"""Weights stream: each shard equals the same slice of the file, and nothing real exists before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.jobs import open_job
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_chats

from packtrain.errors import UserError
from packtrain.models.files import WeightFiles
from packtrain.models.quantized import QuantizedLinear
from packtrain.models.weights import base_tensors, local_tensor


def shards(world: Any, recipe: dict[str, Any]) -> tuple[int, int]:
    """Compare every base parameter's shard with the file; how many were compared, and the bytes read."""
    session = open_job(world, recipe)
    whole: dict[str, torch.Tensor] = {}
    for file in session.model_folder.glob("*.safetensors"):
        whole.update(load_file(file))
    compared = 0
    for tensor in base_tensors(session.built.model):
        assert torch.equal(local_tensor(tensor.holder), whole[tensor.key][tensor.slices]), tensor.key
        compared += 1
    return compared, session.built.bytes_read


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_rank_reads_its_own_slices_of_many_files(tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path / "model", tied=tied, max_shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 3
    data = str(write_chats(tmp_path / "chats.jsonl", 4))
    recipe = values(model, data, method={"type": "lora"}, parallel={"strategy": "fsdp", "shard_size": 2})
    found = run_ranks(2, shards, recipe)
    files = WeightFiles.open(model)
    assert [compared for compared, _ in found] == [len(files.entries)] * 2
    assert sum(read for _, read in found) == files.num_parameters * 4


def quantised_shards(world: Any, recipe: dict[str, Any]) -> int:
    """Compare every quantised shard with the same rows of the whole tensor by bitsandbytes; how many were compared."""
    from bitsandbytes.functional import quantize_4bit

    session = open_job(world, recipe)
    whole = load_file(session.model_folder / "model.safetensors")
    compared = 0
    for tensor in base_tensors(session.built.model):
        if isinstance(tensor.holder, QuantizedLinear):
            packed, state = quantize_4bit(whole[tensor.key], blocksize=64, quant_type="nf4")
            rows = tensor.slices[0]
            own = local_tensor(tensor.holder.packed).view(torch.uint8)
            scales = local_tensor(tensor.holder.scales).view(torch.float32)
            assert torch.equal(own, packed.view(len(whole[tensor.key]), -1)[rows]), tensor.key
            assert torch.equal(scales, state.absmax.view(len(whole[tensor.key]), -1)[rows]), tensor.key
            compared += 1
    return compared


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_quantised_shards_are_rows_of_the_whole_by_bitsandbytes(tmp_path: Path, precision: str) -> None:
    model = make_model(tmp_path / "model", intermediate_size=128)
    data = str(write_chats(tmp_path / "chats.jsonl", 4))
    recipe = values(
        model, data, method={"type": "qlora"}, parallel={"strategy": "fsdp", "shard_size": 3},
        train={"precision": precision}, launch={"processes": 3},
    )  # fmt: skip
    assert run_ranks(3, quantised_shards, recipe) == [7 * 4] * 3


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", max_shard_size="100KB")
    gone = sorted(model.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=gone.name):
        WeightFiles.open(model)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle"):
        WeightFiles.open(model)
