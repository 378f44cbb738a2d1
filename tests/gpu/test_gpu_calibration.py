"""What a GPU is measured at lies near what its maker says, and the next plan goes by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.tiny import make_model

from packtrain.cli.app import run
from packtrain.plan.rates import published

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    assert run(["plan", "--calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    known = published(found["gpu"])
    if known is not None:
        for part in ("matmul", "attention", "memory"):
            assert 0.6 < found["measured"][part] / getattr(known, part) < 1.5, part
    assert (found["measured"]["link"] is not None) == (torch.cuda.device_count() > 1)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {{path: {make_model(tmp_path / 'model')}}}\ndata: {{train: [nowhere.jsonl]}}\n")
    assert run(["plan", str(recipe), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rates"]["matmul"] == found["measured"]["matmul"]
    assert plan["speed"]["assumes"].endswith("at another model's shapes")
