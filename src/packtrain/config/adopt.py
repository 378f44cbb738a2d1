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

# What DeepSpeed alone decides, handed on as it is given.
_KINDS = {"flag": "true or false", "number": "a number from 0 on", "dtype": "fp32, fp16 or bf16"}
_ZERO = dict.fromkeys((
    "allgather_partitions", "overlap_comm", "reduce_scatter", "contiguous_gradients", "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save", "memory_efficient_linear", "use_multi_rank_bucket_allreduce",
    "ignore_unused_parameters", "log_trace_cache_warnings", "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
), "flag") | dict.fromkeys((
    "allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
), "number")  # fmt: skip
_OFFLOAD = dict.fromkeys(("pin_memory", "pipeline_read", "pipeline_write"), "flag") | dict.fromkeys(
    ("buffer_count", "buffer_size", "max_in_cpu"), "number"
)
_LOSS_SCALE = dict.fromkeys(
    ("loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"), "number"
) | {"consecutive_hysteresis": "flag"}
_AIO = dict.fromkeys(("block_size", "queue_depth", "intra_op_parallelism"), "number") | dict.fromkeys(
    ("single_submit", "overlap_events"), "flag"
)
_FLAGS = (
    "wall_clock_breakdown", "dump_state", "prescale_gradients", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "memory_breakdown",
)  # fmt: skip
_HANDED_ON = dict.fromkeys(_FLAGS, "flag") | {
    "steps_per_print": "number",
    "gradient_predivide_factor": "number",
    "communication_data_type": "dtype",
}
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
        left = _given(self.values, _HANDED_ON)
        left["zero_optimization"] = _given(zero, _ZERO)
        for part in ("offload_optimizer", "offload_param"):
            if extra := _given(zero.get(part) or {}, _OFFLOAD):
                left["zero_optimization"][part] = extra
        for part, kinds in (("fp16", _LOSS_SCALE), ("aio", _AIO)):
            if extra := _given(self._object(part), kinds):
                left[part] = extra
        return left

    def _object(self, key: str) -> Json:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self._wrong(key, f"is {value!r}", "give an object")
        return value

    def _params(self, section: str) -> Json:
        params = self._object(section).get("params") or {}
        if not isinstance(params, dict):
            raise self._wrong(f"{section}.params", f"is {params!r}", "give an object")
        return params

    def _wrong(self, key: str, what: str, mend: str) -> UserError:
        return UserError(f"{self.name}: {key}", what, mend)

    def _known_keys(self, zero: Json) -> None:
        """Every key is known, and what is handed on has a value of its kind."""
        for key in self.values:
            if key in _ELSEWHERE:
                raise self._wrong(key, "is decided by the recipe", f"remove it and set {_ELSEWHERE[key]}")
        self._check("", self.values, _HANDED_ON, _OWNED)
        self._check("zero_optimization.", zero, _ZERO, ("stage", "offload_optimizer", "offload_param"))
        for part in ("offload_optimizer", "offload_param"):
            place = zero.get(part) or {}
            if not isinstance(place, dict):
                raise self._wrong(f"zero_optimization.{part}", f"is {place!r}", "give an object with a device")
            self._check(f"zero_optimization.{part}.", place, _OFFLOAD, ("device", "nvme_path"))
        self._check("fp16.", self._object("fp16"), _LOSS_SCALE | {"enabled": "flag"}, ("auto_cast",))
        self._check("bf16.", self._object("bf16"), {"enabled": "flag"})
        self._check("aio.", self._object("aio"), _AIO)

    def _check(self, where: str, values: Json, kinds: dict[str, str], others: tuple[str, ...] = ()) -> None:
        for key, value in values.items():
            self._known(where + key, key, {*kinds, *others})
            kind = kinds.get(key)
            fits = {
                None: True,
                "flag": isinstance(value, bool),
                "number": _is_number(value) and value >= 0,
                "dtype": value in ("fp32", "fp16", "bf16"),
            }
            if value is not None and value != "auto" and not fits[kind]:
                assert kind is not None
                raise self._wrong(where + key, f"is {value!r}", f"give {_KINDS[kind]}, or auto")

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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
