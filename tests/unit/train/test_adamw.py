"""AdamW with small states, against torch's AdamW, plain arithmetic and the unsharded run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.nn import functional

from packtrain.parallel.state import fill_optimizer_state, training_state
from packtrain.train import adamw
from packtrain.train.adamw import AdamW, dequantise, dynamic_map, quantise, round_nearest, round_stochastic

MINIATURE = Path(adamw.__file__).parent.parent / "data" / "miniatures" / "samsum_mini.train.jsonl"
OPTIONS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors here are small: beside other work on the machine, threads would mostly wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def give_grads(parameters: list[nn.Parameter], step: int) -> None:
    """Gradients that are a function of the step, of each parameter's dtype."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * 1e-2).to(parameter.dtype)


def test_fp32_states_are_torchs() -> None:
    shapes = [(40, 300), (7,), (2, 3, 5)]
    ours, theirs = [[weights(*shape, seed=i) for i, shape in enumerate(shapes)] for _ in range(2)]
    mine = AdamW([{"params": ours[:1]}, {"params": ours[1:], "weight_decay": 0.0, "factor": 3.0}], **OPTIONS)
    torchs = torch.optim.AdamW([{"params": theirs[:1]}, {"params": theirs[1:], "weight_decay": 0.0}], **OPTIONS)
    assert set(torchs.param_groups[0]) > set(mine.param_groups[0]) == {"params", "lr", "betas", "eps", "weight_decay"}
    for step in range(20):
        for parameters, optimizer in ((ours, mine), (theirs, torchs)):
            give_grads(parameters, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert mine.state[a]["step"].equal(torchs.state[b]["step"])


def text_model() -> nn.Module:
    """The next byte from the 8 before it: 82 thousand weights, all matrices quantised."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256)
    )  # fmt: skip


@cache
def text() -> torch.Tensor:
    return torch.frombuffer(bytearray(MINIATURE.read_bytes()), dtype=torch.uint8).long()


def text_batch(step: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.randint(0, len(text()) - 9, (size, 1), generator=torch.Generator().manual_seed(step))
    windows = text()[at + torch.arange(9)]
    return windows[:, :8], windows[:, 8]


@cache
def trained(states: str | None, lr: float) -> tuple[float, torch.Tensor]:
    """60 steps on real text, with torch's optimizer where ``states`` is None: loss, and how far weights went."""
    model = text_model()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    make: Callable[..., Any] = torch.optim.AdamW if states is None else AdamW
    optimizer = make(model.parameters(), lr=lr, **({} if states is None else {"states": states}))
    for step in range(60):
        inputs, targets = text_batch(step)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, targets = text_batch(10**6, 2048)
        loss = functional.cross_entropy(model(inputs), targets).item()
    return loss, nn.utils.parameters_to_vector(model.parameters()).detach() - start


@pytest.mark.parametrize(("states", "bound"), [("bf16", 0.02), ("int8", 0.1)])
def test_small_states_follow_fp32(states: str, bound: float) -> None:
    """The distance to fp32's weights, relative to the way they went.

    bf16 moments are wrong by up to 2^-8 (0.4%) a step, at random. Codes are half a part of their decade wrong, up to 6%
    in the third decade below a block's largest, more below. A change of the learning rate by 10%, which nobody would
    notice, moves weights by 0.1: a bound above that would show nothing, and it is asserted that the yardstick is that.
    """
    loss, moved = trained(None, 3e-3)
    found, went = trained(states, 3e-3)
    other, yardstick = trained(None, 3.3e-3)
    assert (went - moved).norm() / moved.norm() < bound
    assert (yardstick - moved).norm() / moved.norm() > 0.8 * 0.1
    assert abs(found - loss) < abs(other - loss)


def test_a_bf16_second_moment_decays() -> None:
    """Gradients of zero after a large one: beta2 ** 500 of it is left. Rounded to nearest, all of it would be."""
    parameter = weights(64, 64)
    optimizer = AdamW([parameter], lr=0.0, states="bf16")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg_sq"].float().mean()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(500):
        optimizer.step()
    left = optimizer.state[parameter]["exp_avg_sq"].float().mean() / before
    # Each of 500 roundings errs by at most a spacing, 2^-7, at random: less than 0.1 an element, 0.002 over 4096.
    assert abs(left.item() - 0.999**500) < 0.008
    assert torch.tensor(0.001 * 0.999).bfloat16() == torch.tensor(0.001).bfloat16()


def moved(dtype: torch.dtype, rounding: str) -> tuple[float, float]:
    """(mean way against the gradient, share of weights that moved) after 200 steps at 2e-5."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(200, 300, generator=generator) * 0.98 + 0.02
    start = (sizes * (torch.rand(200, 300, generator=generator) - 0.5).sign()).bfloat16().to(dtype)
    slope = torch.randn(200, 300, generator=generator) * 1e-3
    parameter = nn.Parameter(start.clone())
    optimizer = AdamW([parameter], lr=2e-5, weight_decay=0.0, rounding=rounding)  # type: ignore[arg-type]
    for _ in range(200):
        parameter.grad = (slope * (1 + 0.1 * torch.randn(slope.shape, generator=generator))).to(dtype)
        optimizer.step()
    way = (parameter.detach().float() - start.float()) * -slope.sign()
    return way.mean().item(), (parameter != start).float().mean().item()


def test_bf16_weights_move_at_a_small_rate() -> None:
    far, _ = moved(torch.float32, "nearest")
    assert far == pytest.approx(200 * 2e-5, rel=0.05)
    assert moved(torch.bfloat16, "nearest")[1] < 0.1
    # The compensation is bf16 too: steps of 2e-5 are rounded by up to a sixth where it is largest, up or down.
    assert moved(torch.bfloat16, "stochastic")[0] == pytest.approx(far, rel=0.02)
    assert moved(torch.bfloat16, "kahan")[0] == pytest.approx(far, rel=0.04)


def test_stochastic_rounding_keeps_the_mean_and_what_bf16_has() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.full((200_000,), 1 + 0.3 * 2**-7)
    rounded = round_stochastic(value, adamw.random_bits(value, generator)).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    # The share that went up is 0.3 with a deviation of 0.001.
    assert (rounded > 1).float().mean().item() == pytest.approx(0.3, abs=0.005)
    # All bf16 numbers but those that are not a number, with every bit set.
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = exact[~exact.isnan()].float()
    assert round_stochastic(exact, torch.full(exact.shape, 65535, dtype=torch.int32)).equal(exact)
    # What CUDA's arithmetic gives for 0 / 0.
    lost = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)
    assert round_stochastic(lost, torch.full((1,), 65535, dtype=torch.int32)).to(torch.bfloat16).isnan()


def test_rounding_to_nearest_is_torchs() -> None:
    value = torch.cat([weights(10_000).detach(), 1 + torch.arange(9) * 2.0**-8, torch.tensor([3.4e38, torch.inf, 0])])
    assert round_nearest(value).equal(value.bfloat16().float())


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_bitsandbytes(signed: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    torch.testing.assert_close(dynamic_map(signed), bitsandbytes.create_dynamic_map(signed), rtol=1e-6, atol=0)
    assert len(dynamic_map(signed).unique()) == 256
    assert dynamic_map(signed)[adamw.zero_code(signed)] == 0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("last", [256, 512, 300, 5])
def test_codes_are_the_nearest(signed: bool, last: int) -> None:
    values = weights(9, last).detach() * 10 ** torch.linspace(-6, 3, 9).unsqueeze(1)
    values = values if signed else values.square()
    values[0] = 0
    codes, scales = quantise(values, signed)
    assert codes.dtype == torch.uint8 and codes.shape == values.shape
    assert scales.shape == (9, -(-last // 256))
    back = dequantise(codes, scales, signed)
    assert back[0].equal(values[0])
    # The oracle: for each element all 256 values of its block.
    for start in range(0, last, 256):
        block = values[:, start : start + 256]
        largest = block.abs().amax(dim=1, keepdim=True)
        errors = (block.unsqueeze(-1) - largest.unsqueeze(-1) * dynamic_map(signed)).abs().amin(dim=-1)
        found = (block - back[:, start : start + 256]).abs()
        # But for the smallest of a second moment, which may not become zero.
        floor = 0 if signed else dynamic_map(False)[1]
        assert (found <= torch.maximum(errors * 1.0001, largest * floor) + 1e-6 * block.abs()).all()
        # Half a part of the largest decade: 0.9 / 64 / 2 of the largest magnitude, or 0.9 / 128 / 2; -1 is half a part.
        assert (found <= largest * (0.9 / (64 if signed else 128) / 2 * 1.001)).all()


def test_an_outlier_spoils_its_block_only() -> None:
    values = torch.full((2, 512), 1e-4)
    values[0, 3] = 1e6
    back = dequantise(*quantise(values, True), True)
    assert back[0, 3] == 1e6
    assert back[0, 4:256].abs().max() == 0
    torch.testing.assert_close(back[0, 256:], values[0, 256:])
    torch.testing.assert_close(back[1], values[1])
    # A second moment keeps at least the smallest code: steps get small, never huge.
    second = dequantise(*quantise(values, False), False)
    assert (second > 0).all() and second[0, 4] == pytest.approx(3.25e-7 * 1e6)


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_filling_the_state_changes_nothing(states: str, rounding: str) -> None:
    parameters = [weights(40, 300, dtype=torch.bfloat16), weights(7, dtype=torch.bfloat16)]
    before = copy.deepcopy(parameters)
    optimizer = AdamW(parameters, states=states, rounding=rounding, **OPTIONS)  # type: ignore[arg-type]
    fill_optimizer_state(optimizer)
    for old, new in zip(before, parameters, strict=True):
        assert new.equal(old)
        fresh, filled = optimizer._new_state(new), optimizer.state[new]
        assert fresh.keys() == filled.keys()
        for key, value in fresh.items():
            assert value.dtype == filled[key].dtype and value.equal(filled[key]), key


def test_how_states_are_stored() -> None:
    parameters = [weights(40, 300, dtype=torch.bfloat16), weights(8192), weights(8, 500)]
    optimizer = AdamW(parameters, states="int8", rounding="kahan")
    fill_optimizer_state(optimizer)
    packed, vector, small = (optimizer.state[p] for p in parameters)
    assert packed["exp_avg"].dtype == packed["exp_avg_sq"].dtype == torch.uint8
    assert packed["exp_avg_scale"].shape == (40, 2) and packed["exp_avg_scale"].dtype == torch.float32
    assert packed["compensation"].dtype == torch.bfloat16
    for state in (vector, small):
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["exp_avg"].dtype == torch.float32


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (1 << 20, 1000, 1):
        monkeypatch.setitem(adamw.CHUNK, "cpu", elements)
        parameter = weights(3, 20, 300)
        optimizer = AdamW([parameter], states="int8", **OPTIONS)
        for step in range(3):
            give_grads([parameter], step)
            optimizer.step()
        results.append(parameter.detach())
    assert results[0].equal(results[1]) and results[0].equal(results[2])
    assert not results[0].equal(weights(3, 20, 300))


@pytest.mark.parametrize(
    ("states", "rounding"), [("fp32", "stochastic"), ("bf16", "kahan"), ("bf16", "stochastic"), ("int8", "stochastic")]
)
def test_a_resumed_run_is_the_uninterrupted_one(states: str, rounding: str) -> None:
    def run(parameters: list[nn.Parameter], optimizer: AdamW, steps: range) -> None:
        for step in steps:
            give_grads(parameters, step)
            optimizer.step()

    def start(seed: int) -> tuple[list[nn.Parameter], AdamW]:
        parameters = [weights(40, 300, dtype=torch.bfloat16), weights(9, dtype=torch.bfloat16)]
        return parameters, AdamW(parameters, states=states, rounding=rounding, seed=seed, **OPTIONS)  # type: ignore[arg-type]

    random = torch.random.get_rng_state()
    whole, optimizer = start(5)
    run(whole, optimizer, range(6))
    assert torch.random.get_rng_state().equal(random)
    half, first = start(5)
    run(half, first, range(3))
    resumed, second = start(5)
    for parameter, value in zip(resumed, half, strict=True):
        parameter.data.copy_(value.data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(resumed, second, range(3, 6))
    for a, b in zip(whole, resumed, strict=True):
        assert a.equal(b)
        for key, value in optimizer.state[a].items():
            assert value.dtype == second.state[b][key].dtype and value.equal(second.state[b][key]), key
    other, optimizer = start(6)
    run(other, optimizer, range(6))
    assert not whole[0].equal(other[0])


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_compiled_is_the_same_arithmetic(rounding: Any) -> None:
    """But for a few weights that the last bit of fp32 rounds to their other neighbour."""
    parameters = [[weights(33, 301, dtype=torch.bfloat16), weights(9)] for _ in range(2)]
    options: dict[str, Any] = {"states": "bf16", "rounding": rounding, "lr": 1e-4}
    optimizers = [AdamW(parameters[0], **options), AdamW(parameters[1], compiled=True, **options)]
    for step in range(5):
        for p, optimizer in zip(parameters, optimizers, strict=True):
            give_grads(p, step)
            optimizer.step()
    for a, b in zip(*parameters, strict=True):
        assert (a != b).float().mean() < 0.01
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
        assert not a.equal(weights(*a.shape, dtype=a.dtype))
    if rounding == "kahan":
        eager, compiled = (o.state[p[0]]["compensation"].float() for o, p in zip(optimizers, parameters, strict=True))
        assert eager.abs().max() > 1e-4
        assert (eager - compiled).abs().mean() < 0.01 * eager.abs().mean()


@pytest.mark.parametrize(
    "options",
    [{"states": "int4"}, {"rounding": "up"}, {"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -0.1}],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AdamW([weights(3, 3)], **options)


@pytest.mark.parametrize("parameter", [weights(3, 3, dtype=torch.float16), nn.Parameter(torch.ones(3, 4).t())])
def test_bad_parameters(parameter: nn.Parameter) -> None:
    with pytest.raises(ValueError, match="a parameter"):
        AdamW([parameter])


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """An odd number of rows, rows of more than a block, and a last layer with fewer rows than 2 or 4 processes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 33), nn.Tanh(), nn.Linear(33, 150), nn.Tanh(), nn.Linear(150, 1)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """All ranks see the same rows, so that the mean of their gradients is each one's to the bit."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        rows = torch.randn(8, 300, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(rows).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> list[list[float]]:
    from torch.distributed.tensor import DTensor

    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [value.detach().float().flatten().tolist() for value in values]


def sharded(mesh: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, AdamW]:
    from torch.distributed.fsdp import fully_shard

    model = small_model(dtype)
    fully_shard(model, mesh=mesh)
    return model, AdamW(model.parameters(), **OPTIONS, **options)


def fsdp_and_save(world: Any, folder: str) -> dict[str, Any]:
    """Train on 2 processes, save after 3 steps, go on to 6; and the same without sharding."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world.size,))
    alone = small_model()
    train(alone, AdamW(alone.parameters(), states="int8", **OPTIONS), range(6))
    model, optimizer = sharded(mesh, states="int8")
    train(model, optimizer, range(3))
    save(training_state(list(model.named_parameters()), optimizer), checkpoint_id=folder)
    train(model, optimizer, range(3, 6))
    last = list(model.parameters())[-2]
    columns = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match="sharded on dim 0"):
        AdamW([columns])
    states = optimizer.state[next(model.parameters())]
    return {
        "alone": whole(alone),
        "sharded": whole(model),
        "local_rows": last.to_local().shape[0],
        "steps": optimizer.state[last]["step"].item(),
        "shapes": {key: tuple(value.shape) for key, value in states.items()},
        "held": {key: tuple(value.to_local().shape) for key, value in states.items() if key != "step"},
    }


def load_and_go_on(world: Any, folder: str) -> list[list[float]]:
    from torch.distributed.device_mesh import init_device_mesh

    model, optimizer = sharded(init_device_mesh("cpu", (world.size,)), states="int8")
    load(training_state(list(model.named_parameters()), optimizer), checkpoint_id=folder)
    train(model, optimizer, range(3, 6))
    return whole(model)


def replicas(world: Any, folder: str) -> dict[str, Any]:
    """On 4 processes: what each holds of an HSDP run with stochastic rounding, and the resumed run of 2 processes."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = sharded(mesh, torch.bfloat16, states="bf16", rounding="stochastic")
    train(model, optimizer, range(4))
    held = [p.to_local().float().flatten().tolist() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg_sq"].to_local().float().flatten().tolist() for p in model.parameters()]
    return {"held": held, "moments": moments, "resumed": load_and_go_on(world, folder)}


def test_sharded_runs(tmp_path: Path) -> None:
    """One folder and three worlds: starting processes costs more than what they do."""
    folder = str(tmp_path / "saved")
    first, second = run_ranks(2, fsdp_and_save, folder)
    assert first["sharded"] == first["alone"] == second["sharded"]
    assert first["sharded"] != whole(small_model())
    assert (first["local_rows"], second["local_rows"]) == (1, 0)
    assert first["steps"] == second["steps"] == 6
    assert first["shapes"]["exp_avg"] == (33, 300) and first["shapes"]["exp_avg_scale"] == (33, 2)
    assert (first["held"]["exp_avg_scale"], second["held"]["exp_avg_scale"]) == ((17, 2), (16, 2))

    assert run_ranks(1, load_and_go_on, folder)[0] == first["sharded"]

    ranks = run_ranks(4, replicas, folder)
    assert all(rank["resumed"] == first["sharded"] for rank in ranks)
    for key in ("held", "moments"):
        assert ranks[0][key] == ranks[2][key] and ranks[1][key] == ranks[3][key]
    assert ranks[0]["held"] != ranks[1]["held"]
