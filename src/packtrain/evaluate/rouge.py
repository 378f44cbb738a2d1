"""Greedy answers to held-out prompts, and their ROUGE against the answers that were wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.data.store import TokenStore

BATCH = 32


@dataclass(frozen=True)
class Exchange:
    """A prompt (token ids), the answer that was wanted, and the one that was written."""

    prompt: np.ndarray
    wanted: str
    written: str = ""


def exchanges(rows: TokenStore, tokenizer: Any, limit: int) -> list[Exchange]:
    """The last answer of each row as what is wanted, all before it as the prompt."""
    found = []
    for index in range(min(limit, len(rows))):
        tokens, labelled = rows.tokens(index), rows.labelled(index).astype(bool)
        end = int(np.flatnonzero(labelled)[-1]) + 1
        start = int(np.flatnonzero(~labelled[:end])[-1]) + 1
        wanted = tokenizer.decode(tokens[start:end], skip_special_tokens=True).strip()
        found.append(Exchange(np.asarray(tokens[:start]), wanted))
    return found


def answer(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Exchange],
    max_new_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> list[Exchange]:
    """Greedy answers, in batches of prompts of like length, padded on the left."""
    import torch

    order = sorted(range(len(asked)), key=lambda i: len(asked[i].prompt))
    written: dict[int, str] = {}
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        prompts = [asked[i].prompt for i in chosen]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for line, prompt in enumerate(prompts):
            ids[line, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[line, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=tokenizer.eos_token_id,
                eos_token_id=_ends(model, tokenizer),
            )
        for i, line in zip(chosen, out[:, longest:], strict=True):
            written[i] = tokenizer.decode(line, skip_special_tokens=True).strip()
        if progress:
            progress(len(written))
    return [Exchange(e.prompt, e.wanted, written[i]) for i, e in enumerate(asked)]


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end an answer: the tokenizer's and the model's own."""
    own = model.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return sorted({int(i) for i in ids if i is not None})


class Words:
    """rouge-score's own words (a to z and digits, stemmed), and beside them the words of every other script.

    Chinese, Japanese and Thai are written without spaces: there each character is a word.
    """

    def __init__(self) -> None:
        import regex
        from rouge_score.tokenizers import DefaultTokenizer

        self._latin = DefaultTokenizer(use_stemmer=True)
        spaceless = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}"
        self._words = regex.compile(rf"[{spaceless}]|[^\W_{spaceless}]+", regex.V0)

    def tokenize(self, text: str) -> list[str]:
        """The words that are compared."""
        if text.isascii():
            return self._latin.tokenize(text)
        return [
            w
            for word in self._words.findall(text.lower())
            for w in (self._latin.tokenize(word) if word.isascii() else [word])
        ]


def rouge(found: Sequence[Exchange]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L with stemming, in percent (Lin 2004; the rouge-score package)."""
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, tokenizer=Words())
    scores = [scorer.score(e.wanted, e.written) for e in found]
    return {name: 100 * sum(s[name].fmeasure for s in scores) / max(len(scores), 1) for name in names}
