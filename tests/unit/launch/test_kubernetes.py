"""The manifest against Kubernetes' published schemas, and its command against torchrun's own parser."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from packtrain.cli.kubernetes import run_kubernetes
from packtrain.config import load_recipe
from packtrain.errors import UserError
from packtrain.launch.kubernetes import Claim, job_name

kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = ("1.31", "1.34", "1.37")
RECIPE = """\
model: {path: owner/model-1.5}
data: {train: samsum}  # 'quoted', "doubly", $HOME and $(HOME): nobody expands them
train: {learning_rate: 1.0e-5}
"""
SECRET = "hf_0123456789abcdef"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "Samsum 8b.yaml"
    path.write_text(RECIPE)
    return path


def made(recipe: Path, **options: Any) -> list[dict[str, Any]]:
    output = recipe.with_name("job.yaml")
    given: dict[str, Any] = {"image": "registry.local/packtrain:0.1", "nodes": 2, "gpus": 8, "claims": ["shared"]}
    run_kubernetes(str(recipe), output=str(output), **given | options)
    return list(yaml.safe_load_all(output.read_text()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": 1, "gpus": 1, "name": "a" * 61},
        {"nodes": 64, "name": "run-1", "namespace": "ml", "secrets": ["tokens", "wandb.v2"], "grace": 120},
        {"claims": ["shared", "data.v1:/data", "models:/models"], "retries": 0},
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(recipe: Path, options: dict[str, Any], version: str) -> None:
    for document in made(recipe, **options):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [("completions", "two"), ("completionMode", ["Indexed"]), ("podFailurPolicy", {}), ("template", "pod")],
)
def test_the_schema_refuses_a_broken_one(recipe: Path, key: str, value: Any) -> None:
    job = copy.deepcopy(made(recipe)[2])
    job["spec"][key] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_names_agree(recipe: Path) -> None:
    service, config_map, job = made(recipe, nodes=3, claims=["shared", "data:/data"], secrets=["tokens"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    name = service["metadata"]["name"]
    assert name == job["metadata"]["name"] == pod["subdomain"] == "samsum-8b"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert config_map["data"] == {"recipe.yaml": RECIPE}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/recipe"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert mounts["/work"]["persistentVolumeClaim"]["claimName"] == "shared"
    assert mounts["/data"]["persistentVolumeClaim"]["claimName"] == "data"
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]


def test_a_preempted_pod_is_tried_again_and_has_time_to_save(recipe: Path) -> None:
    spec = made(recipe, nodes=4, retries=5, grace=300)[2]["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert spec["backoffLimit"] == 20
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes takes a podFailurePolicy only with it
    environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    patience = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 0 < patience < pod["terminationGracePeriodSeconds"] == 300


@pytest.mark.parametrize(("index", "is_host"), [("0", "true"), ("1", "false")])
def test_torchrun_understands_the_command(recipe: Path, tmp_path: Path, index: str, is_host: str) -> None:
    """The script runs in a shell whose `python` writes down what it was given."""
    (container,) = made(recipe, nodes=2, name="first")[2]["spec"]["template"]["spec"]["containers"]
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    subprocess.run(["bash", "-n", "-c", container["command"][2]], check=True)
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": index}
    said = subprocess.run(container["command"], env=env, check=True, capture_output=True, text=True).stdout.splitlines()
    assert said[:2] == ["-m", "torch.distributed.run"]

    from torch.distributed.run import config_from_args, parse_args

    args = parse_args(said[2:])
    assert (args.module, args.training_script) == (True, "packtrain")
    assert args.training_script_args == ["train", "/recipe/recipe.yaml", "output.name=first", "--resume"]
    config, _, _ = config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.run_id) == (2, 2, 8, "first")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "first-0.first:29400")
    assert config.rdzv_configs["is_host"] == is_host


def test_nothing_of_this_machine_is_in_it(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    options: dict[str, Any] = {"image": "i", "nodes": 1, "gpus": 1, "claims": ["shared"], "secrets": ["tokens"]}
    run_kubernetes(str(recipe), **options)
    text = capsys.readouterr().out
    assert "kind: Job" in text
    assert SECRET not in text and str(recipe.parent) not in text


def test_paths_that_pods_do_not_see(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(
        "model: {path: ./models/tiny}\n"
        "data: {train: [/data/a.jsonl, /other/b.jsonl, 'rows.py:load', samsum, owner/name], template: ../x.jinja}\n"
        "output: {folder: /data/runs}\n"
    )
    made(recipe, claims=["shared", "data:/data"])
    told = [line.removeprefix("packtrain: warning: ") for line in capsys.readouterr().err.splitlines()]
    assert told == [
        "model.path: the pods look for ./models/tiny in /work, so copy it to claim shared.",
        "data.train: /other/b.jsonl is on no claim, so the pods see it only if it is in the image.",
        "data.train: the pods look for rows.py in /work, so copy it to claim shared.",
        "data.template: ../x.jinja is on no claim, so the pods see it only if it is in the image.",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "Run"}, "--name: 'Run' is not a DNS label; use at most 61 small letters"),
        ({"name": "1st"}, "--name: '1st' is not a DNS label"),
        ({"name": "a" * 61, "nodes": 11}, "is not a DNS label; use at most 60 "),
        ({"name": "a.b"}, "--name: 'a.b' is not a DNS label"),
        ({"name": "a\n"}, "is not a DNS label"),
        ({"namespace": "-"}, "--namespace: '-' is not a DNS label"),
        ({"secrets": ["HF_TOKEN=x"]}, "--secret: 'HF_TOKEN=x' is not a Kubernetes name"),
        ({"claims": ["a", "b"]}, "--claim: 'b' does not say where it is mounted; write b:/PATH."),
        ({"claims": ["a:work"]}, "--claim: 'work' is not an absolute path"),
        ({"claims": ["a", "b:/work/"]}, "--claim: two claims are mounted at /work"),
        ({"claims": []}, "output.folder: runs is on no claim, so it would be lost with its pod"),
        ({"claims": ["a:/data"]}, "output.folder: runs is on no claim"),
        ({"image": "a b"}, "--image: 'a b' is no image"),
    ],
)
def test_mistakes_are_sentences(recipe: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        made(recipe, **options)
    assert sentence in str(raised.value)
    assert not recipe.with_name("job.yaml").exists()


def test_a_name_from_the_recipe(recipe: Path) -> None:
    values = load_recipe(recipe)
    assert job_name(values, "x/8b_SFT.v2.yaml") == "run-8b-sft-v2"
    values.output.name = "Mine.1"
    assert job_name(values, recipe) == "mine-1"
    with pytest.raises(UserError, match="makes no DNS label; give --name"):
        job_name(load_recipe(recipe), "数据.yaml")


def test_claims_and_starting_without_torch() -> None:
    assert Claim.parse("shared", first=True) == Claim("shared", "/work")
    assert Claim.parse("data:/data/", first=False) == Claim("data", "/data")
    code = "import sys, packtrain.cli.kubernetes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
