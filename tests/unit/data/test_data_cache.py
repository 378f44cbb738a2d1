from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli.data import show_data
from packtrain.data import DataReport, PreparedData, TokenStore
from packtrain.data.cache import build_once

Prepare = Callable[..., PreparedData]
Write = Callable[..., Path]
ROWS = [{"instruction": f"q{n}", "output": f"a{n}"} for n in range(40)]


def test_hit_and_miss(write: Write, prepare: Prepare) -> None:
    path = write(ROWS)
    first = prepare(path)
    assert prepare(path).train.folder == first.train.folder
    assert prepare(path, eval=0.5, seed=9).train.folder == first.train.folder
    assert prepare(path, train_on="all").train.folder != first.train.folder
    assert prepare(path, max_length=99).train.folder != first.train.folder
    changed = prepare(write([*ROWS[1:], {"instruction": "q", "output": "new"}]))
    assert changed.train.folder != first.train.folder
    assert len(changed.train) == 40


def test_unfinished_build_leaves_nothing(write: Write, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    path = write(ROWS)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("packtrain.data.store.StoreWriter.attach", killed)
        prepare(path)
    assert len(prepare(path).train) == 40


def test_build_once(tmp_path: Path) -> None:
    assert build_once(tmp_path / "a", Path.mkdir)
    assert not build_once(tmp_path / "a", Path.mkdir)


def test_held_out_share(write: Write, prepare: Prepare) -> None:
    path = write(ROWS)

    def held(seed: int, share: float) -> set[str]:
        prepared = prepare(path, eval=share, seed=seed)
        assert prepared.eval is not None
        places = {prepared.eval.where(row) for row in range(len(prepared.eval))}
        assert places.isdisjoint(prepared.train.where(row) for row in range(len(prepared.train)))
        assert len(prepared.train) + len(prepared.eval) == 40
        return places

    assert len(held(1, 0.25)) == 10
    assert len(held(1, 0.001)) == 1
    assert held(1, 0.25) == held(1, 0.25) != held(2, 0.25)
    assert prepare(write(ROWS[:1], "one.jsonl"), eval=0.5).eval is None


def test_store(write: Write, prepare: Prepare) -> None:
    store = TokenStore.open(prepare(write(ROWS)).train.folder)
    assert store.lengths.dtype == store.label_counts.dtype == store.tokens(0).dtype == np.int32
    assert store.labelled(0).dtype == np.bool_
    part = store.select(np.array([7, 3]))
    assert part.tokens(1).tolist() == store.tokens(3).tolist()
    assert part.where(0) == store.where(7)


def test_report_travels_as_json(write: Write, prepare: Prepare) -> None:
    report = prepare(write([*ROWS, {"instruction": "q", "output": ""}]), eval=0.1).report
    assert DataReport.from_json(report.to_json()) == report
    assert report.train is not None
    assert report.train.sequences == 2
    assert 0.8 < report.train.efficiency <= 1


def test_show_data(
    write: Write, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.models.locate.model_folder", lambda path: model)
    (model / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 256}')
    path = write([*ROWS, {"instruction": "q", "output": ""}])
    recipe = write(f"model: {{path: {model}}}\ndata: {{train: {path}, eval: 0}}\n", "r.yaml")
    show_data(str(recipe), [], rows=1)
    shown = capsys.readouterr().out
    assert f"{path}:41: empty answer in column 'output'".replace("\n", "") in shown.replace("\n", "")
    assert "max_length 256" in shown
    assert "<|im_start|>assistant\n⟦a0<|im_end|>⟧" in shown
    show_data(str(recipe), ["data.max_length=64"], json=True)
    assert '"max_length": 64' in capsys.readouterr().out
