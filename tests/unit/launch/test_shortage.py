"""A run that its plan does not see fit is warned about before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.plan.measured import LLAMA_8B, asked, gpus

from packtrain.config.rule import Finding
from packtrain.launch import resolve_recipe as module
from packtrain.plan.report import plan_resolved


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


def short(gib: float, host: int = 0, **sections: dict[str, object]) -> Finding:
    """What the plan of a run on one GPU is short of."""
    facts, recipe = replace(gpus(1, LLAMA_8B, gib), host_memory=host), asked(**sections)
    (found,) = module.shortage(recipe, plan_resolved(module.fill(recipe, facts), facts))
    return found


def test_edits_are_of_settings_that_help() -> None:
    full = {"method": {"type": "full"}}
    assert short(80, 2**40, **full).edits == {"parallel.offload": "optimizer"}
    assert short(80, 64 * 2**30, **full).edits == {}  # the host cannot hold what would be offloaded
    found = short(80, 64 * 2**30, parallel={"offload": "optimizer"}, **full)
    assert found.rule == "host-memory" and found.edits == {}
    given = {"train": {"batch_size": 64, "micro_batch_size": 64}, "parallel": {"recompute": "none"}}
    assert short(80, 2**40, **given).edits == {"parallel.recompute": "auto", "train.micro_batch_size": "auto"}


def test_what_is_learned_is_not_changed_for_want_of_memory() -> None:
    found = short(14)
    assert "method.type=qlora" in found.mend and found.edits == {"parallel.offload": "params"}
