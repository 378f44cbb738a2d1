"""A run that was killed, or moved to another number of processes, continues the same curve on the same rows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.jobs import NeverStop, open_job
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_chats

from packtrain.checkpoint import store

STEPS = 6
Curve = list[tuple[tuple[int, ...], float]]


def recipe(model: Path, data: Path, strategy: str = "single", shard_size: int = 1) -> dict[str, Any]:
    return values(
        model, str(data),
        method={"type": "lora", "rank": 4, "dropout": 0.1 if strategy == "single" else 0.0},
        parallel={"strategy": strategy, "shard_size": shard_size},
        train={"max_steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "schedule": "cosine", "warmup": 2},
        checkpoint={"every": 1, "keep": 2},
    )  # fmt: skip


def curve(world: Any, recipe: dict[str, Any], folder: str, last: int = STEPS) -> Curve:
    """Train on from the folder's newest checkpoint to step ``last``, saving after each step."""
    from packtrain.checkpoint.store import Position
    from packtrain.train.loop import prefetched, train_step

    session = open_job(world, recipe, folder)
    session.built.model.train()
    found: Curve = []
    for prepared in prefetched(session):
        if prepared.batch.step == last:
            break
        result = train_step(session, prepared, NeverStop())
        rows = tuple(sorted(int(i) for ids in prepared.batch.sequences for i in ids))
        found.append((rows, result.loss))
        session.position = Position(prepared.batch.step + 1)
        session.save()
    return found


def killed_at(world: Any, recipe: dict[str, Any], folder: str, point: str, step: int) -> None:
    """As ``curve``, but rank 0 dies by SIGKILL inside the save after ``step``."""
    if world.rank == 0:
        _arm(point, step)
    curve(world, recipe, folder)


def _arm(point: str, step: int) -> None:
    """Put a SIGKILL in front of (or behind) one action of a save."""

    def at(module: Any, name: str, matches: Any, after: bool = False) -> None:
        real = getattr(module, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            if not matches(*args):
                return real(*args, **kwargs)
            if after:
                real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, deadly)

    def of_step(path: Any, *_: Any) -> bool:
        return f"step-{step}" in str(path)

    def the_rename(source: Any, target: Any) -> bool:
        return str(source).endswith(f"step-{step}.tmp")

    def the_pruning(source: Any, target: Any) -> bool:
        return str(source).endswith(f"step-{step - 2}")

    if point == "before the shards":
        at(store.dcp, "FileSystemWriter", of_step)
    elif point == "among the shards":
        import torch.distributed.checkpoint.filesystem as filesystem

        at(filesystem, "_write_item", lambda *_: Path(f"{os.environ['RUN']}/checkpoints/step-{step}.tmp").exists())
    elif point == "after the shards":
        at(store, "sha256", of_step)
    elif point == "before the rename":
        at(store.os, "rename", the_rename)
    elif point == "after the rename":
        at(store.os, "rename", the_rename, after=True)
    elif point == "inside the pruning":
        at(store.os, "rename", the_pruning, after=True)


POINTS = {  # the step that the run continues from
    "before the shards": 2, "among the shards": 2, "after the shards": 2, "before the rename": 2,
    "after the rename": 3, "inside the pruning": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("resume")
    return make_model(folder / "model"), write_chats(folder / "chats.jsonl", 14)


@pytest.fixture(scope="module")
def whole(case: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return run_ranks(1, curve, recipe(*case), str(tmp_path_factory.mktemp("whole")))[0]


@pytest.mark.parametrize("point", POINTS)
def test_killed_inside_a_save(
    case: tuple[Path, Path], whole: Curve, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-equal on one process, wherever the kill came."""
    monkeypatch.setenv("RUN", str(tmp_path))
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(1, killed_at, recipe(*case), str(tmp_path), point, 3)
    assert run_ranks(1, curve, recipe(*case), str(tmp_path))[0] == whole[POINTS[point] :]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step-{STEPS - 1}", f"step-{STEPS}"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damaged_newest_checkpoint_is_passed_over(
    case: tuple[Path, Path], whole: Curve, tmp_path: Path, damage: str
) -> None:
    run_ranks(1, curve, recipe(*case), str(tmp_path), 3)
    shard = next((tmp_path / "checkpoints" / "step-3").glob("*.distcp"))
    content = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(content[:7])
    elif damage == "flipped":
        shard.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    else:
        shard.unlink()
    assert run_ranks(1, curve, recipe(*case), str(tmp_path))[0] == whole[2:]


def test_saved_on_two_resumed_on_one_and_four(case: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    def spread(size: int) -> dict[str, Any]:
        return recipe(*case, "fsdp", size)

    wanted = run_ranks(2, curve, spread(2), str(tmp_path / "whole"))[0]
    run_ranks(2, curve, spread(2), str(tmp_path / "two"), 3)
    for size in (1, 4):
        shutil.copytree(tmp_path / "two", tmp_path / str(size))
        found = run_ranks(size, curve, spread(size), str(tmp_path / str(size)))[0]
        assert [rows for rows, _ in found] == [rows for rows, _ in wanted[3:]]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted[3:]], rel=1e-5)


def saves_that_fail(world: Any, recipe: dict[str, Any], folder: str, broken: str) -> tuple[str, list[int], list[int]]:
    """The word of a save that fails on rank 1 only, and the whole checkpoints after it and after the next."""
    from packtrain.checkpoint import folders
    from packtrain.checkpoint.store import Position

    session = open_job(world, recipe, folder)
    session.position = Position(1)
    session.save()
    real = getattr(store, broken)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        setattr(store, broken, fail)
    session.position = Position(2)
    with pytest.raises(store.SaveFailedError) as caught:
        session.save()
    setattr(store, broken, real)
    world.barrier()
    after = list(folders.whole(session.store.folder))
    left = [path.name for path in session.store.folder.glob("*.tmp")]
    assert left == [] and folders.newest(session.store.folder)[0] is not None
    world.barrier()
    session.save()
    return str(caught.value), after, list(folders.whole(session.store.folder))


def test_a_save_that_fails_on_one_rank_fails_on_all(case: tuple[Path, Path], tmp_path: Path) -> None:
    found = run_ranks(2, saves_that_fail, recipe(*case, "fsdp", 2), str(tmp_path), "sha256")
    assert found[0] == found[1] == ("rank 1: [Errno 28] No space left on device", [1], [1, 2])


STORED: dict[str, dict[str, dict[str, Any]]] = {
    "qlora": {"method": {"type": "qlora", "dropout": 0.0}},
    "prefix": {"method": {"type": "prefix", "virtual_tokens": 5}},
    "llama_adapter": {"method": {"type": "llama_adapter", "virtual_tokens": 5, "adapter_blocks": 2}},
    "tokens": {"method": {"dropout": 0.0}, "model": {"add_tokens": ["<call>"]}},
    "8 bit": {"method": {"type": "full"}, "train": {"optimizer": "adamw_8bit"}},
    "bf16 stochastic": {
        "method": {"type": "full"}, "train": {"optimizer": "adamw_bf16", "master_weights": "bf16", "precision": "bf16"},
    },
    "kahan": {
        "method": {"type": "full"}, "train": {"rounding": "kahan", "master_weights": "bf16", "precision": "bf16"},
    },
    "offload": {"method": {"type": "full"}, "parallel": {"offload": "optimizer"}},
    "offload params": {"method": {"type": "full"}, "parallel": {"offload": "params"}},
}  # fmt: skip
# bf16 arithmetic sums in another order on another number of processes, and stochastic rounding draws other bits
LOOSE = {"bf16 stochastic": 2e-2, "kahan": 1e-2}


def curves(world: Any, recipes: dict[str, dict[str, Any]], folder: str, last: int = STEPS) -> dict[str, Curve]:
    Path(folder).mkdir(exist_ok=True)
    return {name: curve(world, recipe, f"{folder}/{name}", last) for name, recipe in recipes.items()}


@pytest.mark.slow
def test_every_kind_of_state_resumes(case: tuple[Path, Path], tmp_path: Path) -> None:
    """Bit-equal on the same number of processes; on another one, the same curve."""
    import shutil

    def spread(size: int) -> dict[str, dict[str, Any]]:
        made = {name: recipe(*case, "fsdp", size) for name in STORED}
        for name, sections in STORED.items():
            for section, changes in sections.items():
                made[name][section].update(changes)
        return made

    wanted = run_ranks(2, curves, spread(2), str(tmp_path / "whole"))[0]
    run_ranks(2, curves, spread(2), str(tmp_path / "part"), 3)
    shutil.copytree(tmp_path / "part", tmp_path / "one")
    again = run_ranks(2, curves, spread(2), str(tmp_path / "part"))[0]
    alone = run_ranks(1, curves, spread(1), str(tmp_path / "one"))[0]
    for name in STORED:
        assert again[name] == wanted[name][3:], name
        losses = [[loss for _, loss in found] for found in (alone[name], wanted[name][3:])]
        assert losses[0] == pytest.approx(losses[1], rel=LOOSE.get(name, 1e-5)), name
