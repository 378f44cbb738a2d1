"""AdamW whose states and weights take less memory: bf16 or 8-bit moments, and bf16 weights that still move.

Decoupled weight decay (https://arxiv.org/abs/1711.05101). All arithmetic is fp32, a chunk of rows at a time, on what
this process holds of each parameter; nothing is communicated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from packtrain.models.weights import local_slices, local_tensor, placed_like

States = Literal["fp32", "bf16", "int8"]
Rounding = Literal["nearest", "stochastic", "kahan"]

BLOCK = 256
"""Elements of a row that share a scale in 8-bit states."""
MIN_QUANTISED = 4096
"""Parameters with fewer elements keep fp32 states: they are norms and small heads, and save nothing."""
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 20}
"""Elements whose fp32 temporaries exist at once: enough to fill a GPU, few enough for a processor's caches."""

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The states of Adam, and whether they have a sign."""


class AdamW(torch.optim.Optimizer):
    """AdamW with a choice of how its states are stored and how bf16 parameters are rounded.

    Parameters are fp32 or bf16, plain or DTensors sharded on dim 0 (or replicated); every state but ``step`` has the
    parameter's mesh and placements. Groups have the keys of ``torch.optim.AdamW``; other keys are left alone.

    State of a parameter:
        step: 0-dim fp32 on the CPU.
        exp_avg, exp_avg_sq: the parameter's shape; fp32, bf16, or uint8 codes (see ``quantise``).
        exp_avg_scale, exp_avg_sq_scale: with uint8 codes, fp32 (rows..., ceil(last / 256)).
        compensation: with ``rounding="kahan"`` and a bf16 parameter, bf16 of its shape.

    Args:
        states: how the moments are stored. ``int8`` leaves parameters with fewer than 2 dims or 4096 elements in fp32.
            Codes are rounded to nearest, so a second moment that changes slowly stays a fixed share of its block's
            largest until its gradients have changed several times over.
        rounding: how a bf16 parameter takes its update; an fp32 parameter needs none. ``kahan`` has 16 bits in all:
            steps below about 2^-18 of a weight are lost, where ``stochastic`` takes them in the mean.
        seed: of the rounding. Draws depend on (seed, step, index of the parameter, first row this process holds) only:
            replicas round alike, a resumed run rounds as the uninterrupted one, and torch's own random state stays.
        compiled: compile the elementwise arithmetic of a chunk.

    Raises:
        ValueError: a setting is out of range, or a parameter has another dtype, sharding or memory layout.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        states: States = "fp32",
        rounding: Rounding = "nearest",
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        _check_choice("states", states, get_args(States))
        _check_choice("rounding", rounding, get_args(Rounding))
        self._states, self._rounding, self._seed = states, rounding, seed
        # One graph for all lengths; chunks come to it flat.
        self._update: Callable[..., None] = torch.compile(update, dynamic=True) if compiled else update
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])
        for parameter in self.param_groups[-1]["params"]:
            _check_parameter(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep the dtype they were saved in: torch would cast codes to the weight's."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, (_, parameter) in zip(saved, self._parameters(), strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                device = value.device if key == "step" else parameter.device
                self.state[parameter][key] = value.detach().to(device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared: dict[Any, Scalars] = {}
        for index, (group, parameter) in enumerate(self._parameters()):
            if parameter.grad is not None:
                self._step_parameter(index, group, parameter, shared)
        return loss

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """(group, parameter) in the order given."""
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _step_parameter(
        self, index: int, group: dict[str, Any], parameter: torch.Tensor, shared: dict[Any, Scalars]
    ) -> None:
        """``shared``: scalars that exist on the device already, as most parameters need the same."""
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        held = local_tensor(parameter)
        if held.numel() == 0:
            return
        step = int(state["step"].item())
        key = (step, held.device, float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"])
        if key not in shared:
            shared[key] = make_scalars(*key)
        generator = self._generator(step, index, parameter)
        tensors = {name: as_rows(value) for name, value in state.items() if name != "step"}
        tensors |= {"parameter": as_rows(parameter), "grad": as_rows(parameter.grad)}  # type: ignore[arg-type]
        for rows in row_chunks(tensors["parameter"]):
            self._step_chunk({name: value[rows] for name, value in tensors.items()}, generator, shared[key])

    def _step_chunk(self, chunk: dict[str, torch.Tensor], generator: torch.Generator, scalars: Scalars) -> None:
        """Update a chunk in place. ``chunk``: by name, (rows, last) of everything; scales (rows, blocks)."""
        packed = [name for name in MOMENTS if f"{name}_scale" in chunk]
        flat = {name: value.reshape(-1) for name, value in chunk.items()}
        for name in packed:
            flat[name] = dequantise(chunk[name], chunk[f"{name}_scale"], MOMENTS[name]).view(-1)
        rounded = [name for name in MOMENTS if flat[name].dtype == torch.bfloat16]
        if self._rounding == "stochastic" and chunk["parameter"].dtype == torch.bfloat16:
            rounded.append("parameter")
        bits = {name: random_bits(flat[name], generator) for name in rounded}
        moments = [flat[name] for name in MOMENTS]
        self._update(flat["parameter"], flat["grad"], *moments, flat.get("compensation"), bits, scalars)
        for name in packed:
            codes, scales = quantise(flat[name].view(chunk[name].shape), MOMENTS[name])
            chunk[name].copy_(codes)
            chunk[f"{name}_scale"].copy_(scales)

    def _generator(self, step: int, index: int, parameter: torch.Tensor) -> torch.Generator:
        first = local_slices(parameter)[0].start if parameter.ndim else 0
        # Hashed, since neighbouring seeds of torch's generators are not promised to give unrelated streams.
        text = f"{self._seed} {step} {index} {first}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        return torch.Generator(device=parameter.device).manual_seed(number)

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32)}
        packed = self._states == "int8" and parameter.ndim >= 2 and parameter.numel() >= MIN_QUANTISED
        dtype = torch.bfloat16 if self._states == "bf16" else torch.float32
        for name, signed in MOMENTS.items():
            if packed:
                last = parameter.shape[-1]
                state[name] = new_like(parameter, last, torch.uint8, zero_code(signed))
                state[f"{name}_scale"] = new_like(parameter, math.ceil(last / BLOCK), torch.float32)
            else:
                state[name] = new_like(parameter, None, dtype)
        if self._rounding == "kahan" and parameter.dtype == torch.bfloat16:
            state["compensation"] = new_like(parameter, None, torch.bfloat16)
        return state


class Scalars(NamedTuple):
    """The numbers of a step as 0-dim fp32 tensors on the parameter's device: as floats each would compile anew."""

    keep: torch.Tensor
    """1 - learning rate × weight decay"""
    beta1: torch.Tensor
    rest1: torch.Tensor
    beta2: torch.Tensor
    rest2: torch.Tensor
    root: torch.Tensor
    """Square root of the second moment's bias correction."""
    eps: torch.Tensor
    rate: torch.Tensor
    """Learning rate over the first moment's bias correction."""


def make_scalars(
    step: int, device: torch.device, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Scalars:
    beta1, beta2 = betas
    root, rate = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    values = (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, root, eps, rate)
    # full() is a kernel; tensor() would copy from the host and wait for it.
    return Scalars(*(torch.full((), value, dtype=torch.float32, device=device) for value in values))


def update(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compensation: torch.Tensor | None,
    bits: dict[str, torch.Tensor],
    scalars: Scalars,
) -> None:
    """One step of AdamW in place; all tensors (n,). ``bits``: of what is rounded stochastically, by name.

    Products and sums are separate operations and not lerp or addcmul, which may fuse them at some positions of a tensor
    and not at others: so an element's result does not depend on where its shard begins.
    """
    gradient = grad.float()
    first = exp_avg.float() * scalars.beta1 + gradient * scalars.rest1
    second = exp_avg_sq.float() * scalars.beta2 + gradient * gradient * scalars.rest2
    change = first / (second.sqrt() / scalars.root + scalars.eps) * scalars.rate
    value = parameter.float() * scalars.keep - change
    # With beta2 0.999 a step moves the second moment by about 0.1%, less than half of bf16's spacing (0.4% to 0.8%):
    # rounded to nearest it would stay where it is for ever. So bf16 moments are rounded stochastically.
    store(exp_avg, first, bits.get("exp_avg"))
    store(exp_avg_sq, second, bits.get("exp_avg_sq"))
    if compensation is None:
        store(parameter, value, bits.get("parameter"))
    else:
        store_compensated(parameter, compensation, value)


def store(target: torch.Tensor, value: torch.Tensor, bits: torch.Tensor | None) -> None:
    """Copy fp32 values into ``target``: rounded to nearest, or stochastically to bf16 where there are bits."""
    target.copy_(value if bits is None else round_stochastic(value, bits))


def store_compensated(parameter: torch.Tensor, compensation: torch.Tensor, value: torch.Tensor) -> None:
    """Kahan summation: what rounding the weight loses is kept, and added at the next step.

    Source: https://arxiv.org/abs/2010.06192
    """
    wanted = value + compensation.float()
    rounded = round_nearest(wanted)
    parameter.copy_(rounded)
    compensation.copy_(wanted - rounded)


def round_stochastic(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 values to fp32 values that bf16 has, up or down with probabilities that keep the mean.

    Source: https://arxiv.org/abs/2010.06192. The low 16 bits of fp32 are what bf16 lacks: adding 16 random bits carries
    into the kept ones as often as the dropped fraction says, and never where that fraction is 0.

    Args:
        value: fp32.
        bits: int32 from 0 to 65535, of the same shape.
    """
    return _keep_upper(value, bits)


def round_nearest(value: torch.Tensor) -> torch.Tensor:
    """fp32 values to the nearest fp32 values that bf16 has, ties to even.

    Not by casting there and back: the compiler takes such a pair of casts away, and the difference would be 0.
    """
    return _keep_upper(value, 0x7FFF + ((value.view(torch.int32) >> 16) & 1))


def _keep_upper(value: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Add to the fp32 bits, then clear the lower 16."""
    rounded = ((value.view(torch.int32) + added) & -65536).view(torch.float32)
    # The carry would turn some of the bit patterns that are not a number (CUDA's among them) into -0.
    return torch.where(value.isfinite(), rounded, value)


def random_bits(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """16 random bits for each element, in int32."""
    return torch.randint(0, 1 << 16, like.shape, dtype=torch.int32, device=like.device, generator=generator)


def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 values of 8-bit dynamic quantisation, fp32 (256,), ascending, in [-1, 1] or [0, 1].

    Source: https://arxiv.org/abs/2110.02861, section 2. Zero bits before an indicator bit choose one of 7 powers of
    ten; the bits after it divide that decade evenly (more of them for larger values), and a value is the middle of its
    part. The two codes left over are 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        parts = 2 ** (exponent + (0 if signed else 1))
        width = 0.9 / parts
        middles = [10.0 ** (exponent - 6) * (0.1 + width * (part + 0.5)) for part in range(parts)]
        values += middles
        values += [-middle for middle in middles] if signed else []
    return torch.tensor(sorted(values), dtype=torch.float32)


_MAPS: dict[tuple[bool, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The map, fp32 (256,), and the borders between its codes, fp32 (255,), on the device."""
    if (signed, device) not in _MAPS:
        values = dynamic_map(signed)
        borders = (values[:-1] + values[1:]) / 2
        if not signed:
            # A second moment that is not zero must not become zero: the next step would divide by eps alone.
            borders[0] = 0.0
        _MAPS[signed, device] = values.to(device), borders.to(device)
    return _MAPS[signed, device]


def zero_code(signed: bool) -> int:
    """The code of 0."""
    return int((dynamic_map(signed) == 0).nonzero().item())


def quantise(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-wise dynamic 8-bit quantisation along rows, to the nearest code.

    Source: https://arxiv.org/abs/2110.02861. Blocks never straddle rows, so it does not matter who holds which rows.

    Args:
        values: fp32 (rows, last); not negative where ``signed`` is false.

    Returns:
        Codes, uint8 (rows, last), and the largest magnitude of each block, fp32 (rows, ceil(last / 256)).
    """
    rows, last = values.shape
    _, borders = _tables(signed, values.device)
    padded = functional.pad(values, (0, -last % BLOCK)) if last % BLOCK else values
    blocks = padded.view(rows, -1, BLOCK)
    scales = blocks.abs().amax(dim=-1)
    # A block of zeros has scale 0: divided by 1 instead, it stays zero.
    relative = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    codes = torch.bucketize(relative, borders, out_int32=True).to(torch.uint8)
    return codes.view(rows, -1)[:, :last], scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 values (rows, last) of what ``quantise`` returned, in memory of their own."""
    values, _ = _tables(signed, codes.device)
    relative = values.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return relative.mul_(scales.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]])


def new_like(parameter: torch.Tensor, last: int | None, dtype: torch.dtype, value: float = 0) -> torch.Tensor:
    """A state filled with ``value``: of the parameter's shape but for its last dim, and of its device and sharding."""
    shape, held = list(parameter.shape), list(local_tensor(parameter).shape)
    if last is not None:
        shape[-1] = held[-1] = last
    local = torch.full(held, value, dtype=dtype, device=parameter.device)
    return placed_like(parameter, local, torch.Size(shape))


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The memory this process holds of a tensor as (rows, last); a vector is one row."""
    held = local_tensor(tensor)
    # A gradient may be laid out in another way than its parameter; all that is written to is contiguous.
    return held.contiguous().view(-1, held.shape[-1]) if held.ndim > 1 else held.view(1, -1)


def row_chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of rows with at most ``CHUNK`` elements, or one row."""
    count = max(1, CHUNK[rows.device.type] // rows.shape[1])
    return (slice(start, start + count) for start in range(0, rows.shape[0], count))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")


def _check_group(group: dict[str, Any]) -> None:
    if not group["lr"] >= 0:
        raise ValueError(f"lr is {group['lr']}: it must be 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas are {group['betas']}: each must be at least 0 and less than 1")
    if not group["eps"] > 0:
        raise ValueError(f"eps is {group['eps']}: it must be more than 0, as a gradient may be 0")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay is {group['weight_decay']}: it must be 0 or more")


def _check_parameter(parameter: torch.Tensor) -> None:
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"a parameter is {parameter.dtype}: it must be float32 or bfloat16")
    if not local_tensor(parameter).is_contiguous():
        raise ValueError(f"a parameter of shape {list(parameter.shape)} is not contiguous")
    if isinstance(parameter, DTensor):
        wrong = [p for p in parameter.placements if not (p.is_replicate() or p.is_shard(0))]
        if wrong:
            raise ValueError(f"a parameter is placed as {wrong[0]}: it must be replicated or sharded on dim 0")
