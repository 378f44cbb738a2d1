from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from tests.ranks import free_port, run_ranks

from packtrain.config import Recipe, build_recipe
from packtrain.errors import UserError
from packtrain.launch import preflight
from packtrain.parallel.world import World, join


def recipe(**train: Any) -> Recipe:
    return build_recipe({"model": {"path": "demo"}, "data": {"train": "samsum_mini"}, "train": train})


CHECKS = {
    "3 nodes x 1 process, all shared": ("abc", ["one", "one", "one"]),
    "3 nodes x 1 process, b has its own": ("abc", ["one", "two", "one"]),
    "2 nodes, each with its own": ("abb", ["one", "two", "one"]),  # the first rank of a host looks
    "1 node": ("aaa", ["one", "two", "two"]),
    "no folder": ("abc", ["file", "one", "one"]),
}
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "recipe": ({"learning_rate": 5e-5, "seed": 7}, {}),
    "version": ({}, {"transformers": "2"}),
}


def _rank(world: World, folder: str) -> dict[str, Any]:
    """What each check finds on this rank, in a group of three."""
    found: dict[str, Any] = {}
    for name, (hosts, caches) in CHECKS.items():
        own = recipe()
        own.output.name, own.data.workers = f"run-{world.rank}", world.rank + 1  # each host's own
        started = time.perf_counter()
        result = preflight.check(world, own, Path(folder, caches[world.rank]), hosts[world.rank])
        found[name] = result, time.perf_counter() - started
    for name, (changes, versions) in DIFFERENT.items():
        own = recipe(**(changes if world.rank else {}))
        installed = versions if world.rank else {}
        with mock.patch.object(preflight, "version", lambda package, known=installed: known.get(package, "1")):
            try:
                preflight.check(world, own, Path(folder, "one"), "abb"[world.rank])
            except UserError as error:
                found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("caches")
    (folder / "file").write_text("no folder")
    results = run_ranks(3, _rank, str(folder), timeout=60)
    assert not list(folder.glob("**/.probe-*")), "a probe was left behind"
    return results


@pytest.mark.parametrize(
    ("name", "size", "cache"),
    [
        ("3 nodes x 1 process, all shared", "3 nodes x 1 process, ", ", data cache shared by all nodes"),
        ("3 nodes x 1 process, b has its own", "3 nodes x 1 process, ", ", data cache not shared with b"),
        ("2 nodes, each with its own", "2 nodes with 1 + 2 processes, ", ", each node with a data cache of its own"),
        ("1 node", "1 node x 3 processes, ", ""),
    ],
)
def test_a_group_that_is_alike(found: list[dict[str, Any]], name: str, size: str, cache: str) -> None:
    for result, seconds in (rank[name] for rank in found):
        (line,) = result.lines
        assert re.fullmatch(f"{re.escape(size)}all-reduce 8 MiB at [0-9.]+ GB/s \\(bus\\){cache}", line)
        assert result.bandwidth == pytest.approx(found[0][name][0].bandwidth)
        # A round took no longer than the whole check: a bound on the bandwidth from below.
        assert result.bandwidth > preflight.CPU_BYTES * 4 / 3 / seconds


def test_a_cache_that_cannot_be_probed_ends_nothing(found: list[dict[str, Any]]) -> None:
    for result, _ in (rank["no folder"] for rank in found):
        assert "data cache" not in result.lines[0]
        assert re.fullmatch(r"whether the nodes share the data cache is not known \(.*/file: .+\)", result.lines[1])


def test_what_differs_is_named_on_every_rank(found: list[dict[str, Any]]) -> None:
    mend = "start every node with the same recipe, and set what was auto."
    assert [rank["recipe"] for rank in found] == [f"train.learning_rate: 0.0001 on a, 5e-05 on b; {mend}"] * 3
    sentence = "group: transformers 1 on a, 2 on b; install the same transformers on every node."
    assert [rank["version"] for rank in found] == [sentence] * 3


def test_gpus_that_differ_are_a_line_and_no_error() -> None:
    found = preflight.Preflight({"a": 8, "b": 8}, 182e9, 2**26, [], "", {"H100": ["a"], "H200": ["b"]})
    assert found.lines == [
        "2 nodes x 8 processes, all-reduce 64 MiB at 182 GB/s (bus), data cache shared by all nodes",
        "the GPUs are not alike: H100 on a; H200 on b; the slowest sets the pace",
    ]


_MEND = "see whether the others have started and reach MASTER_ADDR, or raise launch.timeout."


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [(0, "1 of 2 processes came within 1s"), (1, "rank 0 did not answer at 127.0.0.1:{port} within 1s")],
)
def test_one_of_two_processes(monkeypatch: pytest.MonkeyPatch, rank: int, sentence: str) -> None:
    port = free_port()
    here = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(dist.DistError) as raised:
        join("cpu", 1)
    assert str(preflight.incomplete(str(raised.value), 2, "1s")) == f"group: {sentence.format(port=port)}; {_MEND}"


def test_torchruns_own_store_does_not_count_the_processes() -> None:
    text = "wait timeout after 4000ms, keys: /0//cpu//0/1"  # what gloo raises over a store that is there already
    found = preflight.incomplete(text, 2, "4s")
    assert str(found) == f"group: not all of the 2 processes came within 4s; {_MEND}"


@pytest.mark.parametrize("error", [ValueError("1/2 clients joined."), dist.DistNetworkError("address in use")])
def test_other_errors_stay(error: Exception) -> None:
    assert preflight.not_joined(error, recipe()) is None


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as squatter:
        squatter.bind(("0.0.0.0", 0))
        squatter.listen()
        here = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": squatter.getsockname()[1]}
        for name, value in here.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(dist.DistError) as raised:
            join("cpu", 1)
        told = preflight.not_joined(raised.value, recipe())
    assert told is not None and told.where == "MASTER_PORT"
    assert told.what == f"port {here['MASTER_PORT']} of {socket.gethostname()} is taken by another program"
