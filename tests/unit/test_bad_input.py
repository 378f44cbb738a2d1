"""What users get wrong: each is one sentence with where, what and a mend, exit status 2, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.tiny import make_model, make_tokenizer, values, write_chats

from packtrain.cli.app import run

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bad") / "model")


class Case:
    """A working recipe in a folder of its own, to be broken."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        shutil.copytree(base, self.model)
        self.data = write_chats(folder / "chats.jsonl", 6)
        self.recipe = values(self.model, str(self.data), output={"folder": str(folder / "runs"), "name": "run"})
        self.words: list[str] = []

    def lines(self, *rows: object) -> None:
        self.data.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))

    def run(self) -> int:
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe))
        return run(["train", str(path), *self.words])


def unknown_key(c: Case) -> None:
    c.recipe["train"]["learning_rat"] = 1


def wrong_type(c: Case) -> None:
    c.words = ["train.batch_size=many"]


def missing_recipe_value(c: Case) -> None:
    del c.recipe["data"]["train"]


def missing_file(c: Case) -> None:
    c.recipe["data"]["train"] = [str(c.folder / "chat.jsonl")]


def empty_file(c: Case) -> None:
    c.data.write_text("")


def truncated_line(c: Case) -> None:
    c.lines(GOOD, json.dumps(GOOD)[:40], GOOD)


def not_an_object(c: Case) -> None:
    c.lines(GOOD, "[1, 2]")


def mixed_types(c: Case) -> None:
    c.lines({"messages": 5}, {"messages": "text"})


def empty_answers(c: Case) -> None:
    c.lines({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]})


def wrong_order(c: Case) -> None:
    c.lines({"messages": [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "ho"}]})


def template_refuses(c: Case) -> None:
    make_tokenizer(c.model, REFUSES_SYSTEM)
    c.lines({"messages": [{"role": "system", "content": "be kind"}, *GOOD["messages"]]})


def row_too_long(c: Case) -> None:
    c.recipe["data"].update(overlong="error", max_length=16)


def no_row_left(c: Case) -> None:
    c.recipe["data"].update(overlong="drop", max_length=8)


def no_weights(c: Case) -> None:
    (c.model / "model.safetensors").unlink()


def shard_cut_short(c: Case) -> None:
    file = c.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def garbage_weights(c: Case) -> None:
    (c.model / "model.safetensors").write_bytes(b"not a tensor in sight")


def weights_of_another_model(c: Case) -> None:
    config = json.loads((c.model / "config.json").read_text())
    (c.model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))


def vocabulary_mismatch(c: Case) -> None:
    config = json.loads((c.model / "config.json").read_text())
    (c.model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))


def no_tokenizer(c: Case) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (c.model / name).unlink(missing_ok=True)


def output_exists(c: Case) -> None:
    (c.folder / "runs" / "run").mkdir(parents=True)


def name_leaves_folder(c: Case) -> None:
    c.words = ["output.name=../elsewhere"]


def fewer_rows_than_ranks(c: Case) -> None:
    c.lines(GOOD, GOOD)
    c.words = ["launch.processes=4", "parallel.strategy=ddp"]


def shard_size(c: Case) -> None:
    c.words = ["launch.processes=4", "parallel.strategy=fsdp", "parallel.shard_size=3"]


def past_the_model(c: Case) -> None:
    c.words = ["data.max_length=4096"]


def unknown_target(c: Case) -> None:
    c.words = ["method.type=lora", "method.targets=[q_porj]"]


def prompt_without_column(c: Case) -> None:
    c.lines({"dialogue": "A: hi", "summary": "A says hi."})
    c.recipe["data"]["train"] = [{"path": str(c.data), "prompt": "Sum up {dialogue", "columns": {"output": "summary"}}]


def infinite_rate(c: Case) -> None:
    c.words = ["train.learning_rate=1e400"]


def endless_weight(c: Case) -> None:
    c.recipe["data"]["train"] = [{"path": str(c.data), "weight": 1e9}]


def no_target(c: Case) -> None:
    c.words = ["method.type=lora", "method.targets=[]"]


def ready_made_id_out_of_range(c: Case) -> None:
    c.lines({"input_ids": [5, 6, 7]}, {"input_ids": [5, 999]})


def unknown_name(c: Case) -> None:
    c.recipe["data"]["train"] = ["samsum_mimi"]


def block_out_of_range(c: Case) -> None:
    c.words = ["method.type=freeze", "method.trainable=[blocks.9]"]


def config_of(c: Case, **changes: object) -> None:
    file = c.model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def quantised_already(c: Case) -> None:
    config_of(c, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def weights_in_float8(c: Case) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = c.model / "model.safetensors"
    save_file({k: t.to(torch.float8_e4m3fn) for k, t in load_file(file).items()}, file)


def token_known(c: Case) -> None:
    c.recipe["model"]["add_tokens"] = ["<call>", "<|im_start|>"]


def token_twice(c: Case) -> None:
    c.recipe["model"]["add_tokens"] = ["<call>", "<call>"]


def token_blank(c: Case) -> None:
    c.recipe["model"]["add_tokens"] = [" "]


def llama_adapter_on_qwen(c: Case) -> None:
    config_of(c, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    c.words = ["method.type=llama_adapter"]


def too_many_adapter_blocks(c: Case) -> None:
    c.words = ["method.type=llama_adapter", "method.adapter_blocks=5"]


def prefix_out_of_the_window(c: Case) -> None:
    config_of(c, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    c.words = ["method.type=prefix", "method.virtual_tokens=10"]


def also_train_without_adapter(c: Case) -> None:
    c.words = ["method.also_train=[head]"]


def quantize_without_qlora(c: Case) -> None:
    c.words = ["method.type=lora", "method.quantize=int8"]


def head_as_target(c: Case) -> None:
    c.words = ["method.type=lora", "method.targets=[q_proj, lm_head]"]


def offload_without_fsdp(c: Case) -> None:
    c.words = ["parallel.offload=params"]


def offload_of_bf16(c: Case) -> None:
    c.words = [
        "parallel.strategy=fsdp",
        "parallel.offload=optimizer",
        "train.master_weights=bf16",
        "train.precision=bf16",
    ]


def offload_of_nothing(c: Case) -> None:
    c.words = ["parallel.offload_activations=true"]


def bf16_weights_in_fp32(c: Case) -> None:
    c.words = ["train.master_weights=bf16"]


def mixture_of_experts(c: Case) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = c.model / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.mlp.experts.0.w1.weight": torch.zeros(2, 2)}, file)


def prefix_longer_than_the_model(c: Case) -> None:
    c.words = ["method.type=prefix", "method.virtual_tokens=600"]


def freeze_too_many(c: Case) -> None:
    c.words = ["method.type=freeze", "method.freeze_first=99"]


def eight_bit_by_another_name(c: Case) -> None:
    c.words = ["method.type=qlora", "method.quantize=8bit"]


CASES: dict[Callable[[Case], None], tuple[str, ...]] = {
    unknown_key: ("recipe.yaml:", "train.learning_rat", "unknown key", "did you mean 'learning_rate'"),
    wrong_type: ("command line: train.batch_size", "'many'", "whole number"),
    missing_recipe_value: ("data.train", "is missing"),
    missing_file: ("chat.jsonl", "chats.jsonl"),
    empty_file: ("chats.jsonl", "empty"),
    truncated_line: ("chats.jsonl:2", "JSON"),
    not_an_object: ("chats.jsonl:2", "object"),
    mixed_types: ("chats.jsonl:1", "messages"),
    empty_answers: ("chats.jsonl:1", "empty"),
    wrong_order: ("chats.jsonl:1", "assistant"),
    template_refuses: ("chats.jsonl:1", "system", "System role not supported"),
    row_too_long: ("chats.jsonl:", "tokens", "16"),
    no_row_left: ("chats.jsonl:1", "none of the 6 rows", "max_length"),
    no_weights: ("model.path", "no weights", "safetensors"),
    shard_cut_short: ("model.safetensors", "cut short", "again"),
    garbage_weights: ("model.safetensors", "not a whole safetensors file"),
    weights_of_another_model: ("mlp.gate_proj.weight", "[96, 64]", "[128, 64]"),
    vocabulary_mismatch: ("config.json", "260", "100"),
    no_tokenizer: ("tokenizer",),
    output_exists: ("output.name", "exists", "choose another"),
    name_leaves_folder: ("output.name", "'../elsewhere'"),
    fewer_rows_than_ranks: ("data.train", "2 rows", "4 processes"),
    shard_size: ("parallel.shard_size", "3", "[1, 2, 4]"),
    past_the_model: ("data.max_length", "4096", "512"),
    unknown_target: ("method.targets", "q_porj", "q_proj"),
    prompt_without_column: ("chats.jsonl", "opens '{dialogue'", "does not close"),
    infinite_rate: ("train.learning_rate", "1e400", "a finite number"),
    endless_weight: ("weight", "1000"),
    no_target: ("method.targets", "[]", "at least one entry"),
    ready_made_id_out_of_range: ("chats.jsonl:2", "999", "261"),
    unknown_name: ("samsum_mimi", "samsum_mini"),
    quantised_already: ("config.json", "quantised already", "bitsandbytes", "qlora"),
    weights_in_float8: ("model.safetensors", "F8_E4M3", "bf16"),
    token_known: ("model.add_tokens", "'<|im_start|>'", "already"),
    token_twice: ("model.add_tokens", "'<call>'", "twice"),
    token_blank: ("model.add_tokens", "white space"),
    llama_adapter_on_qwen: ("method.type", "qwen3", "lora or prefix"),
    too_many_adapter_blocks: ("method.adapter_blocks", "5 of 4", "1 to 4"),
    prefix_out_of_the_window: ("method.type", "128", "64", "at most 54"),
    also_train_without_adapter: ("method.also_train", "method full"),
    quantize_without_qlora: ("method.quantize", "method lora", "qlora"),
    head_as_target: ("method.targets", "lm_head", "method.also_train: [head]"),
    offload_without_fsdp: ("parallel.offload", "params", "single", "fsdp"),
    offload_of_bf16: ("parallel.offload", "fp32", "master_weights"),
    offload_of_nothing: ("parallel.offload_activations", "none recomputes", "full"),
    bf16_weights_in_fp32: ("train.master_weights", "fp32 arithmetic", "train.precision to bf16"),
    mixture_of_experts: ("model.path", "mixture of experts", "dense"),
    prefix_longer_than_the_model: ("data.max_length", "600", "512", "lower method.virtual_tokens"),
    freeze_too_many: ("method.freeze_first", "99 of 4", "1 to 4"),
    eight_bit_by_another_name: ("method.quantize", "'8bit'", "nf4", "int8"),
    block_out_of_range: ("method.trainable", "blocks.9", "0 to 3"),
}


@pytest.mark.parametrize("breaks", CASES, ids=lambda f: f.__name__)
def test_one_sentence_and_nothing_half_written(
    breaks: Callable[[Case], None], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    case = Case(tmp_path, base)
    breaks(case)
    runs = tmp_path / "runs"
    before = sorted(runs.rglob("*"))
    status = case.run()
    output = capfd.readouterr().err
    errors = [line for line in output.splitlines() if line.startswith("packtrain: error: ")]
    assert status == 2, output
    assert len(errors) == 1 and "Traceback" not in output, output
    for part in CASES[breaks]:
        assert part in errors[0], errors[0]
    assert sorted(runs.rglob("*")) == before, "something was left in the run folder"


MEANINGLESS = {
    "method.type=prefix method.dora=true": "dora means nothing to method prefix",
    "method.type=llama_adapter method.rank=8 method.alpha=3": "rank and alpha mean nothing to method llama_adapter",
    "method.type=lora method.freeze_first=1": "freeze_first means nothing to method lora",
    "train.rounding=kahan": "rounding kahan means nothing to fp32 weights",
}


@pytest.mark.parametrize("words", MEANINGLESS)
def test_settings_without_meaning_are_said(words: str, base: Path, tmp_path: Path) -> None:
    from packtrain.config import load_recipe
    from packtrain.launch.resolve_recipe import resolve

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values(base, "unused")))
    recipe = load_recipe(tmp_path / "recipe.yaml", words.split())
    assert any(MEANINGLESS[words] in warning for warning in resolve(recipe)[1])


def test_a_resolved_recipe_warns_of_nothing(base: Path, tmp_path: Path) -> None:
    """A run's recipe.yaml is a good start for another."""
    from packtrain.config import build_recipe, dump_recipe, load_recipe
    from packtrain.launch.resolve_recipe import resolve

    for method in ("full", "lora", "qlora", "llama_adapter", "prefix"):
        resolved, warnings = resolve(build_recipe(values(base, "unused", method={"type": method})))
        assert warnings == []
        (tmp_path / "recipe.yaml").write_text(dump_recipe(resolved))
        assert resolve(load_recipe(tmp_path / "recipe.yaml")) == (resolved, [])


@pytest.mark.parametrize(
    "prefix, newline", [("\ufeff", "\n"), ("", "\r\n"), ("", "\n\n")], ids=["bom", "crlf", "blank"]
)
def test_tolerated(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, newline: str) -> None:
    """A byte-order mark, Windows line ends and blank lines are no fault."""
    from packtrain.config import build_recipe
    from packtrain.data import prepare_data

    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    case = Case(tmp_path, base)
    rows = case.data.read_text().splitlines()
    case.data.write_bytes((prefix + newline.join(rows) + newline).encode())
    data = prepare_data(build_recipe(case.recipe).data, case.model, 128, 0)
    assert len(data.train) == 6


def test_tokenizer_without_pad_trains_the_end_of_text(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pad token is needed, and one equal to EOS masks nothing: padding is known by its place."""
    from packtrain.config import build_recipe
    from packtrain.data import prepare_data

    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    case = Case(tmp_path, base)
    labels = []
    for pad in (None, "<|im_end|>"):
        config = json.loads((case.model / "tokenizer_config.json").read_text())
        config.pop("pad_token", None)
        (case.model / "tokenizer_config.json").write_text(json.dumps(config | ({"pad_token": pad} if pad else {})))
        store = prepare_data(build_recipe(case.recipe).data, case.model, 128, 0).train
        labels.append([store.tokens(i)[store.labelled(i)].tolist() for i in range(len(store))])
    assert labels[0] == labels[1]
    assert all(row[-1] == 4 for row in labels[0])  # <|im_end|>
