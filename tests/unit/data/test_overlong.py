from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from packtrain.data import PreparedData, load_tokenizer
from packtrain.errors import UserError

Prepare = Callable[..., PreparedData]
Write = Callable[..., Path]
LONG = {"instruction": "<" + "x" * 300 + ">", "output": "The answer."}
SHORT = {"instruction": "hi", "output": "yo"}


def decoded(prepared: PreparedData, model: Path) -> list[str]:
    tokenizer = load_tokenizer(model)
    return [tokenizer.decode(prepared.train.tokens(row)) for row in range(len(prepared.train))]


def test_truncate_prompt_keeps_template_and_answer(write: Write, prepare: Prepare, model: Path) -> None:
    prepared = prepare(write([LONG, SHORT]), max_length=64)
    text = decoded(prepared, model)[0]
    assert len(prepared.train.tokens(0)) == 64
    assert text.startswith("<|im_start|>user\n<xxx")
    assert text.endswith("xxx><|im_end|>\n<|im_start|>assistant\nThe answer.<|im_end|>\n")
    dataset = prepared.report.datasets[0]
    assert (dataset.truncated, dataset.tokens_cut, dataset.kept) == (1, 334 - 64, 2)


def test_answer_alone_too_long_is_dropped(write: Write, prepare: Prepare) -> None:
    path = write([{"instruction": "q", "output": "y" * 100}, SHORT])
    dataset = prepare(path, max_length=64).report.datasets[0]
    assert dataset.dropped == [
        (f"{path}:1", "the answer and the template alone are longer than max_length (121 > 64 tokens)")
    ]
    with pytest.raises(UserError, match=r"alone are longer .*; raise data.max_length"):
        prepare(write([{"instruction": "q", "output": "y" * 100}]), max_length=64)


def test_drop_and_error(write: Write, prepare: Prepare) -> None:
    path = write([SHORT, LONG])
    dataset = prepare(path, max_length=64, overlong="drop").report.datasets[0]
    assert dataset.dropped == [(f"{path}:2", "longer than max_length")]
    with pytest.raises(UserError, match=r"rows.jsonl:2: the row has 334 tokens, data.max_length is 64; raise"):
        prepare(path, max_length=64, overlong="error")


def test_split_text(write: Write, prepare: Prepare, model: Path) -> None:
    prepared = prepare(write([{"text": "abcdefghij" * 3}]), max_length=16, overlong="split")
    assert "".join(decoded(prepared, model)) == "abcdefghij" * 3 + "</s>"
    assert prepared.train.lengths.tolist() == [16, 15]
    assert prepared.train.label_counts.tolist() == [15, 14]
    assert prepared.report.datasets[0].split == 1


def test_split_chat_at_turns(write: Write, prepare: Prepare, model: Path) -> None:
    turns = [{"role": "system", "content": "S"}]
    for n in range(4):
        turns += [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]
    path = write([{"messages": turns}])
    prepared = prepare(path, max_length=80, overlong="split")
    texts = decoded(prepared, model)
    assert len(texts) == 2
    assert all(text.startswith("<|im_start|>system\nS<|im_end|>") for text in texts)
    assert ["q0" in texts[0], "q1" in texts[0], "q2" in texts[1], "q3" in texts[1]] == [True] * 4
    assert prepared.train.where(1) == f"{path}:1"
    dataset = prepare(write([LONG, SHORT]), max_length=64, overlong="split").report.datasets[0]
    assert "one turn alone is longer than max_length" in dataset.dropped[0][1]
