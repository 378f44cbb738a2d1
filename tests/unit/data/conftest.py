"""A byte-level tokenizer without merges: one token a byte, so that lengths are easy to know."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packtrain.config.schema import DataSection
from packtrain.data import PreparedData, prepare_data

SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(folder: Path, template: str | None = CHATML, adds_bos: bool = False) -> Any:
    """Save a byte-level tokenizer in ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL[3:]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return build_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer(folder)
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (objects), text or bytes to a file."""

    def write_file(content: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


@pytest.fixture
def prepare(model: Path) -> Iterator[Callable[..., PreparedData]]:
    """``prepare_data`` on one data set with settings of the data section."""

    def run(train: Any, max_length: int = 512, folder: Path = model, seed: int = 1, **settings: Any) -> PreparedData:
        settings.setdefault("eval", 0)
        settings.setdefault("workers", 1)
        train = str(train) if isinstance(train, Path) else train
        return prepare_data(DataSection(train=train, **settings), folder, max_length, seed)

    yield run
