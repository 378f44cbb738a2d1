"""A sample is the beginning of what the whole data becomes, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtrain.config.schema import DataSection
from packtrain.data.prepare import prepare_data
from packtrain.data.sample import sample_data
from packtrain.errors import UserError


def chats(file: Path, count: int) -> None:
    rows = [
        [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a" * (n % 7)}] for n in range(count)
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def test_a_sample_counts_as_the_whole_does(model: Path, tmp_path: Path) -> None:
    chats(tmp_path / "few.jsonl", 30)
    chats(tmp_path / "many.jsonl", 3000)
    few = DataSection(train=[str(tmp_path / "few.jsonl")], eval=[str(tmp_path / "few.jsonl")])
    many = DataSection(train=[str(tmp_path / "many.jsonl")], eval=0.0)
    whole = prepare_data(few, model, 64, 0).report
    before = sorted((tmp_path / "cache").rglob("*"))
    assert sample_data(few, model, 64).datasets == whole.datasets
    (first,) = sample_data(many, model, 64, rows=30).datasets
    assert (first.read, first.kept, first.reasons) == (30, whole.datasets[0].kept, whole.datasets[0].reasons)
    assert sorted((tmp_path / "cache").rglob("*")) == before


def test_a_sample_says_that_it_is_one(model: Path, tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text('{"input_ids": [9, 10], "labels": [-100, -100]}\n' * 200)
    data = DataSection(train=[str(tmp_path / "no.jsonl")])
    with pytest.raises(UserError, match=r"none of the first 100 rows of .* no token of the row would be learned"):
        sample_data(data, model, 64)


def test_rows_of_a_table_keep_their_lines(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt,completion\nq,a\n\nq,\nq,b\n")
    report = sample_data(DataSection(train=[str(tmp_path / "t.csv")]), model, 64, rows=2)
    assert report.datasets[0].dropped and report.datasets[0].dropped[0][0] == f"{tmp_path}/t.csv:4"
