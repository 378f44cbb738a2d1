"""``packtrain doctor``: what it finds in a recipe, what ``--fix`` writes, and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.tiny import CHATML, make_model, make_tokenizer, values, write_chats

from packtrain.cli.app import run
from packtrain.config import load_recipe
from packtrain.config.facts import Facts, Host, ModelFacts
from packtrain.launch import doctor as module
from packtrain.launch import findings, mend
from packtrain.launch.folder import RunFolder

STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)  # fmt: skip
FAULTY = """\
# a recipe
model: {{path: {model}}}
data:
  train: [{rows}]
  max_length: 9000         # too long
method:
  type: full
  rank: 8                  # of no use
  # what follows is of no use either
  alpha: 16
train:
  batch_size: 5            # over 2
  micro_batch_size: 64
launch: {{processes: 2, device: cpu}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some chats."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    write_chats(tmp_path / "chats.jsonl", 12)
    return tmp_path


def written(folder: Path, /, rows: str = "chats.jsonl", **sections: dict[str, Any]) -> str:
    Path("r.yaml").write_text(yaml.safe_dump(values(folder, rows, **sections)))
    return "r.yaml"


def faulty(model: Path) -> Path:
    Path("faulty.yaml").write_text(FAULTY.format(model=model, rows="chats.jsonl"))
    return Path("faulty.yaml")


def doctor(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = run(["doctor", *words])
    out, err = capsys.readouterr()
    return status, out, err


def found(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """The status, and what was found by its id."""
    status, out, err = doctor(*words, "--json", capsys=capsys)
    by_rule = {finding["rule"]: finding for finding in json.loads(out)["findings"]}
    assert not err and by_rule.keys() <= {kind.id for kind in findings.kinds()}
    return status, by_rule


def test_a_sound_recipe(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(model)
    before = sorted(here.rglob("*"))
    assert doctor(recipe, capsys=capsys) == (0, "nothing stands in the way of this run\n", "")
    assert doctor(recipe, "--fix", capsys=capsys) == (0, "nothing stands in the way of this run\n", "")
    assert sorted(here.rglob("*")) == before  # nothing is written


def test_what_is_found_is_named_with_its_mend(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = doctor(str(faulty(model)), capsys=capsys)
    assert status == 1 and not err
    lines = out.splitlines()
    assert lines[0] == "error    micro-batch    train.micro_batch_size: micro-batches of 64 rows in batches of 5"
    assert lines[1].strip() == "-> lower train.micro_batch_size or raise train.batch_size"
    levels = [line.split()[0] for line in lines[:-2:2]]
    assert levels == ["error", "error", "warning", "warning"]
    assert lines[-1] == "2 errors, 2 warnings; --fix can mend 4 of them"


def test_warnings_alone_are_0(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(model, train={"batch_size": 5, "micro_batch_size": 1}, launch={"processes": 2})
    words = ("parallel.strategy=ddp",)
    status, out, _ = doctor(recipe, *words, capsys=capsys)
    assert status == 0 and out.startswith("warning  batch-size  train.batch_size: ")
    assert out.endswith("nothing stands in the way of this run (1 warning; --fix can mend 1 of them)\n")


@pytest.mark.parametrize(
    ("sections", "rows", "rule", "said"),
    [
        ({}, '{"messages": [{"role": "user", "content": "a"}]}', "data", "can be used"),
        ({}, '{"input_ids": [7, 8], "labels": [-100, -100]}', "data", "first because: no token of the row"),
        ({}, "{", "data", "cut short"),
        ({}, '{"odd": 1}', "data", ""),
        ({"data": {"overlong": "error", "max_length": 8}}, None, "data", "data.max_length is 8"),
        ({"data": {"eval": ["gone.jsonl"]}}, None, "data", "no such file"),
        ({"data": {"template": "gone.jinja"}}, None, "data", "gone.jinja"),
        ({"model": {"path": "nowhere"}}, None, "model", "no such folder"),
        ({"model": {"add_tokens": ["<s>"]}}, None, "data", "in the tokenizer already"),
        ({"parallel": {"strategy": "deepspeed", "deepspeed_config": "gone.json"}}, None, "deepspeed-config", "no such"),
        ({"data": {"max_length": 4096}}, None, "too-long", "512 positions"),
    ],
)  # fmt: skip
def test_errors_of_the_user_are_findings(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, Any], rows: str | None, rule: str,
    said: str,
) -> None:  # fmt: skip
    if rows:
        Path("rows.jsonl").write_text(rows + "\n")
    recipe = written(model, rows="rows.jsonl" if rows else "chats.jsonl", **sections)
    status, by_rule = found(recipe, capsys=capsys)
    assert status == 1 and by_rule[rule]["severity"] == "error", by_rule
    assert said in by_rule[rule]["message"] and by_rule[rule]["mend"]


def test_a_template_that_refuses_the_data_s_roles(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strict = here / "model"
    shutil.copytree(model, strict)
    make_tokenizer(strict, STRICT)
    row = {"messages": [{"role": role, "content": role} for role in ("system", "user", "assistant")]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    status, by_rule = found(written(strict, rows="rows.jsonl"), capsys=capsys)
    assert status == 1 and by_rule["data"]["message"] == "the chat template refuses the role 'system': no system"


def test_only_the_first_rows_are_read(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = Path("chats.jsonl").read_text()
    Path("chats.jsonl").write_text(chats * 9 + "no JSON\n")
    assert found(written(model), capsys=capsys) == (0, {})
    Path("chats.jsonl").write_text(chats * 8 + "no JSON\n")
    assert found(written(model), capsys=capsys)[0] == 1


def test_rows_that_would_be_dropped(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open("chats.jsonl", "a") as file:
        file.write('{"messages": [{"role": "user", "content": "a"}]}\n')
    status, by_rule = found(written(model), capsys=capsys)
    assert status == 0 and "1 of 13 rows dropped, the first at chats.jsonl:13" in by_rule["data-rows"]["message"]


def test_weights_that_are_missing(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, here / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    status, by_rule = found(written(here / "model"), capsys=capsys)
    assert status == 1 and list(by_rule) == ["weights"]


def test_a_disk_that_is_too_small(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20, total=1 << 40))
    status, by_rule = found(written(model), capsys=capsys)
    assert status == 1 and list(by_rule) == ["disk"] and "has 1.0 MiB free" in by_rule["disk"]["message"]


@pytest.mark.parametrize("setting", ["output.folder", "data.cache"])
def test_a_folder_that_cannot_be_made(
    model: Path, here: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").write_text("")
    word = f"{setting}=file/inner"
    status, by_rule = found(written(model), word, capsys=capsys)
    assert status == 1 and by_rule["folder"]["setting"] == setting
    assert run(["train", written(model), word]) == 2
    assert "is a file; give a folder" in capsys.readouterr().err


def test_a_mend_is_made_before_the_next_is_asked_for(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``quantize`` makes the method qlora, to which none of this is unused any more."""
    recipe = written(model, method={"type": "lora", "quantize": "int8", "double_quant": True})
    status, _, _ = doctor(recipe, "--fix", capsys=capsys)
    assert status == 0
    method = yaml.safe_load((here / recipe).read_text())["method"]
    assert method["type"] == "qlora" and method["quantize"] == "int8"


def test_a_run_that_exists(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(model, output={"name": "first"})
    assert found(recipe, capsys=capsys) == (0, {})
    RunFolder.create("runs", "first")
    status, by_rule = found(recipe, capsys=capsys)
    assert status == 0 and by_rule["run-exists"]["severity"] == "warning"


def test_a_secret_and_a_port(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sEcReT123456")
    monkeypatch.setenv("MASTER_PORT", "none")
    status, out, _ = doctor(written(model, log={"project": "hf_sEcReT123456"}), "--json", capsys=capsys)
    assert status == 1 and "sEcReT" not in out
    assert {finding["rule"] for finding in json.loads(out)["findings"]} == {"secret", "port"}


def test_what_the_plan_is_short_of(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is too small for all weights of an 8B model, and on a machine whose rules are broken."""
    llama = ModelFacts(8_030_261_248, 32, 4096, 14336, 128256, 8192, kv_width=1024)
    facts = Facts(1, 1, "cuda", 1, 80 << 30, True, 16, llama, host_memory=1 << 40)
    monkeypatch.setattr(module, "gather_facts", lambda *_, **__: facts)
    monkeypatch.setattr(module, "gather_host", Host)
    monkeypatch.setattr(module, "disk_shortage", lambda *_: None)
    Path("r.yaml").write_text(f"model: {{path: {model}}}\ndata: {{train: [chats.jsonl]}}\nmethod: {{type: full}}\n")
    status, by_rule = found("r.yaml", "train.batch_size=1", capsys=capsys)
    assert status == 0 and list(by_rule) == ["memory"] and "may be filled" in by_rule["memory"]["message"]
    status, out, _ = doctor("r.yaml", "--fix", capsys=capsys)
    assert status == 0 and "mended: memory" in out and out.endswith("nothing stands in the way of this run\n")
    monkeypatch.setattr(module, "gather_host", lambda: Host(shared_memory=0, c_compiler=False))
    monkeypatch.setattr(module, "gather_facts", lambda *_, **__: replace(facts, processes=2, local_processes=2))
    assert {"processes", "shared-memory", "uncompiled"} <= found("r.yaml", capsys=capsys)[1].keys()


def test_fix_writes_the_mends_and_keeps_the_rest(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = faulty(model)
    file.chmod(0o640)
    before = file.read_text().splitlines()
    status, out, err = doctor(str(file), "--fix", capsys=capsys)
    assert (status, err) == (0, "")
    after = file.read_text().splitlines()
    assert [line for line in before if line not in after] == [
        "  max_length: 9000         # too long", "  rank: 8                  # of no use", "  alpha: 16",
        "  batch_size: 5            # over 2", "  micro_batch_size: 64",
    ]  # fmt: skip
    assert [line for line in after if line not in before] == [
        "  max_length: 512          # too long", "  batch_size: 6            # over 2", "  micro_batch_size: 5",
    ]  # fmt: skip
    assert out.startswith("--- faulty.yaml (as it was)\n+++ faulty.yaml\n@@ ")
    assert "-  alpha: 16\n" in out and "+  batch_size: 6            # over 2\n" in out
    assert "faulty.yaml is changed; mended: micro-batch, too-long, method-unused, batch-size" in out
    assert out.endswith("nothing stands in the way of this run\n") and file.stat().st_mode & 0o777 == 0o640
    assert load_recipe(file).train.batch_size == 6
    assert doctor(str(file), "--fix", capsys=capsys) == (0, "nothing stands in the way of this run\n", "")


def test_fix_follows_a_link(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "link.yaml").symlink_to(faulty(model))
    assert doctor("link.yaml", "--fix", capsys=capsys)[0] == 0
    assert Path("link.yaml").is_symlink() and load_recipe("faulty.yaml").train.batch_size == 6


def test_fix_says_what_it_cannot_mend(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = FAULTY.format(model=model, rows="gone.jsonl").replace("type: full", "type: freeze")
    Path("r.yaml").write_text(text)
    status, out, _ = doctor("r.yaml", "--fix", "--json", capsys=capsys)
    told = json.loads(out)
    assert status == 1 and {finding["rule"] for finding in told["findings"]} == {"freeze-what", "data"}
    assert [finding["rule"] for finding in told["mended"]] == [
        "micro-batch", "too-long", "method-unused", "batch-size",
    ]  # fmt: skip
    assert told["difference"].startswith("--- r.yaml (as it was)\n") and "+  batch_size: 6" in told["difference"]
    assert doctor("r.yaml", "--fix", capsys=capsys)[1].endswith("2 errors; --fix cannot mend the rest\n")


def test_what_another_file_says_is_not_overruled(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe would contradict its DeepSpeed JSON, and no run would start."""
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}')
    deepspeed = {"strategy": "deepspeed", "deepspeed_config": "ds.json", "recompute": "auto", "compile": "auto"}
    recipe = written(model, parallel=deepspeed, train={"batch_size": 7, "micro_batch_size": 1, "max_grad_norm": None},
                     launch={"processes": 2})  # fmt: skip
    text = Path(recipe).read_text()
    status, by_rule = found(recipe, capsys=capsys)
    assert status == 1 and by_rule["zero-offload"]["edits"] == {"parallel.zero_stage": 3}, by_rule
    status, out, _ = doctor(recipe, "--fix", capsys=capsys)
    assert status == 1 and "error    zero-offload" in out and "--fix cannot mend the rest" in out
    assert Path(recipe).read_text() == text.replace("batch_size: 7", "batch_size: 8")


def test_fix_writes_nothing_but_the_mends(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = faulty(model)
    text = file.read_text()
    for added in ("odd: 1\n", "log: {every: 7}\n"):  # no recipe; and a recipe with a change that nobody asked for
        monkeypatch.setattr(mend, "edited", lambda text, _, added=added: text + added)
        status, out, _ = doctor(str(file), "--fix", capsys=capsys)
        assert status == 1 and file.read_text() == text and out.endswith("--fix cannot mend the rest\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.yaml"], "gone.yaml: no such file"),
        (["gone.yaml", "--fix"], "gone.yaml: no such file"),
        (["broken.yaml"], "broken.yaml:2: not valid YAML"),
        (["broken.yaml", "--fix"], "broken.yaml:2: not valid YAML"),
        (["odd.yaml", "--fix"], "unknown key 'epoch'"),
        (["r.yaml", "train.epoch=3"], "unknown key 'epoch'"),
        (["--fix"], "there is no recipe to edit"),
        (["r.yaml", "train.epochs=3", "--fix"], "train.epochs=3 is on the command line"),
    ],
)
def test_what_keeps_the_command_from_working_is_2(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    written(model)
    Path("broken.yaml").write_text("model: {path: m}\ndata: [}\n")
    Path("odd.yaml").write_text("model: {path: m}\ndata: {train: d}\ntrain: {epoch: 3}\n")
    before = {path: path.read_bytes() for path in here.glob("*.yaml")}
    status, out, err = doctor(*words, capsys=capsys)
    assert status == 2 and not out and err.startswith("packtrain: error: ") and err.count("\n") == 1
    assert said in err and {path: path.read_bytes() for path in here.glob("*.yaml")} == before


def test_the_machine_alone_needs_no_torch(here: Path) -> None:
    code = (
        "import sys; from packtrain.cli.app import run; status = run(['doctor', '--json']);"
        "assert not {'torch', 'transformers', 'ruamel.yaml'} & set(sys.modules); sys.exit(status)"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "LD_LIBRARY_PATH": "", "PATH": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    machine = json.loads(done.stdout)["machine"]
    assert machine["programs"] == {"gcc": None, "g++": None, "ninja": None} and machine["packages"]["torch"]


def test_the_machine_alone(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_gpus", lambda _: 0)
    status, out, _ = doctor(capsys=capsys)
    assert status == 0 and "nothing is wrong with this machine" in out
    for word in ("GPUs", "NVIDIA driver", "torch", "optional", "compilers", "/dev/shm", "free disk", "MASTER_PORT"):
        assert word in out, word
    monkeypatch.setattr(module, "gather_host", lambda: Host(2, "535.104", "12.2"))
    status, out, _ = doctor(capsys=capsys)
    assert status == 1 and "torch-blind  launch.device: driver 535.104 shows 2 GPUs, and torch sees none" in out


def test_a_model_that_cannot_be_had_hides_no_fault_of_the_machine(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "usable_gpus", lambda _: 0)
    monkeypatch.setattr(module, "gather_host", lambda: Host(2, "535.104", "12.2"))
    Path("r.yaml").write_text("model: {path: nowhere}\ndata: {train: [chats.jsonl]}\n")
    assert {"model", "torch-blind"} == found("r.yaml", capsys=capsys)[1].keys()


def test_every_finding_is_in_the_docs() -> None:
    page = Path("docs/doctor.md").read_text(encoding="utf-8")
    assert findings.as_markdown() in page, "python -m packtrain.launch.findings"
    names = [kind.id for kind in findings.kinds()]
    assert len(set(names)) == len(names) > 50
