"""Each bad input is one sentence: where, what, mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.data import PreparedData, check_vocabulary, load_tokenizer
from packtrain.errors import UserError

Prepare = Callable[..., PreparedData]
GOOD = b'{"instruction": "a", "output": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("r.jsonl", GOOD + b'{"instruction": "a", "outp', ["r.jsonl:2: ", "cut short", "delete that line"]),
        (
            "r.jsonl",
            GOOD + b"\n{'instruction': 1}\n",
            ["r.jsonl:3: ", "not valid JSON", "mend or delete that line"],
        ),
        ("r.jsonl", GOOD + b"[1, 2]\n", ["r.jsonl:2: ", "an array", "column"]),
        ("r.jsonl", GOOD + b"7}\n", ["r.jsonl:2: ", "not valid JSON"]),
        ("r.jsonl", b"", ["r.jsonl: ", "the file is empty", "at least one row"]),
        ("r.jsonl", b"\n\n", ["r.jsonl", "no rows", "at least one row"]),
        ("r.json", b'{"a": 1}', ["r.json: ", "array of objects", "an object", "[ ]"]),
        ("r.json", b"[]", ["r.json: ", "array is empty"]),
        ("r.json", b"[{},\n3", ["r.json:2: ", "not valid JSON", ".jsonl"]),
        ("r.json", b'[{"a": 1}, 3]', ["r.json:row 2: ", "a number"]),
        ("r.csv", b"a,b\n1,2\n1,2,3\n", ["r.csv:3: ", "3 fields, the header 2", "quote"]),
        ("r.csv", b"text\n\xff\xfe\n", ["r.csv:", "not UTF-8", "UTF-8"]),
        ("r.parquet", b"nothing", ["r.parquet: ", "not a parquet file"]),
        ("r.xlsx", b"x", ["r.xlsx: ", "'.xlsx' are not known", ".jsonl"]),
        ("r.jsonl", b'{"colour": "a", "q": 1}\n', ["r.jsonl: ", "no format", "colour, q", "`prompt`"]),
    ],
)
def test_bad_file(write: Callable[..., Path], prepare: Prepare, name: str, content: bytes, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        prepare(write(content, name))
    for part in parts:
        assert part in str(caught.value)


def test_missing_file_offers_the_nearest(write: Callable[..., Path], prepare: Prepare, tmp_path: Path) -> None:
    write(GOOD, "dialogues.jsonl")
    with pytest.raises(UserError, match=r"dialogue\.jsonl: no such file; did you mean .*/dialogues\.jsonl"):
        prepare(tmp_path / "dialogue.jsonl")
    with pytest.raises(UserError, match=r"the folder .*nowhere does not exist"):
        prepare("/nowhere/x.jsonl")


def test_unknown_name(prepare: Prepare) -> None:
    with pytest.raises(UserError, match=r"'samsun': not a registered .* owner/name; did you mean samsum"):
        prepare("samsun")


def test_unknown_split(prepare: Prepare) -> None:
    with pytest.raises(UserError, match="samsum_mini: there is no split 'dev'; choose train or test"):
        prepare([{"path": "samsum_mini", "split": "dev"}])


def chat(*turns: str) -> dict[str, Any]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return {"messages": [{"role": names.get(t[0], t[0]), "content": t[1:]} for t in turns]}


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (
            {"instruction": "a", "output": "b"},
            {"instruction": "a", "output": " "},
            "empty answer in column 'output'",
        ),
        (
            {"instruction": "a", "output": "b"},
            {"instruction": "a", "outptu": "b"},
            "no column 'output', .*'outptu'",
        ),
        (
            {"instruction": "a", "output": "b"},
            {"instruction": "a", "output": 3},
            "column 'output' is a number",
        ),
        ({"instruction": "a", "output": "b"}, {"instruction": None, "output": "b"}, "'instruction' is empty"),
        (chat("ua", "ab"), chat("ab", "ua"), "message 1: role 'assistant' at the start, where 'user'"),
        (chat("ua", "ab"), chat("ua", "ub", "ac"), "message 2: role 'user' after 'user', where 'assistant'"),
        (chat("ua", "ab"), chat("ua", "xb"), "message 2: unknown role 'x'"),
        (chat("ua", "ab"), chat("ua"), "no assistant turn"),
        (chat("ua", "ab"), chat("ua", "a "), "message 2: empty answer"),
        (chat("ua", "ab"), {"messages": "hello"}, "column 'messages' is text, not a list"),
        (chat("ua", "ab"), {"messages": [{"role": "user"}]}, "message 1: 'content' is empty"),
        (
            {"input_ids": [1, 9], "labels": [-100, 9]},
            {"input_ids": [1, 9], "labels": [-100, -100]},
            "learned",
        ),
        ({"input_ids": [1, 9]}, {"input_ids": [1, 9], "labels": [7, 8]}, "labels differ"),
        ({"text": "abc"}, {"text": 4}, "column 'text' is a number"),
    ],
)
def test_row_at_fault_is_dropped_and_reported(
    write: Callable[..., Path], prepare: Prepare, good: dict[str, Any], bad: dict[str, Any], reason: str
) -> None:
    path = write([good, bad, good])
    report = prepare(path).report.datasets[0]
    assert (report.read, report.kept, report.num_dropped) == (3, 2, 1)
    assert report.dropped[0][0] == f"{path}:2"
    with pytest.raises(UserError, match=reason) as caught:
        prepare(write([bad, bad], "bad.jsonl"), format="alpaca" if "instruction" in good else "auto")
    assert "bad.jsonl:1: none of the 2 rows" in str(caught.value)


def test_all_labels_masked(write: Callable[..., Path], prepare: Prepare) -> None:
    with pytest.raises(UserError, match=r":1: none of the 1 rows .*no token .* learned; label at least one token"):
        prepare(write([{"input_ids": [1, 2], "labels": [-100, -100]}]))


def test_no_answer_column(write: Callable[..., Path], prepare: Prepare) -> None:
    with pytest.raises(UserError, match="none of the columns q, z is known as the answer"):
        prepare([{"path": str(write([{"q": "a", "z": "b"}])), "prompt": "{q}"}])


def test_template_that_refuses_system(
    write: Callable[..., Path], prepare: Prepare, tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    make_tokenizer(tmp_path / "m", template)
    path = write([chat("ua", "ab"), chat("sx", "ua", "ab")])
    match = r"rows\.jsonl:2: the chat template refuses the role 'system': No system role; fold"
    with pytest.raises(UserError, match=match):
        prepare(path, folder=tmp_path / "m")


def test_template_setting(write: Callable[..., Path], prepare: Prepare) -> None:
    path = write(GOOD)
    with pytest.raises(UserError, match=r"data\.template: 'chatlm' is neither"):
        prepare(path, template="chatlm")
    with pytest.raises(UserError, match=r"bad\.jinja:1: not a jinja template"):
        prepare(path, template=str(write("{% for %}", "bad.jinja")))


def test_tokenizer_errors(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: the folder holds no tokenizer"):
        load_tokenizer(tmp_path / "empty")
    config = tmp_path / "config.json"
    config.write_text('{"vocab_size": 100}')
    with pytest.raises(UserError, match="token id is 263, the model's vocab_size is 100"):
        check_vocabulary(load_tokenizer(model), config)


@pytest.mark.parametrize(
    ("code", "name", "match"),
    [
        (
            "def rows():\n    return [1 / 0]\n",
            "rows",
            r"f\.py:2: .*ZeroDivisionError: division by zero; mend",
        ),
        (
            "def rows():\n    yield {'text': 'a'}\n    raise KeyError('k')\n",
            "rows",
            r"f\.py:3: .*KeyError: 'k'",
        ),
        ("import nothing_here\n", "rows", r"f\.py:1: .*ModuleNotFoundError"),
        ("def rows(:\n", "rows", r"f\.py:1: .*SyntaxError"),
        ("def rows():\n    return []\n", "row", r"no function 'row' in .*did you mean .*f\.py:rows"),
        ("def rows():\n    return 3\n", "rows", r"returned int; return an iterable of dicts"),
        ("def rows():\n    return [3]\n", "rows", r"row 1: a row is int; yield dicts"),
        ("def rows():\n    return []\n", "rows", r"it has no rows"),
        ("def rows(a, b):\n    return []\n", "rows", r"takes a, b; let it take"),
    ],
)
def test_function_errors(write: Callable[..., Path], prepare: Prepare, code: str, name: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        prepare(f"{write(code, 'f.py')}:{name}")


def test_hub_without_network(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"'a/b': a/b \(split train\) could not be loaded: Couldn't reach"):
        prepare("a/b")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the datasets package; pip install 'packtrain\[hub\]'"):
        prepare("a/b")
