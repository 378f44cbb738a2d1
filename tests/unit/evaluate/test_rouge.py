"""ROUGE: the rouge-score package's own numbers for English, and sense for scripts it does not know."""

from __future__ import annotations

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from packtrain.evaluate.rouge import Exchange, rouge

PROMPT = np.empty(0, dtype=np.int32)


def scores(wanted: str, written: str) -> dict[str, float]:
    return rouge([Exchange(PROMPT, wanted, written)])


def test_english_is_the_package_with_stemming() -> None:
    wanted, written = "Anna is going to the shops at 7.", "Anna goes to a shop at 7"
    package = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(wanted, written)
    assert scores(wanted, written) == pytest.approx({k: 100 * v.fmeasure for k, v in package.items()})


@pytest.mark.parametrize("text", ["да, приду в семь", "我们七点见", "ทดสอบ", "naïve café"])
def test_the_same_text_scores_full_in_any_script(text: str) -> None:
    assert scores(text, text)["rougeL"] == pytest.approx(100)


def test_half_of_the_words_in_another_script() -> None:
    assert scores("мама мыла раму утром", "мама мыла кошку вечером")["rouge1"] == pytest.approx(50)
    assert 0 < scores("我们七点见", "我们八点走")["rouge1"] < 100
