"""A DeepSpeed JSON of the user's: what it says is moved into the recipe, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.config import Recipe, build_recipe
from packtrain.config.adopt import adopt
from packtrain.config.deepspeed import engine_config, settle
from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.resolve import resolve
from packtrain.config.rules import check
from packtrain.config.schema import ParallelSection
from packtrain.errors import UserError

FACTS = Facts(4, 4, "cuda", 4, 80 * 2**30, True, 16, ModelFacts(8_000_000_000, 32, 4096, 14336, 128256, 8192))


def recipe(config: Any, **sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": ["d"]}, "method": {"type": "full"}, **sections}
    values.setdefault("parallel", {})["deepspeed_config"] = config
    return build_recipe(values)


def resolved(config: Any, **sections: dict[str, Any]) -> Recipe:
    made = resolve(adopt(recipe(config, **sections), 4), FACTS)
    if made.train.micro_batch_size == "auto":
        made.train.micro_batch_size = 2
    return made


def refused(config: Any, **sections: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        adopt(recipe(config, **sections), 4)
    return str(caught.value)


AUTO: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "overlap_comm": "auto",
        "stage3_param_persistence_threshold": "auto", "sub_group_size": 5e8,
    },
}  # fmt: skip


def test_every_auto_is_resolved() -> None:
    made = engine_config(resolved(AUTO, train={"batch_size": 64, "micro_batch_size": 4}), 4)
    assert "auto" not in json.dumps(made)
    assert made["train_micro_batch_size_per_gpu"] == 4 and made["gradient_accumulation_steps"] == 4
    assert made["gradient_clipping"] == 1.0 and made["bf16"] == {"enabled": True}
    assert made["fp16"] == {"enabled": False, "loss_scale": 0}
    zero = made["zero_optimization"]
    assert zero["sub_group_size"] == 5e8 and zero["stage3_param_persistence_threshold"] == 40_960
    assert 2**27 < zero["reduce_bucket_size"] == zero["stage3_prefetch_bucket_size"] < 2**28  # one block
    assert "optimizer" not in made and "scheduler" not in made


def test_the_recipe_takes_what_it_can_say() -> None:
    made = resolved(
        {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0,
            "fp16": {"enabled": True, "initial_scale_power": 12}, "steps_per_print": 5,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {
                "stage": 2, "reduce_bucket_size": 1e6, "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
        }
    )  # fmt: skip
    assert (made.parallel.strategy, made.parallel.zero_stage, made.parallel.offload) == ("deepspeed", 2, "optimizer")
    train = made.train
    assert (train.batch_size, train.micro_batch_size, train.max_grad_norm, train.precision) == (24, 2, None, "fp16")
    assert (train.learning_rate, train.beta1, train.beta2, train.weight_decay) == (3e-5, 0.8, 0.95, 0.1)
    config = engine_config(made, 4)
    assert config["gradient_accumulation_steps"] == 3 and config["gradient_clipping"] == 0.0
    assert config["fp16"] == {"enabled": True, "initial_scale_power": 12} and config["steps_per_print"] == 5
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert config["zero_optimization"]["reduce_bucket_size"] == 1e6


def test_a_resolved_recipe_starts_another_run() -> None:
    """Its mapping holds only what DeepSpeed alone decides, so that any setting may change."""
    made = resolved(AUTO, train={"batch_size": 64, "micro_batch_size": 4})
    values = made.model_dump(mode="json")
    values["train"] |= {"batch_size": 32, "max_grad_norm": 0.3, "learning_rate": 1e-5}
    values["parallel"] |= {"zero_stage": 2, "offload": "optimizer"}
    again = resolve(adopt(build_recipe(values), 4), FACTS)
    assert engine_config(again, 4)["gradient_clipping"] == 0.3
    assert engine_config(again, 4)["zero_optimization"]["stage"] == 2


def test_computed_buckets_can_be_aligned() -> None:
    """Qwen3-8B's block has an odd number of parameters, which ZeRO-1 and 2 refuse as a bucket."""
    odd = ModelFacts(8_190_735_361, 36, 4096, 12288, 151936, 40960)
    for stage in (1, 2, 3):
        zero = settle(ParallelSection(zero_stage=stage), odd)["zero_optimization"]
        assert all(zero[key] % 1024 == 0 for key in zero if key.endswith("bucket_size"))


def test_batches_that_a_file_gives_alone() -> None:
    """On 4 processes: 8 rows each make 32, and 8 rounds at least 8 x 4."""
    alone = resolved({"train_micro_batch_size_per_gpu": 8}).train
    assert (alone.batch_size, alone.micro_batch_size) == (32, 8)
    rounds = resolved({"gradient_accumulation_steps": 8}).train
    assert (rounds.batch_size, rounds.micro_batch_size) == (32, 1)
    words = resolved({"train_micro_batch_size_per_gpu": "2", "gradient_accumulation_steps": 3}).train
    assert (words.batch_size, words.micro_batch_size) == (24, 2)


def test_what_no_setting_can_be_right_is_set_right() -> None:
    """DeepSpeed's default would refuse torch's AdamW in host memory."""
    made = resolved(
        {"zero_force_ds_cpu_optimizer": True, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    )
    assert engine_config(made, 4)["zero_force_ds_cpu_optimizer"] is False


def test_a_file_beside_another_strategy_is_named_by_the_rules() -> None:
    made = adopt(recipe({"zero_optimization": {"stage": 2}}, parallel={"strategy": "fsdp"}), 4)
    assert ["deepspeed_config" in f.message for f in check(made, FACTS) if f.severity == "error"] == [True]


def test_a_recipe_that_agrees_is_no_contradiction() -> None:
    made = resolved({"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}, train={"max_grad_norm": 0.5})
    assert made.train.max_grad_norm == 0.5 and made.parallel.zero_stage == 1


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "clipping": ({"gradient_clipping": 0.5}, {"train": {"max_grad_norm": 2.0}}, ("0.5", "train.max_grad_norm", "2.0")),
    "stage": ({"zero_optimization": {"stage": 2}}, {"parallel": {"zero_stage": 3}}, ("2", "parallel.zero_stage", "3")),
    "offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, {"parallel": {"offload": "none"}},
        ("is cpu", "parallel.offload", "'none'"),
    ),
    "offload of params": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}, {"parallel": {"offload": "params"}},
        ("offload_param.device none", "parallel.offload", "'params'"),
    ),
    "memory or disk": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        {"parallel": {"offload_dir": "/nvme"}}, ("'cpu'", "parallel.offload_dir", "'/nvme'"),
    ),
    "micro batch": (
        {"train_micro_batch_size_per_gpu": 1}, {"train": {"micro_batch_size": 2}}, ("1", "train.micro_batch_size", "2"),
    ),
    "batch": ({"train_batch_size": 8}, {"train": {"batch_size": 16}}, ("8", "train.batch_size", "16")),
    "accumulation": (
        {"gradient_accumulation_steps": 5}, {"train": {"batch_size": 16, "micro_batch_size": 2}}, ("5", "16", "2"),
    ),
    "precision": ({"fp16": {"enabled": True}}, {"train": {"precision": "bf16"}}, ("fp16", "train.precision", "bf16")),
    "not bf16": ({"bf16": {"enabled": False}}, {"train": {"precision": "bf16"}}, ("false", "train.precision", "bf16")),
    "rate": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {"train": {"learning_rate": 1e-4}},
        ("0.001", "train.learning_rate", "0.0001"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_names_both_values(name: str) -> None:
    config, sections, words = CONTRADICTIONS[name]
    message = refused(config, **sections)
    assert all(word in message for word in words) and message.count("\n") == 0, message


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown": ({"zero_optimisation": {}}, ("zero_optimisation", "did you mean 'zero_optimization'")),
    "unknown inside": ({"zero_optimization": {"stage": 2, "reduce_bucket": 1}}, ("reduce_bucket", "did you mean")),
    "quantized": ({"zero_optimization": {"zero_quantized_weights": True}}, ("zero_quantized_weights",)),
    "both": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ("bf16", "fp16")),
    "stage 4": ({"zero_optimization": {"stage": 4}}, ("stage", "4")),
    "no stage": ({"zero_optimization": 3}, ("zero_optimization", "3")),
    "size": ({"zero_optimization": {"reduce_bucket_size": "big"}}, ("reduce_bucket_size", "'big'")),
    "flag": ({"zero_optimization": {"overlap_comm": "yes"}}, ("overlap_comm", "'yes'")),
    "device": ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, ("device", "'gpu'")),
    "optimizer": ({"optimizer": {"type": "Lamb"}}, ("Lamb", "AdamW")),
    "betas": ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, ("betas", "0.9")),
    "scheduler": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, ("9", "train.schedule")),
    "recompute": ({"activation_checkpointing": {}}, ("activation_checkpointing", "parallel.recompute")),
    "micro": ({"train_micro_batch_size_per_gpu": 0}, ("train_micro_batch_size_per_gpu", "0")),
    "micro text": ({"train_micro_batch_size_per_gpu": "two"}, ("train_micro_batch_size_per_gpu", "'two'")),
    "rounds": ({"gradient_accumulation_steps": 0}, ("gradient_accumulation_steps", "0")),
    "clipping": ({"gradient_clipping": -1}, ("gradient_clipping", "-1")),
    "optimizer a number": ({"optimizer": 3}, ("optimizer", "3", "object")),
    "params a list": ({"optimizer": {"type": "AdamW", "params": [1]}}, ("optimizer.params", "[1]", "object")),
    "scheduler a list": ({"scheduler": {"params": [1]}}, ("scheduler.params", "[1]")),
    "enabled a word": ({"fp16": {"enabled": "yes"}}, ("fp16.enabled", "'yes'", "true or false")),
    "aio": ({"aio": 3}, ("aio", "3", "object")),
    "aio inside": ({"aio": {"block_size": "big"}}, ("aio.block_size", "'big'", "number")),
    "prints": ({"steps_per_print": "x"}, ("steps_per_print", "'x'", "number")),
    "scale": ({"fp16": {"loss_scale": "big"}}, ("fp16.loss_scale", "'big'")),
    "not finite": ({"zero_optimization": {"reduce_bucket_size": float("inf")}}, ("reduce_bucket_size", "inf")),
    "pinned": ({"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": 1}}}, ("pin_memory", "1")),
    "communication": ({"communication_data_type": "int8"}, ("communication_data_type", "'int8'", "bf16")),
    "params on a disk": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
        ("offload_param.device", "nvme", "cpu"),
    ),
    "params alone": (
        {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}},
        ("offload_optimizer.device", "none", "cpu"),
    ),
    "a device that is none": ({"zero_optimization": {"offload_param": {"device": ["cpu"]}}}, ("device", "['cpu']")),
    "half a size": ({"zero_optimization": {"reduce_bucket_size": 1.5}}, ("reduce_bucket_size", "1.5", "whole")),
    "no size": ({"zero_optimization": {"reduce_bucket_size": 0}}, ("reduce_bucket_size", "0", "from 1 on")),
    "a size beyond all": ({"zero_optimization": {"reduce_bucket_size": 1e300}}, ("reduce_bucket_size", "1e+300")),
    "prints never": ({"steps_per_print": 0}, ("steps_per_print", "0", "from 1 on")),
    "no hysteresis": ({"fp16": {"hysteresis": 0}}, ("fp16.hysteresis", "0")),
    "half a power": ({"fp16": {"initial_scale_power": 16.5}}, ("initial_scale_power", "16.5")),
    "a key of the other place": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "max_in_cpu": 1}}}, ("max_in_cpu",),
    ),
    "a pipeline": (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x", "pipeline_read": True}}},
        ("pipeline_read", "True", "false"),
    ),
    "a stage that is true": ({"zero_optimization": {"stage": True}}, ("stage", "True")),
    "a list for an object": ({"zero_optimization": []}, ("zero_optimization", "[]", "object")),
    "beside the scheduler": ({"scheduler": {"foo": 1}}, ("scheduler.foo",)),
    "an odd bucket": ({"zero_optimization": {"allgather_bucket_size": 500_000_001}}, ("allgather_bucket_size", "even")),
    "granularity": ({"zero_optimization": {"stage3_module_granularity_threshold": 5000}}, ("granularity",)),
    "prescaled": ({"prescale_gradients": True}, ("prescale_gradients", "True", "false")),
    "four hundred digits": ({"steps_per_print": 10**400}, ("steps_per_print", "whole")),
    "a folder with a zero": (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a\0b"}}}, ("nvme_path",),
    ),
    "no nvme path": ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ("nvme_path",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    config, words = FAULTS[name]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    message = refused(str(file))
    assert str(file) in message and all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["{", "[1]", "3", ""])
def test_what_is_no_json_object(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    assert str(file) in refused(str(file))


def test_a_file_that_is_not_there() -> None:
    assert "no such file" in refused("nowhere.json")
