"""``packtrain plan``: what it says of machines that are not here, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli.app import run
from packtrain.launch.machine import size

CONFIG = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """8B's config.json alone, and no data: a plan needs neither weights nor rows."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "r.yaml").write_text(f"model: {{path: {tmp_path}/model}}\ndata: {{train: [nowhere.jsonl]}}\n")
    return str(tmp_path / "r.yaml")


def plan(recipe: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = run(["plan", recipe, *words])
    out, err = capsys.readouterr()
    return status, out, err


def made(recipe: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status, out, err = plan(recipe, *words, "--json", capsys=capsys)
    assert not err
    return status, json.loads(out)


def test_config_alone_is_enough_and_torch_is_not_needed(recipe: str) -> None:
    code = (
        f"import sys; from packtrain.cli.app import run; s = run(['plan', {recipe!r}, '--gpus', '8', '--gpu', 'H100'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; assert not {{'torch', 'transformers'}} & set(sys.modules); sys.exit(s)"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lora on 8 x H100: fits, ddp, micro-batch 2, no recompute\n")
    for word in ("optimizer states", "host memory of a node", "disk:", "tokens/s a GPU", "published figures", "sends"):
        assert word in done.stdout, word


def test_json_holds_every_part(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = made(recipe, "--gpus", "2", "--gpu", "H200", "--nodes", "2", capsys=capsys)
    assert status == 0 and found["machine"]["processes"] == 4 and found["machine"]["processes_per_node"] == 2
    assert found["parameters"] == {"model": 8030261248, "trained": 41943040}
    assert sum(found["memory"]["terms"].values()) == pytest.approx(found["memory"]["total_bytes"], abs=20)
    assert found["memory"]["fits"] and found["speed"]["tokens_per_second"] > 10_000
    rates = [one["tokens_per_second"] for one in found["candidates"] if not one["refused"]]
    assert rates == sorted(rates, reverse=True) and len(rates) > 4
    assert found["candidates"][0]["settings"] == found["settings"]


def test_what_does_not_fit_says_what_would(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("method.type=full", "data.max_length=4096", "--gpus", "1", "--gpu", "RTX 4090")
    status, found = made(recipe, *words, capsys=capsys)
    assert status == 1 and not found["memory"]["fits"]
    assert all("GiB by" in one["refused"] for one in found["candidates"])
    helping = {remedy["setting"]: remedy["total"] for remedy in found["remedies"]}
    assert "method.type=lora" in helping and any(name.endswith("GPUs") for name in helping)
    assert all(total <= found["machine"]["usable_bytes"] for total in helping.values())
    status, out, _ = plan(recipe, *words, capsys=capsys)
    assert status == 1 and "does not fit" in out and "what would fit:" in out


def test_remedies_hold(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting that is named as a remedy does fit when it is taken."""
    words = ("method.type=full", "data.max_length=4096", "--gpus", "1", "--gpu", "H100")
    _, found = made(recipe, *words, capsys=capsys)
    settings = [remedy["setting"].split() for remedy in found["remedies"] if "=" in remedy["setting"]]
    assert len(settings) >= 2
    for setting in settings:
        status, _ = made(recipe, *words, *setting, capsys=capsys)
        assert status == 0, setting


def test_host_memory_counts(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("method.type=full", "parallel.offload=optimizer", "--gpus", "1", "--gpu", "H100")
    assert made(recipe, *words, "--host-memory", "512GiB", capsys=capsys)[0] == 0
    status, found = made(recipe, *words, "--host-memory", "64GiB", capsys=capsys)
    assert status == 1 and not found["host"]["fits"] and found["memory"]["fits"]
    assert "host memory is short" in plan(recipe, *words, "--host-memory", "64GiB", capsys=capsys)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "1"], "the memory of the GPUs is not given"),
        (["--gpus", "1", "--gpu", "Voodoo"], "'Voodoo' is not known"),
        (["--gpus", "1", "--gpu-memory", "much"], "'much' is no size"),
        (["--gpus", "1", "--gpu-memory", "0GiB"], "'0GiB' is no size"),
        (["--gpus", "0", "--gpu", "H100"], "--gpus: '0' is not allowed"),
        (["--gpu", "H100"], "no GPU to plan for"),
        (["--gpus", "3", "--gpu", "H100", "parallel.shard_size=2"], "does not divide 3 processes"),
        (["--gpus", "1", "--gpu", "H1000"], "'H1000' is not known"),
        (["--gpus", "1", "--gpu", "Tesla T4", "train.precision=bf16"], "this GPU has no bf16"),
        (["--gpus", "8", "--gpu", "H100", "launch.processes=16"], "16 processes for 8 GPUs"),
        (["--gpus", "2", "--gpu", "H100", "launch.device=cpu"], "add launch.device=auto"),
        (["--gpus", "2", "--gpu", "H100", "data.max_length=100000"], "100000"),
    ],
)
def test_mistakes_are_one_sentence(
    recipe: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = plan(recipe, *words, capsys=capsys)
    assert status == 2 and not out and err.startswith("packtrain: error: ") and err.count("\n") == 1
    assert said in err


def test_sizes() -> None:
    assert size("80GiB", "") == size("80", "") == 80 * 2**30
    assert size("80GB", "") == size(" 80 gb", "") == 80 * 10**9
    assert size("1.5TiB", "") == 3 * 2**39


@pytest.mark.parametrize("word", ["launch.processes=2", "launch.gpus=2", "launch.gpus=[0,3]"])
def test_a_recipe_may_take_fewer_gpus_than_there_are(
    recipe: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = plan(recipe, "--gpus", "4", "--gpu", "H100", "--nodes", "2", word, capsys=capsys)
    assert status == 0 and "on 4 x H100" in out


def test_a_gpu_without_bf16_is_planned_in_fp32(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, precision in (("T4", "fp32"), ("H100", "bf16")):
        _, out, _ = plan(recipe, "--gpus", "1", "--gpu", gpu, "--json", capsys=capsys)
        assert json.loads(out)["settings"]["precision"] == precision


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.recompute=none"],
        ["parallel.strategy=ddp"],
        ["parallel.strategy=single", "train.micro_batch_size=4"],
        ["parallel.strategy=deepspeed", "parallel.zero_stage=0"],
        ["--host-memory", "64GiB"],
    ],
)
def test_remedies_say_all_that_has_to_change(recipe: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Taken by the letter each fits, in host memory too, whatever else the recipe fixes."""
    words = ["method.type=full", "data.max_length=4096", "--gpu", "A100", *words]
    status, found = made(recipe, *words, "--gpus", "1", capsys=capsys)
    assert status == 1 and found["remedies"]
    for remedy in found["remedies"]:
        count, gpus, setting = remedy["setting"].rpartition("GPUs")[0].strip(), "1", remedy["setting"]
        nodes = "1"
        if count:
            setting = remedy["setting"].rpartition("GPUs")[2]
            gpus, nodes = str(min(int(count), 8)), str(max(int(count) // 8, 1))
        place = ["--gpus", gpus, "--nodes", nodes]
        assert made(recipe, *words, *place, *setting.split(), capsys=capsys)[0] == 0, remedy


def test_where_nothing_helps_that_is_said(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(recipe, "--gpus", "8", "--gpu", "H100", "--host-memory", "1GiB", capsys=capsys)
    told = " ".join(out.split())
    assert status == 1 and "of host memory by" in told and "nothing that Packtrain can change alone" in told


def test_offloaded_activations_lie_in_host_memory(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "parallel.recompute=full parallel.strategy=fsdp data.max_length=8192 train.micro_batch_size=1"
    words = ["--gpus", "2", "--gpu", "H200", *settings.split()]
    kept, there = (
        made(recipe, *words, f"parallel.offload_activations={word}", capsys=capsys)[1] for word in ("false", "true")
    )
    moved = kept["memory"]["terms"]["activations"] - there["memory"]["terms"].get("activations", 0)
    assert moved > 2**28
    assert there["host"]["training"] - kept["host"]["training"] == pytest.approx(2 * moved, abs=4)
