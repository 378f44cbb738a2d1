"""What a machine is measured at: by real processes on the CPU, kept by a GPU's name, and used by the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.plan.measured import LLAMA_8B as LLAMA_8B_FACTS
from tests.unit.plan.measured import gpus, recipe_for

from packtrain.cli import calibrate as face
from packtrain.cli.app import run
from packtrain.config.facts import Rates
from packtrain.errors import UserError
from packtrain.launch import calibrate, probe
from packtrain.launch.calibrate import Kept
from packtrain.launch.calibration import LLAMA_8B, Calibration, Measured, Shapes, file_of, keep, known_rates, shapes
from packtrain.launch.gpus import BUSY_BYTES, Gpu, Reservation
from packtrain.plan.rates import published
from packtrain.plan.speed import flops, speed

CARD = "NVIDIA H200"
TINY = Shapes(
    linears=((64, 64), (128, 64)), num_blocks=2, vocabulary=512, hidden=64, heads=4, kv_heads=2, head_size=16, length=32
)
SMALL: dict[str, Any] = {
    "seconds": 0.05, "tokens": 64, "copied": 1 << 16, "moved": 1 << 16, "written": 1 << 16, "updated": 1 << 12,
}  # fmt: skip
MEASURED = Measured(
    matmul=650e12, attention=450e12, memory=4e12, link=None, host=50e9, host_memory=60e9, disk=1e9
)  # fmt: skip


def calibration(**changes: Any) -> Calibration:
    values: dict[str, Any] = {
        "shapes": LLAMA_8B, "measured": MEASURED, "num_gpus": 1, "host": "node7", "date": "2026-12-04T10:00:00+00:00",
        "torch": "2.13.0",
    }  # fmt: skip
    return Calibration(**values | changes)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "r.yaml").write_text(f"model: {{path: {tmp_path}/model}}\ndata: {{train: [nowhere.jsonl]}}\n")
    return str(tmp_path / "r.yaml")


# Measuring.


@pytest.mark.parametrize("processes", [1, 2])
def test_real_processes_measure_every_part(processes: int, tmp_path: Path) -> None:
    found = calibrate.probe("cpu", TINY, tmp_path, processes, **SMALL)
    assert found is not None and (found.link is None) == (processes == 1)
    assert not list(tmp_path.glob(".packtrain*"))  # what was written to the disk is gone


def test_a_failed_measurement_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"the measurement failed.*nothing was kept"):
        calibrate.probe("cpu", TINY, tmp_path / "nowhere", 2, **SMALL)
    assert "FileNotFoundError" in capfd.readouterr().err


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a second, so that a rate is what was counted."""
    monkeypatch.setattr(probe, "_seconds", lambda work, device, least: 1.0 if work() is not work else 0.0)


@pytest.mark.usefixtures("second")
def test_what_is_counted() -> None:
    spec, cpu = probe.Spec(device="cpu", folder="", shapes=TINY, **SMALL), torch.device("cpu")
    inside, head = 6 * (64 * 64 + 128 * 64), 6 * 512 * 64
    assert probe.matmul_rate(spec, cpu) == pytest.approx((2 * inside + head) / (2 / 64 + 1 / 64))
    assert probe.copy_rate(spec, cpu) == 2 << 16
    assert probe.host_rate(spec, cpu) == 1 << 16  # both ways took a second
    assert probe.host_memory_rate(spec) == 32 << 12
    assert probe.attention_rate(spec, cpu) == pytest.approx(64 * 3.5 * 2 * 32 * 64)


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize("window", [None, 8])
def test_attention_is_counted_as_the_plan_counts_it(window: int | None) -> None:
    model = replace(
        LLAMA_8B_FACTS, num_blocks=2, hidden=64, vocabulary=512, linears=(), kv_width=32, head_size=16,
        sliding_window=window,
    )  # fmt: skip
    facts = gpus(1, model)
    made = recipe_for(facts, method={"type": "full"}, data={"max_length": 32})
    spec = probe.Spec(device="cpu", folder="", shapes=shapes(made, model), **SMALL)
    a_block = flops(made, model, 0.0).attention / 2
    assert probe.attention_rate(spec, torch.device("cpu")) == pytest.approx(64 * a_block)


def test_the_disk_is_written_for_some_seconds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_PIECE", 1 << 10)
    spec = probe.Spec(device="cpu", folder=str(tmp_path), shapes=TINY, seconds=0.1, written=1 << 40)
    assert probe.disk_rate(spec) > 0 and not list(tmp_path.iterdir())


# What is kept.


def test_the_nearest_measurement_counts() -> None:
    facts = gpus(1, LLAMA_8B_FACTS)
    made = recipe_for(facts, data={"max_length": 2048})
    wanted = shapes(made, LLAMA_8B_FACTS)
    assert wanted.linears[0] == (4096, 4096) and (wanted.heads, wanted.kv_heads, wanted.head_size) == (32, 8, 128)
    assert known_rates(CARD, made, LLAMA_8B_FACTS, 1) == published(CARD)

    def matmul(nodes: int = 1, gpu: str = CARD) -> float:
        found = known_rates(gpu, made, LLAMA_8B_FACTS, nodes)
        assert found is not None
        return found.matmul

    def kept(rate: float, **changes: Any) -> None:
        keep(CARD, calibration(measured=MEASURED.model_copy(update={"matmul": rate}), **changes))

    kept(1e12, shapes=TINY, date="2026-12-03")
    kept(2e12, shapes=TINY.model_copy(update={"length": 64}), date="2026-12-02")
    assert matmul() == 1e12  # the newest of equals, of other shapes
    kept(2.3e12, shapes=wanted.model_copy(update={"hidden": 1024, "head_size": 64}), date="2026-12-01")
    assert matmul() == 2.3e12  # the closest hidden size
    kept(2.6e12, shapes=wanted.model_copy(update={"hidden": 256}), date="2026-11-28")
    assert matmul() == 2.6e12  # heads of the same size go before
    kept(3e12, shapes=wanted.model_copy(update={"length": 9000}), date="2026-12-01")
    assert matmul() == 3e12  # the same model
    kept(4e12, shapes=wanted, date="2026-11-30")
    assert matmul() == 4e12  # in rows of the same length
    kept(5e12, shapes=wanted, date="2026-11-29")
    assert matmul() == 5e12  # in place of the one before
    assert len(json.loads(file_of(CARD).read_text())["calibrations"]) == 6
    assert matmul(nodes=2) == matmul(gpu="NVIDIA H200 NVL") == published(CARD).matmul  # type: ignore[union-attr]


def test_what_was_not_measured_is_published_or_the_hosts() -> None:
    at = calibration()
    card, unknown = at.rates(CARD, LLAMA_8B), at.rates("Voodoo 2", TINY)
    assert card.link == published(CARD).link and unknown.link == MEASURED.host  # type: ignore[union-attr]
    assert card.source == "a measurement on node7 on 2026-12-04, at this model's shapes"
    assert unknown.source.endswith("at another model's shapes")
    linked = calibration(measured=MEASURED.model_copy(update={"link": 7e9}))
    assert linked.rates(CARD, LLAMA_8B).link == 7e9


@pytest.mark.parametrize("text", ["", "{", "[]", '{"gpu": "NVIDIA H200", "calibrations": [{}]}', "\udcff"])
def test_a_damaged_file_is_named_and_a_new_measurement_mends_it(text: str) -> None:
    made = recipe_for(gpus(1, LLAMA_8B_FACTS))
    path = file_of(CARD)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=f"{path}: holds no measurements .*run `packtrain plan --calibrate`"):
        known_rates(CARD, made, LLAMA_8B_FACTS, 1)
    assert keep(CARD, calibration()) == path
    assert known_rates(CARD, made, LLAMA_8B_FACTS, 1).disk == 1e9  # type: ignore[union-attr]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_no_rate_is_nonsense(rate: float) -> None:
    with pytest.raises(ValueError, match="matmul"):
        Measured(**MEASURED.model_dump() | {"matmul": rate})


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written .*set PACKTRAIN_CACHE"):
        keep(CARD, calibration())


def test_two_gpus_of_one_name_and_no_other_share_a_file() -> None:
    assert file_of("NVIDIA H200").name == "nvidia-h200.json"
    keep("NVIDIA_H200", calibration())  # another name of the same file: it is not taken for ours
    assert known_rates(CARD, recipe_for(gpus(1, LLAMA_8B_FACTS)), LLAMA_8B_FACTS, 1) == published(CARD)


def test_the_plan_goes_by_what_was_measured() -> None:
    facts = gpus(1, LLAMA_8B_FACTS)
    made = recipe_for(facts, method={"type": "lora", "rank": 16})
    slow = calibration(measured=MEASURED.model_copy(update={"matmul": 100e12}))
    rates: list[Rates] = [calibration().rates(CARD, LLAMA_8B), slow.rates(CARD, LLAMA_8B)]
    fast, late = (speed(made, replace(facts, rates=rate), 2, 0.0) for rate in rates)
    assert fast is not None and late is not None
    products = [one.seconds["matrix products"] for one in (fast, late)]
    assert products[1] == pytest.approx(6.5 * products[0]) and late.source.startswith("a measurement on node7")


# Which GPUs, and the command.


def reserving(found: list[Gpu], folder: Path) -> Any:
    return partial(Reservation, folder=folder, look=lambda: found)


@pytest.mark.parametrize(
    ("used", "count", "note"),
    [([0, 0], 2, ""), ([0, 2 * BUSY_BYTES], 1, "not on all: it would wait for 2 free GPUs: others have 2.0 GiB")],
)
def test_all_gpus_are_measured_or_one(
    used: list[int], count: int, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Gpu(index, f"GPU-{index}", size) for index, size in enumerate(used)]
    monkeypatch.setattr(calibrate, "Reservation", reserving(found, tmp_path / "locks"))
    reservation, said = calibrate._free(2)
    assert reservation.wanted == count and said.startswith(note) and bool(said) == bool(note)
    claim = reservation.attempt()
    assert claim is not None
    claim.close()
    assert not list((tmp_path / "locks").glob("*.ticket"))


def test_no_gpu_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [Gpu(0, "GPU-0", 2 * BUSY_BYTES)]
    monkeypatch.setattr(calibrate, "Reservation", reserving(busy, tmp_path / "locks"))
    with pytest.raises(UserError, match=r"would wait for 1 free GPU: others have 2.0 GiB of GPU 0"):
        calibrate._free(1)
    assert not list((tmp_path / "locks").glob("*.ticket"))


def test_a_machine_without_gpus_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--calibrate"]) == 2
    assert "this machine has no GPU to measure" in capsys.readouterr().err
    assert run(["plan", "--calibrate", recipe, "launch.device=cpu"]) == 2
    assert "launch.device: is cpu" in capsys.readouterr().err
    assert run(["plan", "--calibrate", "--gpus", "8"]) == 2
    assert "another is described" in capsys.readouterr().err


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine's processor, measured in a GPU's place."""
    real = calibrate.probe
    monkeypatch.setattr(calibrate, "visible_gpus", lambda: 1)
    monkeypatch.setattr(calibrate, "gpu_name", lambda: CARD)
    monkeypatch.setattr(calibrate, "Reservation", reserving([Gpu(0, "GPU-0", 0)], tmp_path / "locks"))
    monkeypatch.setattr(
        calibrate, "probe", lambda device, shapes, disk, n, reservation: real("cpu", shapes, disk, n, **SMALL)
    )


@pytest.mark.usefixtures("as_gpu")
def test_the_command_measures_keeps_and_plans(
    recipe: str, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(face, "show_plan", lambda *args, **kwargs: planned.append(args) or 0)
    assert run(["plan", "--calibrate", recipe]) == 0
    out, err = capsys.readouterr()
    assert "measuring 1 x NVIDIA H200, about a minute" in err
    path = cache / "calibration" / "nvidia-h200.json"
    for word in ("matrix products", "optimizer in host memory", "692", "TFLOP/s", "2,048 tokens", f"kept in {path}"):
        assert word in out, word
    assert "sent to the other GPUs" not in out  # there is one
    assert len(planned) == 1 and planned[0][0] == recipe
    kept = json.loads(path.read_text())["calibrations"][0]
    assert kept["shapes"]["length"] == 2048 and kept["num_gpus"] == 1 and kept["measured"]["link"] is None


@pytest.mark.usefixtures("as_gpu")
def test_without_a_recipe_llama_8b_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Shapes] = []
    monkeypatch.setattr(calibrate, "probe", lambda device, chosen, *rest: seen.append(chosen) or MEASURED)
    assert run(["plan", "--calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert seen == [LLAMA_8B] and found["measured"]["matmul"] == 650e12 and found["gpu"] == CARD
    assert found["published"]["matmul"] == pytest.approx(692.3e12)


@pytest.mark.usefixtures("as_gpu")
def test_a_user_who_stops_it_keeps_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "probe", lambda *args: None)
    assert run(["plan", "--calibrate"]) == 130
    assert not cache.exists()


def test_an_unknown_gpu_is_printed_without_published_figures() -> None:
    text = face._shown(Kept("Voodoo 2", calibration(), Path("x.json")), None)
    assert "1 x Voodoo 2, at the shapes of Llama 3 8B in rows of 4,096 tokens" in text and " 650 " in text
