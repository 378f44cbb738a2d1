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

from packtrain.config.load import read_text
from packtrain.config.schema import Recipe, Section
from packtrain.errors import UserError, nearest

Json = dict[str, Any]

# What DeepSpeed alone decides, handed on as it is given.
_FLAGS = frozenset({
    "allgather_partitions", "overlap_comm", "reduce_scatter", "contiguous_gradients", "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save", "memory_efficient_linear", "use_multi_rank_bucket_allreduce",
    "ignore_unused_parameters", "log_trace_cache_warnings", "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
})  # fmt: skip
_SIZES = frozenset({
    "allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
})  # fmt: skip
_OFFLOAD = frozenset({"pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write"})
_LOSS_SCALE = frozenset({
    "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale", "consecutive_hysteresis",
})  # fmt: skip
_HANDED_ON = frozenset({
    "steps_per_print", "wall_clock_breakdown", "dump_state", "prescale_gradients", "gradient_predivide_factor",
    "communication_data_type", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio",
    "memory_breakdown", "comms_logger",
})  # fmt: skip
_OWNED = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "optimizer", "scheduler", "zero_optimization",
})  # fmt: skip
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
    if given is None:
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
    except ValueError as error:
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
        left: Json = {key: value for key, value in self.values.items() if key in _HANDED_ON and value != "auto"}
        left["zero_optimization"] = {key: zero[key] for key in zero if key in _FLAGS | _SIZES and zero[key] != "auto"}
        for part in ("offload_optimizer", "offload_param"):
            extra = {key: v for key, v in (zero.get(part) or {}).items() if key in _OFFLOAD and v != "auto"}
            if extra:
                left["zero_optimization"][part] = extra
        scaling = {key: v for key, v in self._object("fp16").items() if key in _LOSS_SCALE and v != "auto"}
        return left | ({"fp16": scaling} if scaling else {})

    def _object(self, key: str) -> Json:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self._wrong(key, f"is {value!r}", "give an object")
        return value

    def _wrong(self, key: str, what: str, mend: str) -> UserError:
        return UserError(f"{self.name}: {key}", what, mend)

    def _known_keys(self, zero: Json) -> None:
        own = _FLAGS | _SIZES | {"stage", "offload_optimizer", "offload_param"}
        for key in self.values:
            if key in _ELSEWHERE:
                raise self._wrong(key, "is decided by the recipe", f"remove it and set {_ELSEWHERE[key]}")
            self._known(key, key, _HANDED_ON | _OWNED)
        for key, value in zero.items():
            where = f"zero_optimization.{key}"
            self._known(where, key, own)
            if key in _FLAGS and value not in (True, False, "auto"):
                raise self._wrong(where, f"is {value!r}", "give true, false or auto")
            if key in _SIZES and value != "auto" and (not _is_number(value) or value < 0):
                raise self._wrong(where, f"is {value!r}", "give a number from 0 on, or auto")
        for part in ("offload_optimizer", "offload_param"):
            if not isinstance(zero.get(part, {}) or {}, dict):
                raise self._wrong(f"zero_optimization.{part}", f"is {zero[part]!r}", "give an object with a device")
            for key in zero.get(part) or {}:
                self._known(f"zero_optimization.{part}.{key}", key, _OFFLOAD | {"device", "nvme_path"})
        for key in self._object("fp16"):
            self._known(f"fp16.{key}", key, _LOSS_SCALE | {"enabled", "auto_cast"})
        for key in self._object("bf16"):
            self._known(f"bf16.{key}", key, frozenset({"enabled"}))

    def _known(self, where: str, key: str, known: frozenset[str] | set[str]) -> None:
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
        section: Section = getattr(self.recipe, section_name)
        wanted, own = convert(value), getattr(section, field)
        if field in section.model_fields_set and own not in (wanted, "auto"):
            what = f"is {value!r}, but {section_name}.{field} is {own!r}"
            raise self._wrong(where, what, "set it to auto, or remove one of the two")
        try:
            setattr(section, field, wanted)
        except ValidationError as error:
            raise self._wrong(where, f"is {value!r}", error.errors()[0]["msg"].lower()) from None

    def _batches(self) -> None:
        micro: Any = self.values.get("train_micro_batch_size_per_gpu")
        rounds: Any = self.values.get("gradient_accumulation_steps")
        batch = self.values.get("train_batch_size")
        self._take("train_micro_batch_size_per_gpu", micro, "train", "micro_batch_size")
        self._take("train_batch_size", batch, "train", "batch_size")
        if rounds in (None, "auto"):
            return
        if not _is_number(rounds) or rounds < 1:
            raise self._wrong("gradient_accumulation_steps", f"is {rounds!r}", "give a number from 1 on, or auto")
        if _is_number(micro) and not _is_number(batch) and "batch_size" not in self.recipe.train.model_fields_set:
            self.recipe.train.batch_size = int(micro * rounds * self.processes)
        rows = math.ceil(self.recipe.train.batch_size / self.processes)
        if self.recipe.train.micro_batch_size == "auto":
            self.recipe.train.micro_batch_size = max(math.ceil(rows / rounds), 1)
        found: Any = self.recipe.train.micro_batch_size
        made = math.ceil(rows / found)
        if made != rounds:
            what = (
                f"is {rounds}, but train.batch_size {self.recipe.train.batch_size} on {self.processes} processes in "
                f"micro-batches of {found} makes {made}"
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
        optimizer, params = ((zero.get(part) or {}) for part in ("offload_optimizer", "offload_param"))
        if optimizer.get("device", "none") not in ("none", "cpu", "nvme"):
            where, given = "zero_optimization.offload_optimizer.device", optimizer["device"]
            raise self._wrong(where, f"is {given!r}", "give none, cpu or nvme")
        if params.get("device", "none") not in ("none", "cpu"):
            what = f"is {params['device']!r}, and DeepSpeed runs out of buffers when it swaps parameters to a disk"
            raise self._wrong("zero_optimization.offload_param.device", what, "set it to cpu or none")
        if params.get("device", "none") != "none":
            self._take("zero_optimization.offload_param.device", "params", "parallel", "offload")
        elif "device" in optimizer:
            level = "none" if optimizer["device"] == "none" else "optimizer"
            self._take("zero_optimization.offload_optimizer.device", level, "parallel", "offload")
        if optimizer.get("device") == "nvme":
            where = "zero_optimization.offload_optimizer.nvme_path"
            if not isinstance(optimizer.get("nvme_path"), str):
                raise self._wrong(where, f"is {optimizer.get('nvme_path')!r}", "give a folder on an NVMe disk")
            self._take(where, optimizer["nvme_path"], "parallel", "offload_dir")

    def _optimizer(self) -> None:
        found = self._object("optimizer")
        if not found:
            return
        kind, params = found.get("type"), found.get("params") or {}
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
        params = self._object("scheduler").get("params") or {}
        literal = [key for key, value in params.items() if value != "auto"]
        if literal:
            what = f"is {params[literal[0]]!r}, and the schedule is the recipe's"
            mend = "remove scheduler, and set train.schedule and train.warmup"
            raise self._wrong(f"scheduler.params.{literal[0]}", what, mend)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
