"""A DeepSpeed JSON of the user's, taken apart: each setting has one owner.

What a recipe can say is moved into it, where the two agree. What only DeepSpeed knows (buckets, prefetch, overlap)
stays in ``parallel.deepspeed_config``. What neither knows is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from packtrain.config.load import expected, read_text
from packtrain.config.schema import Recipe, Section
from packtrain.errors import UserError, nearest

Json = dict[str, Any]

# What DeepSpeed alone decides, handed on as it is given: each setting and the kind of its value.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "off": ("false", lambda value: value is False),  # known, and not tested with anything else
    "size": ("a whole number from 1 on", lambda value: _is_whole(value) and value >= 1),
    "even": ("an even number from 2 on", lambda value: _is_whole(value) and value >= 2 and int(value) % 2 == 0),
    "whole": ("a whole number from 0 on", lambda value: _is_whole(value) and value >= 0),
    "number": ("a number from 0 on", lambda value: _is_number(value) and value >= 0),
    "dtype": ("fp32, fp16 or bf16", lambda value: value in ("fp32", "fp16", "bf16")),
}
_ZERO = {
    **dict.fromkeys((
        "allgather_partitions", "overlap_comm", "reduce_scatter", "contiguous_gradients", "round_robin_gradients",
        "stage3_gather_16bit_weights_on_model_save", "memory_efficient_linear", "use_multi_rank_bucket_allreduce",
        "ignore_unused_parameters", "log_trace_cache_warnings", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
    ), "flag"),
    **dict.fromkeys(("reduce_bucket_size", "sub_group_size"), "size"),
    "allgather_bucket_size": "even",
    **dict.fromkeys((
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    ), "whole"),
}  # fmt: skip
_OFFLOADS = {
    "offload_optimizer": {
        "pin_memory": "flag", "buffer_count": "size", "pipeline_read": "off", "pipeline_write": "off",
        "fast_init": "off",
    },
    "offload_param": {"pin_memory": "flag", "buffer_count": "size", "buffer_size": "size", "max_in_cpu": "whole"},
}  # fmt: skip
_LOSS_SCALE = {
    "loss_scale": "number", "loss_scale_window": "size", "initial_scale_power": "whole", "hysteresis": "size",
    "min_loss_scale": "size", "consecutive_hysteresis": "flag",
}  # fmt: skip
_AIO = {
    "block_size": "size", "queue_depth": "size", "intra_op_parallelism": "size", "single_submit": "flag",
    "overlap_events": "flag",
}  # fmt: skip
_HANDED_ON = {
    **dict.fromkeys((
        "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer", "memory_breakdown",
    ), "flag"),
    "steps_per_print": "size", "prescale_gradients": "off", "communication_data_type": "dtype",
}  # fmt: skip
_OWNED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "optimizer", "scheduler", "zero_optimization", "aio",
)  # fmt: skip
_ELSEWHERE = {
    "activation_checkpointing": "parallel.recompute", "amp": "train.precision", "torch_autocast": "train.precision",
    "tensorboard": "log.to", "wandb": "log.to", "csv_monitor": "log.to", "flops_profiler": "log.every",
}  # fmt: skip


def adopt(recipe: Recipe, processes: int) -> Recipe:
    """A copy of ``recipe`` that says itself what its DeepSpeed JSON says, as far as a recipe can.

    Args:
        processes: over all nodes.

    Raises:
        UserError: the file cannot be read, knows a key that is not handed on, or contradicts the recipe.
    """
    given = recipe.parallel.deepspeed_config
    if given is None or recipe.parallel.strategy not in ("auto", "deepspeed"):
        return recipe
    recipe = recipe.model_copy(deep=True)
    name, values = _read(given)
    if recipe.parallel.strategy == "auto":
        recipe.parallel.strategy = "deepspeed"
    recipe.parallel.deepspeed_config = _Adoption(recipe, name, values, processes).run()
    return recipe


def _read(given: str | Json) -> tuple[str, Json]:
    """What a message calls the JSON, and the JSON."""
    if isinstance(given, dict):
        return "parallel.deepspeed_config", given
    path = Path(given).expanduser()
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), f"not valid JSON: {error}", "mend the file") from None
    if not isinstance(values, dict):
        raise UserError(str(path), f"a DeepSpeed JSON is an object, this is a {type(values).__name__}", "mend the file")
    return str(path), values


@dataclass
class _Adoption:
    """The walk through one DeepSpeed JSON."""

    recipe: Recipe
    name: str
    values: Json
    processes: int

    def run(self) -> Json:
        """Take what the recipe owns; what is left over."""
        zero = self._object("zero_optimization")
        self._known_keys(zero)
        self._take("zero_optimization.stage", zero.get("stage"), "parallel", "zero_stage")
        clipping = self.values.get("gradient_clipping")
        self._take("gradient_clipping", clipping, "train", "max_grad_norm", lambda value: value or None)
        self._batches()
        self._precision()
        self._offload(zero)
        self._optimizer()
        self._scheduler()
        left = _given(self.values, _HANDED_ON)
        left["zero_optimization"] = _given(zero, _ZERO)
        for part, kinds in _OFFLOADS.items():
            if extra := _given(zero.get(part) or {}, kinds):
                left["zero_optimization"][part] = extra
        for part, kinds in (("fp16", _LOSS_SCALE), ("aio", _AIO)):
            if extra := _given(self._object(part), kinds):
                left[part] = extra
        return left

    def _object(self, key: str) -> Json:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, f"is {value!r}", "give an object")
        return value or {}

    def _params(self, section: str) -> Json:
        self._check(f"{section}.", self._object(section), {}, ("type", "params"))
        params = self._object(section).get("params")
        if params is not None and not isinstance(params, dict):
            raise self._wrong(f"{section}.params", f"is {params!r}", "give an object")
        return params or {}

    def _wrong(self, key: str, what: str, mend: str) -> UserError:
        return UserError(f"{self.name}: {key}", what, mend)

    def _known_keys(self, zero: Json) -> None:
        """Every key is known, and what is handed on has a value of its kind."""
        for key in self.values:
            if key in _ELSEWHERE:
                raise self._wrong(key, "is decided by the recipe", f"remove it and set {_ELSEWHERE[key]}")
        self._check("", self.values, _HANDED_ON, _OWNED)
        self._check("zero_optimization.", zero, _ZERO, ("stage", "offload_optimizer", "offload_param"))
        for part, kinds in _OFFLOADS.items():
            place = zero.get(part)
            if place is not None and not isinstance(place, dict):
                raise self._wrong(f"zero_optimization.{part}", f"is {place!r}", "give an object with a device")
            self._check(f"zero_optimization.{part}.", place or {}, kinds, ("device", "nvme_path"))
        self._check("fp16.", self._object("fp16"), _LOSS_SCALE | {"enabled": "flag"}, ("auto_cast",))
        self._check("bf16.", self._object("bf16"), {"enabled": "flag"})
        self._check("aio.", self._object("aio"), _AIO)

    def _check(self, where: str, values: Json, kinds: dict[str, str], others: tuple[str, ...] = ()) -> None:
        for key, value in values.items():
            self._known(where + key, key, {*kinds, *others})
            if key not in kinds or value is None or value == "auto":
                continue
            expected_words, fits = _KINDS[kinds[key]]
            if not fits(value):
                raise self._wrong(where + key, f"is {value!r}", f"give {expected_words}, or auto")

    def _known(self, where: str, key: str, known: set[str]) -> None:
        if key not in known:
            guess = nearest(key, known)
            mend = f"did you mean '{guess}'" if guess else "remove it"
            raise self._wrong(where, "is not a setting that Packtrain hands on to DeepSpeed", mend)

    def _take(
        self, where: str, value: Any, section_name: str, field: str, convert: Callable[[Any], Any] = lambda v: v
    ) -> None:
        """Move one value into the recipe, unless the recipe says something else itself."""
        if value is None or value == "auto":
            return
        if isinstance(value, bool | list | dict):
            raise self._wrong(where, f"is {value!r}", "give a number, or auto")
        section: Section = getattr(self.recipe, section_name)
        wanted, own = convert(value), getattr(section, field)
        if field in section.model_fields_set and own not in (wanted, "auto"):
            what = f"is {value!r}, but {section_name}.{field} is {own!r}"
            raise self._wrong(where, what, "set it to auto, or remove one of the two")
        try:
            setattr(section, field, wanted)
        except ValidationError as error:
            raise self._wrong(where, f"is {value!r}", f"give {expected(error)}") from None

    def _batches(self) -> None:
        micro: Any = self.values.get("train_micro_batch_size_per_gpu")
        rounds: Any = self.values.get("gradient_accumulation_steps")
        batch = self.values.get("train_batch_size")
        self._take("train_micro_batch_size_per_gpu", micro, "train", "micro_batch_size")
        self._take("train_batch_size", batch, "train", "batch_size")
        given = [value not in (None, "auto") for value in (micro, rounds)]
        if given[1] and (not _is_whole(rounds) or rounds < 1):
            raise self._wrong("gradient_accumulation_steps", f"is {rounds!r}", "give a number from 1 on, or auto")
        train = self.recipe.train
        own: Any = train.micro_batch_size
        if any(given) and batch in (None, "auto") and "batch_size" not in train.model_fields_set:
            step = self.processes * (int(rounds) if given[1] else 1) * (own if own != "auto" else 1)
            # DeepSpeed's own meaning, where the file says how many rows: else about as many as the recipe would take.
            train.batch_size = step if own != "auto" else step * math.ceil(train.batch_size / step)
        if not given[1]:
            return
        if train.micro_batch_size == "auto":
            train.micro_batch_size = max(math.ceil(math.ceil(train.batch_size / self.processes) / rounds), 1)
        made = train.micro_batches(self.processes)
        if made != rounds:
            what = (
                f"is {rounds}, but train.batch_size {train.batch_size} on {self.processes} processes in "
                f"micro-batches of {train.micro_batch_size} makes {made}"
            )
            raise self._wrong("gradient_accumulation_steps", what, "set it to auto")

    def _precision(self) -> None:
        enabled = {kind: self._object(kind).get("enabled", "absent") for kind in ("bf16", "fp16")}
        on = [kind for kind, value in enabled.items() if value is True]
        if len(on) == 2:
            raise self._wrong("bf16.enabled", "and fp16.enabled are both true", "keep one")
        possible = on or ["fp32", *(kind for kind, value in enabled.items() if value is not False)]
        own = self.recipe.train.precision
        if own == "auto":
            if on or "bf16" not in possible:
                self.recipe.train.precision = on[0] if on else "fp32"  # type: ignore[assignment]
        elif own not in possible:
            kind = on[0] if on else own
            what = f"is {str(bool(on)).lower()}, but train.precision is {own!r}"
            raise self._wrong(f"{kind}.enabled", what, "set it to auto, or remove one of the two")

    def _offload(self, zero: Json) -> None:
        parallel = self.recipe.parallel
        optimizer, params = (self._device(zero, part) for part in ("offload_optimizer", "offload_param"))
        if optimizer is None and params is None:
            return
        where = "zero_optimization.offload_optimizer.device"
        devices = f"is {optimizer or 'not given'}, with offload_param.device {params or 'not given'}"
        if optimizer == "none" and params == "cpu":
            raise self._wrong(where, devices, "set it to cpu: parameters are never offloaded alone")
        if params == "cpu":
            possible = ["params"]
        elif optimizer in ("cpu", "nvme"):
            possible = ["optimizer"] if params else ["optimizer", "params"]
        else:
            possible = ["none"] if optimizer else ["none", "optimizer"]
        if "offload" not in parallel.model_fields_set:
            parallel.offload = possible[0]  # type: ignore[assignment]
        elif parallel.offload not in possible:
            what = f"{devices}, but parallel.offload is {parallel.offload!r}"
            raise self._wrong(where, what, "remove one of the two")
        self._disk(zero, optimizer)

    def _device(self, zero: Json, part: str) -> str | None:
        """Where a part of the file offloads to; None: it does not say."""
        device = (zero.get(part) or {}).get("device")
        where = f"zero_optimization.{part}.device"
        if part == "offload_param" and device == "nvme":
            what = "is 'nvme', and DeepSpeed runs out of buffers when it swaps parameters to a disk"
            raise self._wrong(where, what, "set it to cpu or none")
        if device not in (None, "none", "cpu", "nvme"):
            raise self._wrong(where, f"is {device!r}", "give none, cpu or nvme")
        return device

    def _disk(self, zero: Json, optimizer: str | None) -> None:
        own = self.recipe.parallel.offload_dir
        if optimizer == "cpu" and own:
            what = f"is 'cpu', but parallel.offload_dir is {own!r}"
            raise self._wrong("zero_optimization.offload_optimizer.device", what, "remove one of the two")
        if optimizer == "nvme":
            where = "zero_optimization.offload_optimizer.nvme_path"
            folder = zero["offload_optimizer"].get("nvme_path")
            if not isinstance(folder, str) or folder in ("", "auto") or "\0" in folder:
                raise self._wrong(where, f"is {folder!r}", "give a folder on an NVMe disk")
            self._take(where, folder, "parallel", "offload_dir")

    def _optimizer(self) -> None:
        found = self._object("optimizer")
        if not found:
            return
        kind, params = found.get("type"), self._params("optimizer")
        if kind not in ("AdamW", "Adam") or params.get("adam_w_mode") is False:
            raise self._wrong("optimizer.type", f"is {kind!r}, and Packtrain trains with AdamW", "set it to AdamW")
        fields = {"lr": "learning_rate", "eps": "epsilon", "weight_decay": "weight_decay"}
        for key, value in params.items():
            self._known(f"optimizer.params.{key}", key, {*fields, "betas", "torch_adam", "adam_w_mode"})
            if key in fields:
                self._take(f"optimizer.params.{key}", value, "train", fields[key])
        betas = params.get("betas", "auto")
        if betas != "auto":
            if not isinstance(betas, list) or len(betas) != 2:
                raise self._wrong("optimizer.params.betas", f"is {betas!r}", "give two numbers")
            for field, value in zip(("beta1", "beta2"), betas, strict=True):
                self._take("optimizer.params.betas", value, "train", field)

    def _scheduler(self) -> None:
        params = self._params("scheduler")
        literal = [key for key, value in params.items() if value != "auto"]
        if literal:
            what = f"is {params[literal[0]]!r}, and the schedule is the recipe's"
            mend = "remove scheduler, and set train.schedule and train.warmup"
            raise self._wrong(f"scheduler.params.{literal[0]}", what, mend)


def _given(values: Json, kinds: dict[str, str]) -> Json:
    """What a file says itself of the settings of these kinds."""
    return {key: value for key, value in values.items() if key in kinds and value not in (None, "auto")}


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value) and abs(value) < 2**62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
