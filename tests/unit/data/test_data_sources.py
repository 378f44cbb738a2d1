"""Every kind of source and format becomes the chat it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.config.schema import Dataset
from packtrain.data import PreparedData, TokenStore, load_tokenizer
from packtrain.data.sources import find_source, rows

Prepare = Callable[..., PreparedData]
Write = Callable[..., Path]
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
PAIR = "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


def text(store: TokenStore, model: Path, row: int = 0) -> str:
    return str(load_tokenizer(model).decode(store.tokens(row)))


MESSAGES = [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]
SHAREGPT = [{"from": "human", "value": "Add.\n\n1 2"}, {"from": "gpt", "value": "3"}]


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        (ALPACA, {}, PAIR),
        ({**ALPACA, "system": "Be brief."}, {}, SYSTEM + PAIR),
        ({"instruction": "Add.\n\n1 2", "output": "3"}, {}, PAIR),
        ({"instruction": "Add.\n\n1 2", "input": None, "output": "3"}, {}, PAIR),
        ({"messages": MESSAGES}, {}, PAIR),
        ({"conversations": MESSAGES}, {}, PAIR),
        ({"conversation": MESSAGES}, {}, PAIR),
        ({"conversations": SHAREGPT}, {}, PAIR),
        ({"conversations": SHAREGPT, "system": "Be brief."}, {}, SYSTEM + PAIR),
        ({"talk": SHAREGPT}, {"format": "sharegpt", "columns": {"conversations": "talk"}}, PAIR),
        ({"talk": MESSAGES}, {"columns": {"messages": "talk"}, "format": "messages"}, PAIR),
        (
            {"q": "Add.", "x": "1 2", "y": "3"},
            {"columns": {"instruction": "q", "input": "x", "output": "y"}},
            PAIR,
        ),
        ({"q": "Add.", "x": "1 2", "answer": "3"}, {"prompt": "{q}\n\n{x}"}, PAIR),
        ({"q": "Add.", "x": "1 2", "y": "3"}, {"prompt": "{q}\n\n{x}", "columns": {"output": "y"}}, PAIR),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, {}, PAIR),
        ({"prompt": "ab", "completion": "cd"}, {}, "abcd</s>"),
        ({"text": "abc"}, {}, "abc</s>"),
        ({"body": "abc"}, {"columns": {"text": "body"}}, "abc</s>"),
    ],
)
def test_format(
    row: dict[str, Any], settings: dict[str, Any], expected: str, write: Write, prepare: Prepare, model: Path
) -> None:
    assert text(prepare([{"path": str(write([row])), **settings}]).train, model) == expected


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.csv", "a.parquet"])
def test_file_kinds(name: str, write: Write, prepare: Prepare, model: Path, tmp_path: Path) -> None:
    table = [ALPACA, {**ALPACA, "input": "2\n3"}]
    if name.endswith("parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(table), path)
    elif name.endswith("csv"):
        path = write('\ufeffinstruction,input,output\r\nAdd.,1 2,3\r\n\r\nAdd.,"2\n3",3\r\n', name)
    elif name == "a.json":
        path = write(json.dumps(table), name)
    else:
        path = write("\ufeff" + json.dumps(table[0]) + "\r\n\r\n" + json.dumps(table[1]), name)
    store = prepare(path).train
    assert len(store) == 2
    assert text(store, model) == PAIR
    expected = {"a.json": "row 2", "a.parquet": "row 2", "a.csv": "4"}.get(name, "3")
    assert store.where(1) == f"{path}:{expected}"
    assert [row.where for row in rows(find_source(Dataset(path=str(path))))][1] == store.where(1)


@pytest.mark.parametrize(
    ("name", "train", "test", "start"),
    [
        ("samsum_mini", 250, 50, "Summarize this dialogue in one sentence:\n"),
        ("alpaca_mini", 90, 10, ""),
        ("grammar_mini", 90, 10, "Correct this to standard English:\n"),
    ],
)
def test_miniatures(name: str, train: int, test: int, start: str, prepare: Prepare, model: Path) -> None:
    prepared = prepare(name, max_length=2048, eval=[{"path": name, "split": "test"}])
    assert prepared.eval is not None
    assert (len(prepared.train), len(prepared.eval)) == (train, test)
    assert text(prepared.train, model).startswith(f"<|im_start|>user\n{start}")
    assert prepared.report.warnings == []


def test_own_prompt_for_a_registered_name(prepare: Prepare, model: Path) -> None:
    store = prepare([{"path": "samsum_mini", "prompt": "TL;DR {dialogue}"}], max_length=2048).train
    assert text(store, model).startswith("<|im_start|>user\nTL;DR ")


def test_registered_columns_in_a_file(write: Write, prepare: Prepare, model: Path) -> None:
    store = prepare(write([{"sentence": "I is.", "corrections": ["I am.", "I was."]}])).train
    assert "Correct this to standard English:\nI is.<|im_end|>" in text(store, model)
    assert "I am.<|im_end|>" in text(store, model)


def test_hub(prepare: Prepare, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(path: str, split: str) -> datasets.Dataset:
        asked.append((path, split))
        return datasets.Dataset.from_list([{"sentence": "I is.", "corrections": ["I am."]}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    store = prepare("grammar").train
    assert asked == [("jhu-clsp/jfleg", "validation")]
    assert store.where(0) == "grammar:row 1"
    assert "I am.<|im_end|>" in text(store, model)


COOKBOOK = """
def get_custom_dataset(dataset_config, tokenizer, split):
    assert dataset_config.train_split == "train"
    assert dataset_config.file.endswith("custom.py:get_custom_dataset")
    ids = tokenizer.encode(split, add_special_tokens=False)
    labels = [-100, -100] + ids[2:]
    return [dict(input_ids=ids, labels=labels, attention_mask=[1] * len(ids)), dict(input_ids=ids)]
"""


def test_cookbook_function(write: Write, prepare: Prepare, model: Path) -> None:
    path = f"{write(COOKBOOK, 'custom.py')}:get_custom_dataset"
    prepared = prepare(path, eval=[{"path": path, "split": "test"}])
    assert prepared.eval is not None
    assert text(prepared.train, model) == "train"
    assert text(prepared.eval, model) == "test"
    assert prepared.train.labelled(0).tolist() == [False, False, True, True, True]
    assert prepared.train.labelled(1).tolist() == [False, True, True, True, True]
    assert prepared.train.where(1) == f"{path}:row 2"


@pytest.mark.parametrize("signature", ["", "split", "split='train'"])
def test_own_function(signature: str, write: Write, prepare: Prepare, model: Path) -> None:
    code = f"def rows({signature}):\n    yield {{'text': 'abc'}}\n"
    assert text(prepare(f"{write(code, 'own.py')}:rows").train, model) == "abc</s>"


def test_mixture(write: Write, prepare: Prepare) -> None:
    first, second = write([ALPACA] * 3, "a.jsonl"), write([{"text": "abc"}] * 2, "b.jsonl")
    prepared = prepare([{"path": str(first), "weight": 2}, str(second)])
    assert prepared.train.dataset.tolist() == [0, 0, 0, 1, 1]
    assert [d.kept for d in prepared.report.datasets] == [3, 2]
    assert prepared.train.where(3) == f"{second}:1"


def test_processes_give_what_one_gives(write: Write, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.data.files.CHUNK_BYTES", 300)
    monkeypatch.setattr("packtrain.data.pool.POOL_BYTES", 1000)
    table = [{**ALPACA, "input": "é" * (n % 17)} for n in range(100)]
    table[40]["output"] = ""
    path = write(table)
    one = prepare(path)
    several = prepare(path, workers=2, cache=str(path.parent / "other"))
    assert [one.train.where(n) for n in range(99)] == [f"{path}:{n + 1}" for n in range(100) if n != 40]
    assert one.report == several.report
    for row in range(99):
        assert one.train.tokens(row).tolist() == several.train.tokens(row).tolist()
        assert one.train.labelled(row).tolist() == several.train.labelled(row).tolist()
