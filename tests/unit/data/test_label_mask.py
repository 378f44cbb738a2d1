"""What is learned: answers with their end of turn, exactly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from packtrain.data import PreparedData, TokenStore, load_tokenizer

Prepare = Callable[..., PreparedData]
Write = Callable[..., Path]
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}"
    "{% set c = '<|im_start|>' + m['role'] + '<|im_start|>\n\n' + m['content'] | trim + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{% set c = '<think>\n\n</think>\n\n' + c %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "llama3": LLAMA3, "gemma": GEMMA, "qwen3": QWEN3}


def chat(*turns: str) -> dict[str, Any]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return {"messages": [{"role": names[turn[0]], "content": turn[1:]} for turn in turns]}


ROWS = [
    chat("uHi there", "aHello!"),
    chat("u  spaced \n", "a \n padded answer  "),
    chat("uone", "atwo", "uthree", "afour"),
    chat("uone", "aone", "uone", "aone"),
    chat("uthink", "a<think>\nhm\n</think>\n\nyes"),
    chat("uthink", "a<think>\nhm\n</think>\n\nyes", "uagain", "a<think>x</think>no"),
    chat("u{{ 7 * 7 }} {% raw %}", "aÜber 😀 QzX"),
    chat("ua <|im_end|> b", "ac"),
]


def pieces(store: TokenStore, row: int, tokenizer: Any) -> list[tuple[bool, str]]:
    pairs = zip(store.tokens(row).tolist(), store.labelled(row).tolist(), strict=True)
    return [(flag, tokenizer.decode([t for t, _ in run])) for flag, run in groupby(pairs, key=lambda p: p[1])]


def learned(store: TokenStore, row: int, tokenizer: Any) -> list[str]:
    return [text for flag, text in pieces(store, row, tokenizer) if flag]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_the_true_rendering(
    name: str, make_tokenizer: Callable[..., Any], write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_tokenizer(folder, TEMPLATES[name], adds_bos=True)
    tokenizer = load_tokenizer(folder)
    store = prepare(write(ROWS), folder=folder).train
    assert len(store) == len(ROWS)
    ends = {
        "chatml": "<|im_end|>",
        "llama2": "</s>",
        "llama3": "<|eot|>",
        "gemma": "<end_of_turn>",
        "qwen3": "<|im_end|>",
    }
    for row, values in enumerate(ROWS):
        text = tokenizer.apply_chat_template(values["messages"], tokenize=False)
        expected = tokenizer(text, add_special_tokens=False).input_ids
        assert store.tokens(row).tolist() == expected
        assert store.tokens(row).tolist().count(tokenizer.bos_token_id) == text.count("<s>")
        answers = [m["content"].rpartition("</think>")[2] for m in values["messages"] if m["role"] == "assistant"]
        got = learned(store, row, tokenizer)
        assert len(got) == len(answers)
        for answer, part in zip(answers, got, strict=True):
            assert part.endswith(ends[name])
            assert answer.strip() in part
        assert store.label_counts[row] == store.labelled(row).sum()


def test_prompt_is_what_generation_starts_from(
    make_tokenizer: Callable[..., Any], write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    for name, template in TEMPLATES.items():
        folder = tmp_path / name
        make_tokenizer(folder, template)
        tokenizer = load_tokenizer(folder)
        store = prepare(write([chat("uHi", "aYo")]), folder=folder).train
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert pieces(store, 0, tokenizer)[0] == (False, prompt)


def test_exact_mask(write: Write, prepare: Prepare, model: Path) -> None:
    tokenizer = load_tokenizer(model)
    path = write([chat("sbe brief", "uone", "atwo", "uthree", "afour")])
    assert learned(prepare(path).train, 0, tokenizer) == ["two<|im_end|>", "four<|im_end|>"]
    assert learned(prepare(path, train_on="last_assistant").train, 0, tokenizer) == ["four<|im_end|>"]
    everything = prepare(path, train_on="all").train
    assert everything.labelled(0).tolist() == [False] + [True] * (len(everything.tokens(0)) - 1)


def test_plain_and_missing_end(
    make_tokenizer: Callable[..., Any], write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_tokenizer(folder, None)
    tokenizer = load_tokenizer(folder)
    plain = prepare(write([chat("uone", "atwo", "uthree", "afour")]), folder=folder)
    assert "no chat template" in plain.report.warnings[0]
    assert learned(plain.train, 0, tokenizer) == ["two</s>", "four</s>"]
    bare = write("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}", "bare.jinja")
    prepared = prepare(write([chat("uone", "atwo")]), folder=folder, template=str(bare))
    assert "end-of-sequence token is added" in prepared.report.warnings[0]
    assert learned(prepared.train, 0, tokenizer)[-1].endswith("two</s>")
    assert prepared.train.tokens(0)[-1] == tokenizer.eos_token_id


def test_template_that_leaves_system_out(
    make_tokenizer: Callable[..., Any], write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path / "m", LLAMA2)
    prepared = prepare(write([chat("sx", "uone", "atwo")]), folder=tmp_path / "m")
    assert "leaves out the content of role 'system'" in prepared.report.warnings[0]
    assert learned(prepared.train, 0, load_tokenizer(tmp_path / "m")) == [" two </s>"]


def test_content_with_special_token_is_reported(write: Write, prepare: Prepare) -> None:
    path = write([chat("uok", "aok"), chat("u<|im_end|>", "ac")])
    (warning,) = prepare(path).report.warnings
    assert "1 rows hold the text of a special token" in warning
    assert f"{path}:2" in warning


def test_skeleton_that_turns_out_wrong_is_given_up(
    make_tokenizer: Callable[..., Any], write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shout = CHATML.replace("m['content']", "(m['content'] | upper if 'shout' in m['content'] else m['content'])")
    make_tokenizer(folder, shout)
    store = prepare(write([chat("uone", "atwo"), chat("ushout", "atwo")]), folder=folder).train
    assert "SHOUT" in load_tokenizer(folder).decode(store.tokens(1))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_and_completion(
    adds_bos: bool, make_tokenizer: Callable[..., Any], write: Write, prepare: Prepare, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_tokenizer(folder, adds_bos=adds_bos)
    tokenizer = load_tokenizer(folder)
    bos = "<s>" if adds_bos else ""
    text = prepare(write([{"text": "abc"}]), folder=folder).train
    assert tokenizer.decode(text.tokens(0)) == f"{bos}abc</s>"
    assert learned(text, 0, tokenizer) == ["abc</s>" if adds_bos else "bc</s>"]
    pair = prepare(write([{"prompt": "ab", "completion": "cd"}]), folder=folder).train
    assert pieces(pair, 0, tokenizer) == [(False, f"{bos}ab"), (True, "cd</s>")]


def test_prompt_completion_lists_learn_the_completion_only(write: Write, prepare: Prepare, model: Path) -> None:
    turns = chat("ua", "ab", "uc", "ad")["messages"]
    store = prepare(write([{"prompt": turns[:3], "completion": turns[3:]}])).train
    assert learned(store, 0, load_tokenizer(model)) == ["d<|im_end|>"]
