"""Collation: packed rows give each row's own loss, padding gives nothing, one BOS, the end of the turn comes last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny import make_model, values, write_chats

from packtrain.config import build_recipe
from packtrain.data import TokenStore, pack, prepare_data
from packtrain.data.batches import collate

END_OF_TURN = 4  # <|im_end|>


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TokenStore]:
    folder = tmp_path_factory.mktemp("batches")
    model = make_model(folder / "model")
    data = str(write_chats(folder / "chats.jsonl", 20))
    section = build_recipe(values(model, data, data={"cache": str(folder / "cache"), "max_length": 256})).data
    return model, prepare_data(section, model, 256, 0).train


def row_losses(model_folder: Path, rows: TokenStore, sequences: list[np.ndarray], packed: bool) -> dict[int, float]:
    """The summed loss of each row, the sequences run together as one micro-batch."""
    from packtrain.models.attention import MASKED
    from packtrain.models.causal_lm import CausalLMWithLoss
    from packtrain.models.files import WeightFiles
    from packtrain.models.meta import load_config, meta_model, rebuild_buffers
    from packtrain.models.plan import find_plan
    from packtrain.models.weights import WeightReader, stream_weights

    config = load_config(model_folder)
    model = meta_model(config, torch.float32, MASKED)
    plan = find_plan(model, config)
    wrapped = CausalLMWithLoss(model, plan, MASKED)
    wrapped.to_empty(device="cpu")
    rebuild_buffers(model)
    stream_weights(wrapped, WeightReader(WeightFiles.open(model_folder)))
    batch = collate(rows, sequences, packed)
    with torch.no_grad():
        losses = wrapped(**batch.inputs, per_token=True)
    found: dict[int, float] = {}
    for row, loss in zip(batch.row_ids.tolist(), losses.tolist(), strict=True):
        found[row] = found.get(row, 0.0) + loss
    return found


def test_packed_equals_unpacked_row_by_row(case: tuple[Path, TokenStore]) -> None:
    model, rows = case
    alone = [np.array([i]) for i in range(len(rows))]
    sequences = pack(rows.lengths, 256)
    assert max(len(ids) for ids in sequences) > 2
    wanted, found = row_losses(model, rows, alone, False), row_losses(model, rows, sequences, True)
    assert found.keys() == wanted.keys() == set(range(len(rows)))
    assert [found[i] for i in range(len(rows))] == pytest.approx([wanted[i] for i in range(len(rows))], rel=1e-5)


def test_every_label_is_predicted_once_and_the_end_of_turn_last(case: tuple[Path, TokenStore]) -> None:
    _, rows = case
    batch = collate(rows, pack(rows.lengths, 256), packed=True)
    assert len(batch.row_ids) == rows.label_counts.sum()
    assert batch.num_tokens == rows.lengths.sum()
    for row in range(len(rows)):
        targets = batch.inputs["targets"].numpy()[batch.row_ids == row]
        assert targets.tolist() == rows.tokens(row)[rows.labelled(row)].tolist()
        assert targets[-1] == END_OF_TURN and (targets[:-1] != END_OF_TURN).all()


def test_empty_sequences_are_padding_without_labels(case: tuple[Path, TokenStore]) -> None:
    _, rows = case
    nothing = np.empty(0, dtype=np.int64)
    batch = collate(rows, [nothing, np.array([0]), nothing], packed=True)
    assert batch.inputs["input_ids"].shape[0] == 3
    assert set(batch.row_ids.tolist()) == {0}
    alone = collate(rows, [nothing], packed=False)
    assert len(alone.inputs["targets"]) == 0 and alone.num_tokens == 0


def test_documents_are_marked_by_where_they_lie(case: tuple[Path, TokenStore]) -> None:
    _, rows = case
    ids = np.array([3, 1, 2])
    batch = collate(rows, [ids], packed=True, length=256)
    lengths = rows.lengths[ids]
    total = int(lengths.sum())
    wanted = np.repeat([1, 2, 3, 0], [*lengths, 256 - total])
    assert batch.inputs["document_ids"][0].tolist() == wanted.tolist()
    assert batch.inputs["cu_seqlens"].tolist() == [0, *np.cumsum(lengths).tolist(), 256]
    starts = np.concatenate([np.arange(n) for n in [*lengths, 256 - total]])
    assert batch.inputs["position_ids"][0].tolist() == starts.tolist()
