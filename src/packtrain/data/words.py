"""Tokenising text, fast.

Most of the time that the tokenizers library spends on a byte-level BPE goes into its regular expression.
Where the tokenizer is of that kind, we split with the ``regex`` package and look words up, which more than
doubles the speed. Each new word is tokenised by the library itself, and a share of all texts is compared with
it; where the two differ, the library does everything.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from packtrain.data.tokenizer import TokenizerParts, any_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_WORDS = 400_000
COMPARED = 64
# What Unicode properties are among the ASCII characters, as the inside of a bracket.
ASCII_PROPERTIES = dict.fromkeys(("Lt", "Lm", "Lo", "M"), "") | {"Lu": "A-Z", "Ll": "a-z"}
ASCII_PROPERTIES |= {"L": "A-Za-z", "N": "0-9"}
PROBES = ("x", " x", "\nx", "\n\nx ", "x\n", "Hello, world's  12\t3\n\n é")


class _Words(dict[str, list[int]]):
    """Word to ids; a word that is not there yet is tokenised."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._backend.encode(word, add_special_tokens=False).ids
        if len(self) < MAX_WORDS:
            self[word] = ids
        return ids


class Tokeniser:
    """Texts to ids, without special tokens around them.

    Attributes:
        exact_at_special: whether a text may be cut before and after a special token with the same ids.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._slow = parts.slow
        self._added = any_of(set(parts.added))
        self._backend: Tokenizer | None = None
        self._split: Callable[[str], list[str]] | None = None
        self._lead, self._lead_length = "", 0
        if parts.json:
            from tokenizers import Tokenizer

            self._backend = Tokenizer.from_str(parts.json)
            self._split = _splitter(parts.json)
            self._words = _Words(self._backend)
        self.exact_at_special = all(self._is_exact_at(text) for text in parts.special if text)
        self._find_lead()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        if self._split is None or len(texts) == 0:
            return self._library(texts)
        ids = self._by_words(texts)
        for number in range(0, len(texts), COMPARED):
            if ids[number] != self._library([texts[number]])[0]:
                self._split = None
                return self._library(texts)
        return ids

    def encode_glued(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that continue a text: without the space that some tokenizers put before a word."""
        if not self._lead:
            return self.encode(texts)
        return [ids[self._lead_length :] for ids in self.encode([self._lead + text for text in texts])]

    def _by_words(self, texts: Sequence[str]) -> list[list[int]]:
        assert self._split
        split, words, chain = self._split, self._words.__getitem__, itertools.chain.from_iterable
        ids = [list(chain(map(words, split(text)))) for text in texts]
        if self._added.search("\n".join(texts)):
            marked = [number for number, text in enumerate(texts) if self._added.search(text)]
            for number, exact in zip(marked, self._library([texts[n] for n in marked]), strict=True):
                ids[number] = exact
        return ids

    def _library(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._backend is None:
            return [list(ids) for ids in self._slow(list(texts), add_special_tokens=False)["input_ids"]]
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _is_exact_at(self, special: str) -> bool:
        whole = self._library([text + special + text for text in PROBES])
        single = self._library([special])[0]
        halves = self._library(PROBES)
        return all(a == half + single + half for a, half in zip(whole, halves, strict=True))

    def _find_lead(self) -> None:
        alone, after, newline = self._library(["x", "\nx", "\n"])
        if after != newline + alone:
            self._lead, self._lead_length = "\n", len(newline)


def _splitter(json: str) -> Callable[[str], list[str]] | None:
    """Splits a text into the words of a byte-level BPE; None where the tokenizer is of another kind."""
    import regex

    values = orjson.loads(json)
    model = values["model"]
    if model.get("type") != "BPE" or model.get("dropout") or values["normalizer"] is not None:
        return None
    pattern = _pattern_of(values["pre_tokenizer"] or {})
    if not pattern:
        return None
    split = regex.compile(pattern).findall
    try:
        split_ascii = re.compile(ascii_pattern(pattern), re.ASCII).findall
    except (re.error, KeyError):
        return split
    return lambda text: split_ascii(text) if text.isascii() else split(text)


def ascii_pattern(pattern: str) -> str:
    """The same pattern for ASCII text, without Unicode properties.

    The standard library's ``re`` knows none, and is twice as fast as ``regex``.

    Raises:
        KeyError: a property that we do not know.
    """
    inside = False

    def replaced(match: re.Match[str]) -> str:
        nonlocal inside
        if match[1]:
            characters = ASCII_PROPERTIES[match[1]]
            return characters if inside else f"[{characters}]"
        if match[0] in "[]":
            inside = match[0] == "["
        return match[0]

    return re.sub(r"\\p\{(\w+)\}|\\.|[\[\]]", replaced, pattern)


def _pattern_of(pre_tokenizer: dict[str, Any]) -> str | None:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if last["use_regex"] else None
    first = steps[0]
    own = first.get("type") == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    return first["pattern"].get("Regex") if own and len(steps) == 2 and not last["use_regex"] else None
