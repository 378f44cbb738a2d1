from __future__ import annotations

from typing import Any

from packtrain.config import Recipe, build_recipe
from packtrain.config.difference import difference


def recipe(**sections: Any) -> Recipe:
    base: dict[str, Any] = {"model": {"path": "demo"}, "data": {"train": "samsum_mini"}}
    return build_recipe(base | sections)


def test_only_what_differs_in_the_schemas_order_without_the_name() -> None:
    first = recipe(output={"name": "a"}, train={"learning_rate": 1e-4})
    second = recipe(output={"name": "b"}, train={"learning_rate": 5e-5, "max_grad_norm": None}, method={"rank": 8})
    found = difference([first, second])
    assert [(s.key, s.values) for s in found] == [
        ("method.rank", (16, 8)),
        ("train.learning_rate", (1e-4, 5e-5)),
        ("train.max_grad_norm", (1.0, None)),
    ]
    assert [s.change for s in found[1:]] == ["train.learning_rate: 0.0001 -> 5e-05", "train.max_grad_norm: 1 -> none"]


def test_one_of_three_is_enough() -> None:
    found = difference([recipe(), recipe(), recipe(train={"seed": 1})])
    assert [(s.key, s.values) for s in found] == [("train.seed", (42, 42, 1))]
    assert difference([recipe(), recipe()]) == []


def test_data_sets_are_readable() -> None:
    second = recipe(data={"train": [{"path": "samsum_mini", "weight": 0.5}, "alpaca_mini"]})
    (found,) = difference([recipe(), second])
    assert found.change == "data.train: [samsum_mini] -> [{path: samsum_mini, weight: 0.5}, alpaca_mini]"
