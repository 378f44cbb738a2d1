"""The fast tokeniser gives what the tokenizers library gives."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from packtrain.config.schema import Dataset
from packtrain.data.sources import find_source, rows
from packtrain.data.tokenizer import TokenizerParts
from packtrain.data.words import Tokeniser

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ODD = [
    "",
    " ",
    "\n\n x",
    "l'été  12345\t😀\u0301 <|end|> tail",
    "İı ŉ\u00a0\u2028y'ALL don'T",
    "x" * 50,
    "\r\n\r\n",
]


def parts(backend: Tokenizer, special: tuple[str, ...]) -> TokenizerParts:
    return TokenizerParts(backend.to_str(), special, special, (), "", None, None, {})


@pytest.fixture(scope="module")
def texts() -> list[str]:
    source = find_source(Dataset(path="samsum_mini", split="test"))
    return [row.values["dialogue"] for row in rows(source)] + ODD


@pytest.mark.parametrize(
    "splitter",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ],
)
def test_equals_the_library(splitter: Any, texts: list[str]) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokeniser = Tokeniser(parts(backend, ("<|end|>",)))
    assert tokeniser.encode(texts) == [backend.encode(t, add_special_tokens=False).ids for t in texts]
    assert tokeniser._split is not None, "the fast path was given up"
    assert tokeniser.exact_at_special
    assert tokeniser.encode_glued(texts) == tokeniser.encode(texts)


def test_glued_text_has_no_prefix_space() -> None:
    symbols = ["<unk>", "</s>", "▁", "\n", "x", "▁x", "y"]
    vocab = {token: number for number, token in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "x")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokeniser = Tokeniser(parts(backend, ("</s>",)))
    assert tokeniser.encode(["x", "xy"]) == [[5], [5, 6]]
    assert tokeniser.encode_glued(["x", "y", " x"]) == [[4], [6], [5]]
