from __future__ import annotations

import pytest

from packtrain.errors import UserError
from packtrain.launch import failure
from packtrain.launch.secrets import redact, refuse_secrets

TOKEN = "hf_QwErTyUiOpAsDfGh"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("DB_PASSWORD", "short")
    monkeypatch.setenv("KEYBOARD_LAYOUT", "layout-de-nodeadkeys")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"401 for Bearer {TOKEN}", "401 for Bearer <HF_TOKEN>"),
        (f"{TOKEN}{TOKEN} 0123456789abcdef", "<HF_TOKEN><HF_TOKEN> <WANDB_API_KEY>"),
        ("a short layout-de-nodeadkeys", "a short layout-de-nodeadkeys"),
    ],
)
def test_redact(text: str, told: str) -> None:
    assert redact(text) == told


def test_a_failure_tells_none() -> None:
    def fail() -> None:
        secret = TOKEN
        raise ValueError(f"no access with {secret}")

    for error in (ValueError(f"no access with {TOKEN}"), UserError("model.path", f"{TOKEN} is refused", "log in")):
        assert TOKEN not in repr(failure.describe(error, 0))
    with pytest.raises(ValueError) as caught:
        fail()
    assert TOKEN not in repr(failure.describe(caught.value, 0))


def test_a_recipe_may_not_hold_one() -> None:
    refuse_secrets("model: {path: demo}")
    with pytest.raises(UserError, match="holds the value of HF_TOKEN") as caught:
        refuse_secrets(f"model: {{path: https://user:{TOKEN}@hub/model}}")
    assert TOKEN not in str(caught.value)
