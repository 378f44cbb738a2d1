"""DeepSpeed's ZeRO against one process: losses, resumes and saved weights, for every stage and offload."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.dist.test_resume import STEPS, curves, recipe
from tests.final import assert_loads, train_and_save
from tests.jobs import train_recipes
from tests.parity import ADAPTERS, METHODS, Case, assert_equal, make_case, zero
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_chats

from packtrain.config import build_recipe, strategies
from packtrain.launch.native import build

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("collectives")]
ALL = METHODS | ADAPTERS


@pytest.fixture(scope="module")
def collectives() -> None:
    """What `packtrain train` has DeepSpeed compile before it starts any rank."""
    build(build_recipe(values(Path("none"), "none.jsonl", parallel={"strategy": "deepspeed"})))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """DeepSpeed's access to disks; the first time takes minutes."""
    folder = str(tmp_path_factory.mktemp("swap"))
    build(build_recipe(values(Path("none"), "none.jsonl", parallel=zero(3, "optimizer", offload_dir=folder))))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("zero"))


def compare(
    case: Case, methods: dict[str, dict[str, Any]], settings: list[dict[str, Any]], rounds: tuple[int, ...]
) -> None:
    """Each method in each setting on two processes, with so many forward passes a step, against one process."""
    plain = {method: case.recipe(section, data={"eval": 0.1}) for method, section in methods.items()}
    spread = {
        f"{method}; {how['zero_stage']} {how['offload']} {n}": case.spread(section, "ddp 2", n, **how)
        for method, section in methods.items()
        for how in settings
        for n in rounds
    }
    wanted = run_ranks(1, train_recipes, plain)[0]
    by_rank = run_ranks(2, train_recipes, spread)
    assert all(found == by_rank[0] for found in by_rank), "ranks disagree"
    assert by_rank[0].keys() == spread.keys()
    for name, found in by_rank[0].items():
        assert_equal(found, wanted[name.split(";")[0]], 1e-4, name)


def test_stages_equal_single(case: Case) -> None:
    few = {name: ALL[name] for name in ("full", "lora")}
    compare(case, few, [*(zero(stage) for stage in range(4)), zero(2, "optimizer"), zero(3, "params")], (3,))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_every_method_in_every_stage(case: Case, stage: int) -> None:
    methods = {name: section for name, section in ALL.items() if name != "full, 8 bit"}
    compare(case, methods, [zero(stage)], (1,))


@pytest.mark.slow
def test_offload_with_and_without_accumulation(case: Case) -> None:
    methods = {name: ALL[name] for name in ("full", "lora", "full, tokens")}
    compare(
        case, methods, [zero(1, "optimizer"), zero(2, "optimizer"), zero(3, "optimizer"), zero(3, "params")], (1, 3)
    )


SECTIONS = {
    "full": METHODS["full"], "freeze": METHODS["freeze"], "lora": METHODS["lora"], "qlora": ADAPTERS["qlora"],
    "llama_adapter": ADAPTERS["llama_adapter"], "prefix": ADAPTERS["prefix"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in strategies.STRATEGIES if name != "single"])
def test_what_the_table_says_runs_runs(case: Case, disk: None, tmp_path: Path, strategy: str) -> None:
    """Every cell of docs/deepspeed.md that says so, with one process's losses."""
    plain = {name: case.recipe(section, data={"eval": 0.1}) for name, section in SECTIONS.items()}
    cells = [cell for cell in strategies.cells() if cell.strategy == strategy and cell.runs]
    assert {cell.method for cell in cells} == SECTIONS.keys()
    spread = {
        f"{cell.method}; {cell.offload}": case.spread(
            SECTIONS[cell.method], "ddp 2", 3, **parallel_of(cell, tmp_path / str(number))
        )
        for number, cell in enumerate(cells)
    }
    wanted = run_ranks(1, train_recipes, plain)[0]
    for name, found in run_ranks(2, train_recipes, spread)[0].items():
        assert_equal(found, wanted[name.split(";")[0]], 1e-4, name)


def parallel_of(cell: strategies.Cell, disk: Path) -> dict[str, Any]:
    """The parallel section of a cell, on two processes."""
    made = strategies.STRATEGIES[cell.strategy] | strategies.OFFLOADS[cell.offload]
    if "offload_dir" in made:
        made["offload_dir"] = str(disk)
    if made["strategy"] == "deepspeed":
        zeroed = zero(made["zero_stage"])
        if "offload_dir" in made:
            del zeroed["deepspeed_config"]["zero_optimization"]["sub_group_size"]
        return zeroed | made
    return made | ({"shard_size": 2} if made["strategy"] == "fsdp" else {})


@pytest.mark.slow
def test_bf16_is_near_fp32(case: Case) -> None:
    plain = run_ranks(1, train_recipes, {"full": case.recipe(ALL["full"])})[0]["full"]
    tried = {
        str(stage): case.spread(ALL["full"], "ddp 2", 3, **zero(stage, offload)) for stage, offload in
        [(0, "none"), (1, "none"), (2, "optimizer"), (3, "none"), (3, "params")]
    }  # fmt: skip
    for section in tried.values():
        section["train"]["precision"] = "bf16"
    for stage, (steps, _) in run_ranks(2, train_recipes, tried)[0].items():
        assert [s[0] for s in steps] == pytest.approx([s[0] for s in plain[0]], rel=1e-2), stage


STATES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "params")]


@pytest.mark.slow
def test_resumes_on_as_many_fewer_and_more(tmp_path: Path) -> None:
    """Bit-equal on the same number of processes; the same curve on one and on three."""
    case = make_model(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl", 14)
    recipes = {}
    for stage, offload in STATES:
        made = recipe(*case, "deepspeed")
        made["parallel"] |= zero(stage, offload)
        made["method"] = {"type": "full"}
        recipes[f"{stage} {offload}"] = made
    wanted = run_ranks(2, curves, recipes, str(tmp_path / "whole"))[0]
    run_ranks(2, curves, recipes, str(tmp_path / "part"), 3)
    for size in (1, 2, 3):
        shutil.copytree(tmp_path / "part", tmp_path / str(size))
        found = run_ranks(size, curves, recipes, str(tmp_path / str(size)))[0]
        for name in recipes:
            assert len(found[name]) == STEPS - 3
            if size == 2:
                assert found[name] == wanted[name][3:], name
            assert [rows for rows, _ in found[name]] == [rows for rows, _ in wanted[name][3:]], name
            losses = [[loss for _, loss in curve] for curve in (found[name], wanted[name][3:])]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5), (size, name)


SAVED = {
    "full": {"type": "full"}, "freeze": {"type": "freeze", "freeze_first": 2}, "lora": {"type": "lora", "rank": 4},
    "qlora": {"type": "qlora", "rank": 4},
    "lora parts": {"type": "lora", "rank": 4, "also_train": ["embedding", "norm", "head"]},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saved_weights_load_elsewhere(tmp_path: Path, tied: bool) -> None:
    base = make_model(tmp_path / "base", tied=tied, intermediate_size=128)
    data = str(write_chats(tmp_path / "chats.jsonl", 12))
    methods, recipes = {}, {}
    for stage, offload in STATES:
        for name, section in SAVED.items():
            run = f"{name} {stage} {offload}"
            methods[run] = section
            recipes[run] = values(
                base, data, method=section, parallel=zero(stage, offload), launch={"processes": 2},
                train={"max_steps": 2},
            )  # fmt: skip
    trained = run_ranks(2, train_and_save, recipes, str(tmp_path))[0]
    assert_loads(tmp_path, methods, trained)


BIG = {  # a matrix of it is swapped, and begins at no multiple of 512 bytes behind another one
    "hidden_size": 774, "intermediate_size": 1030, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 130,
    "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.slow
def test_optimizer_states_on_a_disk(disk: None, tmp_path: Path) -> None:
    """What is really swapped trains and resumes as in memory; DeepSpeed's own sub-groups would not."""
    model = make_model(tmp_path / "model", **BIG)
    chats = str(write_chats(tmp_path / "chats.jsonl", 14))
    curves_of: dict[str, dict[str, Any]] = {"memory": {}, "disk": {}, "disk, params in host memory": {}}
    for name in curves_of:
        made = recipe(model, Path(chats), "deepspeed")
        made["method"] = {"type": "full"}
        folder = {"offload_dir": str(tmp_path / name.replace(" ", "-"))} if name != "memory" else {}
        made["parallel"] |= zero(3, "params" if "params" in name else "optimizer", **folder)
        del made["parallel"]["deepspeed_config"]["zero_optimization"]["sub_group_size"]
        curves_of[name] = made
    wanted = run_ranks(2, curves, curves_of, str(tmp_path / "whole"))[0]
    for name, folder in (("disk", "disk"), ("disk, params in host memory", "disk,-params-in-host-memory")):
        assert wanted[name] == [(rows, pytest.approx(loss, rel=1e-6)) for rows, loss in wanted["memory"]]
        swapped = list((tmp_path / folder).rglob("*.swp"))
        assert sum(file.stat().st_size for file in swapped) > 2**26
    run_ranks(2, curves, curves_of, str(tmp_path / "part"), 3)
    for size in (2, 1):
        shutil.copytree(tmp_path / "part", tmp_path / str(size))
        found = run_ranks(size, curves, curves_of, str(tmp_path / str(size)))[0]
        for name in curves_of:
            assert [loss for _, loss in found[name]] == pytest.approx([loss for _, loss in wanted[name][3:]], rel=1e-5)


@pytest.mark.slow
def test_no_rank_holds_the_model_while_it_loads(tmp_path: Path) -> None:
    """Of 16 blocks, two at most are whole at a time on a rank that keeps a half of each."""
    model = make_model(tmp_path / "model", num_hidden_layers=16)
    data = str(write_chats(tmp_path / "chats.jsonl", 12))
    recipe = values(model, data, parallel=zero(3), launch={"processes": 2}, train={"max_steps": 1})
    for whole, most in run_ranks(2, most_whole_parameters, recipe):
        assert most < 0.2 * whole


def most_whole_parameters(world: Any, recipe: dict[str, Any]) -> tuple[int, int]:
    """(parameters of the model, the most of them that were whole on this rank when a part of it was made)."""
    from tests.jobs import open_job

    from packtrain.parallel.zero.strategy import Zero

    real, most = Zero.materialize, [0]

    def watched(self: Zero, model: Any, complete: Any) -> Any:
        for part in real(self, model, complete):
            most[0] = max(most[0], sum(p.numel() for p in model.parameters() if not p.is_meta))
            yield part

    Zero.materialize = watched  # type: ignore[method-assign]
    session = open_job(world, recipe)
    return session.built.num_parameters, most[0]


@pytest.mark.slow
def test_fp16_overflow_is_skipped_not_fatal(case: Case) -> None:
    """What the loop does with a strategy that skips: no error, no update, and the step is counted."""
    recipe = case.recipe(METHODS["lora"])
    losses, skipped = run_ranks(1, train_with_overflow, recipe)[0]
    assert skipped == [False, True, False]
    assert losses[2] == pytest.approx(losses[1], abs=0.2)


def train_with_overflow(world: Any, recipe: dict[str, Any]) -> Any:
    from tests.jobs import NeverStop, open_job

    from packtrain.train.loop import prefetched, train_step

    session = open_job(world, recipe)
    strategy, updates = session.built.strategy, session.updates
    clip, apply = strategy.clip, updates.apply
    found: list[Any] = []

    def overflowing(parameters: Any, max_norm: Any) -> Any:
        return clip(parameters, max_norm) * (float("inf") if len(found) == 1 else 1.0)

    strategy.clip, strategy.skips = overflowing, lambda norm: norm == float("inf")  # type: ignore[method-assign]
    updates.apply = lambda rate: None if len(found) == 1 else apply(rate)  # type: ignore[method-assign]
    for prepared in prefetched(session):
        result = train_step(session, prepared, NeverStop())
        found.append((result.loss, result.skipped))
    return [loss for loss, _ in found], [skipped for _, skipped in found]


@pytest.mark.slow
@pytest.mark.shared
def test_the_files_of_llama_factory_run_as_they_are(tmp_path: Path) -> None:
    import yaml
    from tests.dist.test_train_command import packtrain

    configs = sorted(Path("../shared/peer_configs/deepspeed").glob("*.json"))
    assert len(configs) == 5
    model, rows = make_model(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl", 24)
    losses = {}
    for config in configs:
        section = {"deepspeed_config": str(config.absolute())}
        recipe = {
            "model": {"path": str(model)}, "data": {"train": str(rows), "eval": 0.1, "max_length": 128},
            "parallel": section, "train": {"max_steps": 3, "batch_size": 8, "micro_batch_size": 2, "precision": "fp32"},
            "launch": {"processes": 2, "timeout": "120s", "device": "cpu"},
            "output": {"folder": str(tmp_path / "runs"), "name": config.stem},
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = packtrain("train", str(tmp_path / "recipe.yaml"))
        assert done.returncode == 0, done.stderr
        run = tmp_path / "runs" / config.stem
        given, made = json.loads(config.read_text()), json.loads((run / "deepspeed.json").read_text())
        assert "auto" not in json.dumps(made)
        for key, value in given["zero_optimization"].items():
            if value != "auto":
                assert made["zero_optimization"][key] == value, (config.name, key)
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        losses[config.stem] = [e["loss"] for e in events if e["event"] == "step"]
    first = losses.pop("ds_z0_config")
    for name, found in losses.items():
        assert found == pytest.approx(first, rel=1e-5), name
