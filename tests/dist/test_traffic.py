"""The bytes said to be sent in a step are those that the collectives of a real step carry."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.jobs import NeverStop, open_job
from tests.ranks import run_ranks
from tests.tiny import make_model, values, write_uneven_rows
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from packtrain.parallel.traffic import Traffic, UnitBytes, sharded_traffic

SIZE = 4
SMALL = 1024  # bytes: all-reduces of norms and loss sums are below, those of gradients above
NODES = (0, 0, 1, 1)  # the node of each rank
WORLDS = {"ddp": ("ddp", 1), "fsdp 4": ("fsdp", 4), "hsdp 2x2": ("fsdp", 2)}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "lora": {"type": "lora", "rank": 3},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "qlora": {"type": "qlora", "rank": 3},
    "prefix": {"type": "prefix", "virtual_tokens": 7},
}
FROZEN: dict[str, dict[str, Any]] = {
    "freeze named": {"type": "freeze", "trainable": ["blocks.1-2", "norm"]},
    "norm only": {"type": "freeze", "trainable": ["norm"]},
}
SETTINGS = ("kept", "resharded")
# An op, and which argument has the bytes it moves and which the group.
OPS = {
    torch.ops.c10d._allgather_base_.default: ("gather", 0, 2),
    torch.ops.c10d._reduce_scatter_base_.default: ("scatter", 1, 2),
    torch.ops.c10d.allreduce_.default: ("reduce", 0, 1),
}  # fmt: skip

Counted = dict[tuple[str, tuple[int, ...]], int]


class Counter(TorchDispatchMode):
    """Sums the bytes of each kind of collective over each group's ranks; small all-reduces and other ops apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counted = defaultdict(int)
        self.small = 0
        self.unknown: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again as plain tensors
        if func in OPS:
            kind, data, group = OPS[func]
            tensors = args[data] if isinstance(args[data], list) else [args[data]]
            size = sum(t.nbytes for t in tensors)
            if kind == "reduce" and size < SMALL:
                self.small += size
            else:
                self.counted[kind, tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[group])))] += size
        elif func.namespace in ("c10d", "_c10d_functional"):
            size = sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
            self.small += size
            if size >= SMALL:
                self.unknown.append(f"{func}: {size}")
        return func(*args, **(kwargs or {}))


def count_step(world: Any, recipe: dict[str, Any], setting: str) -> dict[str, Any]:
    """A step's collectives on this rank, and what was said about them before it."""
    from packtrain.parallel import fsdp
    from packtrain.train.loop import prefetched, train_step

    micro_batches = 3 // recipe["train"]["micro_batch_size"]
    with pytest.MonkeyPatch.context() as patch:
        if setting == "resharded":
            patch.setattr(fsdp, "KEPT_LIMIT", 0)
            patch.setattr(fsdp, "UNREDUCED_LIMIT", 0)
        session = open_job(world, recipe)
    assert session.micro_batches == micro_batches
    said = session.built.strategy.traffic(micro_batches)
    session.built.model.train()
    prepared = next(prefetched(session))
    assert len(prepared.micro_batches) == micro_batches
    with Counter() as counter:
        result = train_step(session, prepared, NeverStop())
    assert counter.small < SMALL
    return {"said": said, "counted": dict(counter.counted), "unknown": counter.unknown, "norm": result.grad_norm}


def count_steps(world: Any, cases: dict[str, tuple[dict[str, Any], str]]) -> dict[str, dict[str, Any]]:
    return {name: count_step(world, *case) for name, case in cases.items()}


def make_cases(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    data = f"{write_uneven_rows(folder / 'rows.py', [5, 9, 3, 11, 1, 7] * 5)}:rows"
    models = {tied: make_model(folder / f"model-{tied}", tied=tied) for tied in (False, True)}

    def recipe(world: str, method: dict[str, Any], micro_batches: int, tied: bool = False, **train: Any) -> Any:
        strategy, shard_size = WORLDS[world]
        return values(
            models[tied], data, method=method, parallel={"strategy": strategy, "shard_size": shard_size},
            train={"batch_size": 3 * SIZE, "micro_batch_size": 3 // micro_batches, "max_steps": 1, **train},
        )  # fmt: skip

    cases: dict[str, tuple[dict[str, Any], str]] = {}
    for world in WORLDS:
        for method, section in METHODS.items():
            for num in (1, 3):
                cases[f"{world}, {method}, {num}, kept"] = recipe(world, section, num), "kept"
    for method, section in (METHODS | ADAPTERS).items():
        for world in ("fsdp 4", "hsdp 2x2"):
            cases[f"{world}, {method}, 3, resharded"] = recipe(world, section, 3), "resharded"
    for method, section in FROZEN.items():
        cases[method] = recipe("fsdp 4", section, 3), "resharded"
    cases["bf16"] = recipe("hsdp 2x2", METHODS["lora"], 1, precision="bf16"), "kept"
    tied = recipe("fsdp 4", METHODS["full"], 1, tied=True)
    tied["parallel"]["recompute"] = "full"
    cases["tied, recompute"] = tied, "resharded"
    return cases


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(SIZE, count_steps, make_cases(tmp_path_factory.mktemp("traffic")))


def sent_by(counted: Counted) -> dict[tuple[int, ...], int]:
    """Bytes that a rank sends in each of its groups, by the optimal counts."""
    moved: dict[tuple[int, ...], int] = defaultdict(int)
    for (kind, ranks), size in counted.items():
        moved[ranks] += size * (2 if kind == "reduce" else 1)
    return {ranks: size * (len(ranks) - 1) // len(ranks) for ranks, size in moved.items()}


def crossing(by_rank: list[Counted]) -> int:
    """Bytes that leave a node in a step, all ranks together, where each group is a ring in order of rank."""
    total = 0
    for rank, counted in enumerate(by_rank):
        for ranks, sent in sent_by(counted).items():
            after = ranks[(ranks.index(rank) + 1) % len(ranks)]
            total += sent * (NODES[rank] != NODES[after])
    return total


def test_said_is_what_is_sent(steps: list[dict[str, dict[str, Any]]]) -> None:
    wrong = {}
    for rank, found in enumerate(steps):
        for name, step in found.items():
            assert not step["unknown"], name
            said: Traffic = step["said"]
            first = rank // said.shard_size * said.shard_size
            wanted = {
                tuple(range(first, first + said.shard_size)): said.shard,
                tuple(range(rank % said.shard_size, SIZE, said.shard_size)): said.replicate,
            }
            if (sent := sent_by(step["counted"])) != {ranks: size for ranks, size in wanted.items() if size}:
                wrong[rank, name] = sent, wanted
    assert not wrong


def test_shards_inside_a_node_send_less_between_nodes(steps: list[dict[str, dict[str, Any]]]) -> None:
    def between(name: str) -> int:
        return crossing([found[name]["counted"] for found in steps])

    for method in METHODS:
        for case in (f"{method}, 1, kept", f"{method}, 3, kept", f"{method}, 3, resharded"):
            across, within = between(f"fsdp 4, {case}"), between(f"hsdp 2x2, {case}")
            assert within < across
            # What was said: of a ring over both nodes every second rank sends outward, of replicas all do.
            said = [steps[0][f"{world}, {case}"]["said"] for world in ("fsdp 4", "hsdp 2x2")]
            assert (across, within) == (2 * said[0].shard, 4 * said[1].replicate)
    # LoRA's gradients are few: with frozen weights gathered inside a node, almost nothing goes between.
    assert between("hsdp 2x2, lora, 3, resharded") * 10 < between("fsdp 4, lora, 3, resharded")
    # Quantised weights are gathered as they are stored.
    assert between("fsdp 4, qlora, 3, resharded") * 2 < between("fsdp 4, lora, 3, resharded")


def test_reducing_each_micro_batch_gives_the_same_gradients(steps: list[dict[str, dict[str, Any]]]) -> None:
    norms = [steps[0][f"hsdp 2x2, full, 3, {setting}"]["norm"] for setting in SETTINGS]
    assert norms == pytest.approx([norms[0]] * len(SETTINGS), rel=1e-5)


def test_counts_by_hand() -> None:
    units = [UnitBytes(800, 400, in_backward=False), UnitBytes(800, 400, in_backward=True)]
    found = sharded_traffic(units, 4, 2, 3, reshard=True, reduce_each=False)
    assert found == Traffic((3 * (800 + 1600) + 800) * 3 // 4, 2 * 200 // 2, 4, 2)
    assert sharded_traffic(units, 4, 1, 1, reshard=False, reduce_each=True) == Traffic(2400 * 3 // 4, 0, 4, 1)
    assert sharded_traffic(units, 1, 1, 1, reshard=True, reduce_each=True) == Traffic(0, 0, 1, 1)


def test_sentence() -> None:
    assert Traffic(1_288_490_189, 314_572_800, 2, 2).describe() == (
        "shard axis (2 processes): 1.2 GiB, replicate axis (2): 300.0 MiB sent by each process a step"
    )
    assert Traffic(0, 1024, 1, 8).describe() == "replicate axis (8 processes): 1.0 KiB sent by each process a step"
    assert Traffic(0, 0, 1, 1).describe() == "nothing is sent: there is one process"
