"""Loading a tokenizer, and the part of it that a worker process needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from packtrain.errors import UserError
from packtrain.models.added import AddedTokens
from packtrain.models.foreign import refused
from packtrain.models.model_config import read_model_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


@dataclass(frozen=True)
class TokenizerParts:
    """What encoding needs, without transformers.

    Args:
        json: the tokenizers library's own form; empty for a slow tokenizer.
        added: the texts of added tokens. special: those of them that are special.
        bos: ids that the tokenizer puts before a text by itself, mostly none or one.
        eos_text, eos_id: the end-of-sequence token, or None.
        variables: what a chat template may refer to (bos_token and the like).
        slow: the tokenizer itself where it has no fast form.
    """

    json: str
    added: tuple[str, ...]
    special: tuple[str, ...]
    bos: tuple[int, ...]
    bos_text: str
    eos_text: str | None
    eos_id: int | None
    variables: dict[str, Any]
    slow: Any = field(default=None, compare=False)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        return any_of(self.special)


def any_of(texts: tuple[str, ...] | set[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of these texts; of none, nothing."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def load_tokenizer(path: Path | str, add_tokens: Sequence[str] = ()) -> Any:
    """The transformers tokenizer of a model folder or a hub id, with the tokens that a recipe adds. A missing pad
    token is no fault: padding is masked by position.

    Raises:
        UserError: the folder holds no tokenizer, or it cannot be read.
    """
    from transformers import AddedToken, AutoTokenizer

    path = Path(path)
    if path.is_dir() and not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            str(path),
            "the folder holds no tokenizer (no tokenizer.json)",
            "copy the model's tokenizer files into it",
        )
    with refused(str(path), "the tokenizer could not be loaded", "check model.path and its tokenizer files"):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=path.is_dir())
    if add_tokens:
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in add_tokens])
    return tokenizer


def added_tokens(path: Path | str, add_tokens: Sequence[str]) -> AddedTokens | None:
    """The ids of the tokens that a recipe adds, and what their texts are without them; None where it adds none.

    Raises:
        UserError: a token is known already, is given twice or has no text, or the new ids do not follow the others.
    """
    if not add_tokens:
        return None
    before, after = load_tokenizer(path), load_tokenizer(path, add_tokens)
    known = before.get_vocab()
    for text in add_tokens:
        if what := _no_new_token(text, add_tokens, known):
            raise UserError("model.add_tokens", f"{text!r} {what}", "leave it out")
    ids = after.convert_tokens_to_ids(list(add_tokens))
    if ids != list(range(ids[0], ids[0] + len(ids))) or ids[0] <= max(known.values()):
        what = f"this tokenizer gives new tokens the ids {ids}, not the next ones"
        raise UserError("model.add_tokens", what, "train without new tokens")
    pieces = tuple(tuple(before(text, add_special_tokens=False).input_ids) for text in add_tokens)
    return AddedTokens(ids[0], pieces)


def _no_new_token(text: str, add_tokens: Sequence[str], known: dict[str, int]) -> str:
    """Why a text cannot be added to the tokenizer; nothing where it can."""
    if text in known:
        return "is in the tokenizer already"
    if add_tokens.count(text) > 1:
        return "is given twice"
    return "" if text.strip() else "is only white space"


def vocabulary_size(config_file: Path) -> int | None:
    """Rows of the model's embedding, from its config.json; None where there is none."""
    if not config_file.is_file():
        return None
    return read_model_config(config_file).vocab_size


def check_vocabulary(tokenizer: Any, config_file: Path) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        UserError: the largest id is not below the config's vocab_size.
    """
    size = vocabulary_size(config_file)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if size is not None and largest >= size:
        what = f"the tokenizer's largest token id is {largest}, the model's vocab_size is {size}"
        raise UserError(str(config_file), what, "use the tokenizer that came with the model, or resize its embedding")


def parts_of(tokenizer: Any) -> TokenizerParts:
    """Take a transformers tokenizer apart."""
    added = tokenizer.added_tokens_decoder
    probe = list(tokenizer("a").input_ids)
    bare = list(tokenizer("a", add_special_tokens=False).input_ids)
    bos_id = tokenizer.bos_token_id
    fast = bool(tokenizer.is_fast)
    special = {token.content for token in added.values() if token.special} | {tokenizer.eos_token or ""}
    return TokenizerParts(
        json=_without_limits(tokenizer.backend_tokenizer.to_str()) if fast else "",
        added=tuple(token.content for token in added.values()),
        special=tuple(sorted(special)),
        bos=(bos_id,) if bos_id is not None and probe[:1] == [bos_id] and probe != bare else (),
        bos_text=tokenizer.bos_token or "",
        eos_text=tokenizer.eos_token,
        eos_id=tokenizer.eos_token_id,
        variables=dict(tokenizer.special_tokens_map),
        slow=None if fast else tokenizer,
    )


def _without_limits(text: str) -> str:
    """Some tokenizer files truncate or pad by themselves, which would cut rows in silence."""
    values = orjson.loads(text)
    values.update(truncation=None, padding=None)
    return orjson.dumps(values).decode()
