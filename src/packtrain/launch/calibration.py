"""What this machine was measured at, in the user's cache: a file for each name of a GPU. Starts without torch.

A measurement says how fast the parts of a step are at the shapes of one model; ``packtrain plan --calibrate`` makes it
(``launch/calibrate.py``), and each plan for that GPU uses it in place of the published figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from packtrain.config.cache_folder import cache_root
from packtrain.config.facts import ModelFacts, Rates
from packtrain.config.resolve import auto_max_length
from packtrain.config.schema import Recipe
from packtrain.errors import UserError
from packtrain.launch.folder import write_text
from packtrain.plan.activations import query_width
from packtrain.plan.parameters import block_linears, kv_width
from packtrain.plan.rates import NETWORK, published

_HEAD_SIZE = 128
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shapes(_Stored):
    """What decides how fast a model's parts are.

    Attributes:
        linears: (out_features, in_features) of one block's matrices. heads, kv_heads: of queries, of keys and values.
        length: tokens of a row. window: how far back a query sees; None: to the row's start.
    """

    linears: tuple[tuple[_Count, _Count], ...]
    num_blocks: _Count
    vocabulary: _Count
    hidden: _Count
    heads: _Count
    kv_heads: _Count
    head_size: _Count
    length: _Count
    window: _Count | None = None


LLAMA_8B = Shapes(
    linears=((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)),
    num_blocks=32, vocabulary=128256, hidden=4096, heads=32, kv_heads=8, head_size=128, length=4096,
)  # fmt: skip
"""What is measured where no model is named: Llama 3 8B, rows of 4,096 tokens."""


class Measured(_Stored):
    """FLOP/s and bytes/s as in ``config.facts.Rates``; ``link`` is None where there was one GPU."""

    matmul: _Rate
    attention: _Rate
    memory: _Rate
    link: _Rate | None
    host: _Rate
    host_memory: _Rate
    disk: _Rate


class Calibration(_Stored):
    """One measurement. ``date``: UTC, ISO 8601."""

    shapes: Shapes
    measured: Measured
    num_gpus: _Count
    host: str
    date: str
    torch: str

    def rates(self, gpu: str, wanted: Shapes) -> Rates:
        """For a plan at the shapes ``wanted``; what was not measured is taken from what is published."""
        known, found = published(gpu), self.measured
        same = "at this model's shapes" if _alike(self.shapes, wanted) else "at another model's shapes"
        return Rates(
            **found.model_dump(exclude={"link"}),
            link=found.link or (known.link if known else found.host),
            network=NETWORK,
            source=f"a measurement on {self.host} on {self.date[:10]}, {same}",
        )


class _File(_Stored):
    gpu: str
    calibrations: tuple[Calibration, ...]


def shapes(recipe: Recipe, model: ModelFacts) -> Shapes:
    """The shapes that a recipe's steps have."""
    linears, size = block_linears(model), model.head_size or _HEAD_SIZE
    length = recipe.data.max_length
    return Shapes(
        linears=tuple((linear.outputs, linear.inputs) for linear in linears),
        num_blocks=model.num_blocks,
        vocabulary=model.vocabulary,
        hidden=model.hidden,
        heads=max(query_width(linears, model) // size, 1),
        kv_heads=max(kv_width(model) // size, 1),
        head_size=size,
        length=auto_max_length(model.max_length) if length == "auto" else length,
        window=model.sliding_window,
    )


def known_rates(gpu: str, recipe: Recipe, model: ModelFacts, nodes: int) -> Rates | None:
    """Measured on this machine where it was, else published; None: of this GPU nothing is known.

    Several nodes go by what is published: each could have measured something else, and they must choose alike.

    Raises:
        UserError: the file of measurements is damaged.
    """
    kept = _read(gpu) if gpu and nodes == 1 else ()
    if not kept:
        return published(gpu)
    wanted = shapes(recipe, model)
    return nearest(kept, wanted).rates(gpu, wanted)


def nearest(kept: Sequence[Calibration], wanted: Shapes) -> Calibration:
    """The measurement at these shapes, else of this model, else of the model most like it; the newest of equals.

    Attention's rate hangs on the size of a head more than any rate does on the hidden size.
    """

    def fit(one: Calibration) -> tuple[bool, bool, bool, float, str]:
        found = one.shapes
        size = -abs(math.log(found.hidden / wanted.hidden))
        return found == wanted, _alike(found, wanted), found.head_size == wanted.head_size, size, one.date

    return max(kept, key=fit)


def keep(gpu: str, made: Calibration) -> Path:
    """Store a measurement in place of an earlier one at the same shapes, and of a damaged file; where it is.

    Raises:
        UserError: the cache folder cannot be written.
    """
    try:
        earlier = _read(gpu)
    except UserError:  # this is the mend that it named
        earlier = ()
    others = tuple(one for one in earlier if one.shapes != made.shapes)
    path = file_of(gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _File(gpu=gpu, calibrations=(*others, made)).model_dump_json(indent=2) + "\n")
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise UserError(str(path), what, "set PACKTRAIN_CACHE to a folder of yours") from error
    return path


def file_of(gpu: str) -> Path:
    """Where the measurements of a GPU are, by the driver's name for it."""
    return cache_root() / "calibration" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def _read(gpu: str) -> tuple[Calibration, ...]:
    path = file_of(gpu)
    try:
        found = _File.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", "mend its permissions or remove it") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        what = f"holds no measurements of a machine ({place}: {first['msg']})"
        raise UserError(str(path), what, "run `packtrain plan --calibrate`, or remove it") from error
    return found.calibrations if found.gpu == gpu else ()


def _alike(one: Shapes, other: Shapes) -> bool:
    """Whether they differ in the length of rows at most."""
    return one.model_copy(update={"length": other.length}) == other
