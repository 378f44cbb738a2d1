"""What DeepSpeed is given: the recipe's settings in its words, and what it alone decides.

A DeepSpeed JSON of the user's is taken apart in ``adopt.py``; what is left of it in ``parallel.deepspeed_config`` has
its ``auto`` replaced by ``settle``. ``engine_config`` joins recipe and rest again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from packtrain.config.facts import ModelFacts
from packtrain.config.schema import ParallelSection, Recipe

Json = dict[str, Any]


def settle(parallel: ParallelSection, model: ModelFacts) -> Json:
    """What DeepSpeed alone decides, with every ``auto`` and every gap filled in for this stage and model.

    A bucket holds the gradients, and what is fetched ahead the parameters, of one block: enough to hide a collective
    behind a block's arithmetic, and no more memory than that.

    Args:
        parallel: with its stage; the DeepSpeed JSON taken apart, where there was one.
    """
    assert not isinstance(parallel.deepspeed_config, str), "adopt comes first"
    own, stage = parallel.deepspeed_config or {}, parallel.zero_stage
    tables = 2 * model.vocabulary * model.hidden
    block = max((model.num_parameters - tables) // max(model.num_blocks, 1), model.hidden**2)
    bucket = int(min(max(block, 2**20), 5e8)) // 1024 * 1024  # ZeRO-1 and 2 refuse one that they cannot align
    zero: Json = {}
    if stage in (1, 2):
        zero = {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    elif stage == 3:
        zero = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": bucket}
        zero |= {
            "stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 10 * model.hidden,
            "stage3_max_live_parameters": int(1e9), "stage3_max_reuse_distance": int(1e9), "sub_group_size": int(1e9),
        }  # fmt: skip
    if parallel.offload_dir:
        # Gradients that begin at no multiple of 512 bytes of their sub-group are lost by DeepSpeed 0.19.8 in silence;
        # in a sub-group for each parameter they begin at 0.
        zero["sub_group_size"] = 1
    return {
        "zero_allow_untested_optimizer": True,
        **own,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW steps in host memory
        "zero_optimization": {**zero, **own.get("zero_optimization", {})},
    }


def engine_config(recipe: Recipe, processes: int) -> Json:
    """What DeepSpeed is given, without ``auto``: the recipe's settings in its words, and what it alone decides.

    Args:
        recipe: resolved.
        processes: over all nodes.
    """
    parallel, train = recipe.parallel, recipe.train
    own = parallel.deepspeed_config
    assert isinstance(own, dict), "resolve comes first"
    zero = own["zero_optimization"]
    offload = {part: {**place, **zero.get(part, {})} for part, place in _places(recipe).items()}
    return {
        **{key: value for key, value in own.items() if key not in ("zero_optimization", "fp16")},
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.micro_batches(processes),
        "gradient_clipping": train.max_grad_norm or 0.0,
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16", **own.get("fp16", {})},
        "zero_optimization": {
            "stage": parallel.zero_stage,
            **{key: value for key, value in zero.items() if not key.startswith("offload_")},
            **offload,
        },
    }


def _places(recipe: Recipe) -> Json:
    """Where optimizer states and parameters lie."""
    parallel = recipe.parallel
    host: Json = {"device": "cpu", "pin_memory": recipe.launch.device == "cuda"}
    disk = host | ({"device": "nvme", "nvme_path": swap_folder(recipe)} if parallel.offload_dir else {})
    if parallel.offload == "none":
        return {}
    return {"offload_optimizer": disk} | ({"offload_param": host} if parallel.offload == "params" else {})


def swap_folder(recipe: Recipe) -> str:
    """Where this run alone swaps to: two runs in one folder would overwrite each other's weights."""
    assert recipe.parallel.offload_dir is not None
    run = Path(recipe.output.folder).expanduser().absolute() / recipe.output.name
    mark = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return str(Path(recipe.parallel.offload_dir).expanduser().absolute() / f"packtrain-swap-{mark}-{run.name}")
