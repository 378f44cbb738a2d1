"""A run that its plan does not see fit is warned about before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.plan.measured import LLAMA_8B, asked, gpus

from packtrain.launch import resolve_recipe as module


def warned(monkeypatch: pytest.MonkeyPatch, gib: float, host: int = 0, **sections: dict[str, object]) -> list[str]:
    facts = replace(gpus(1, LLAMA_8B, gib), host_memory=host)
    monkeypatch.setattr(module, "gather_facts", lambda *_: facts)
    return module.resolve(asked(**sections))[1]


def test_what_fits_is_not_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warned(monkeypatch, 80) == []


def test_what_does_not_fit_names_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = warned(monkeypatch, 80, method={"type": "full"})
    assert found.startswith("plan: a GPU needs 1") and "may be filled; what would fit: " in found
    assert "parallel.offload=optimizer" in found and found.endswith(".") and "\n" not in found


def test_a_node_short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = {"method": {"type": "full"}, "parallel": {"offload": "optimizer"}}
    (found,) = warned(monkeypatch, 80, 64 * 2**30, **offload)
    assert "GiB of host memory and has 64.0" in found
    assert warned(monkeypatch, 80, 512 * 2**30, **offload) == []
