"""A Kubernetes manifest that trains a recipe on several nodes: Service, recipe, and an indexed Job. Without torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from packtrain.config import Recipe
from packtrain.errors import UserError

WORK = "/work"
"""Where the first claim is mounted and the command starts: relative paths of a recipe lie in it."""
RECIPE = "/recipe/recipe.yaml"
PORT = 29400
JOIN_SECONDS = 1800
"""How long the first pods wait for the last one: images are pulled and nodes come up meanwhile."""
RESTARTS = 3
"""How often torchrun starts a node's workers anew, without a new pod."""
_KILL_SECONDS = 15
"""What is left of the grace period for torchrun itself, after its workers."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LABEL_LENGTH, _SUBDOMAIN_LENGTH = 63, 253


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim that exists, and where it is mounted."""

    name: str
    mount: str

    @classmethod
    def parse(cls, word: str, first: bool) -> Claim:
        """``PVC`` or ``PVC:/mount``; the first one is mounted at ``/work`` if it does not say."""
        name, colon, mount = word.partition(":")
        _check_subdomain("--claim", name)
        if not colon and not first:
            raise UserError("--claim", f"{word!r} does not say where it is mounted", f"write {name}:/PATH")
        path = PurePosixPath(mount if colon else WORK)
        if not path.is_absolute() or ".." in path.parts or path == PurePosixPath("/"):
            raise UserError("--claim", f"{mount!r} is not an absolute path", f"write {name}:/PATH")
        return cls(name, str(path))


@dataclass(frozen=True)
class ClusterJob:
    """What a manifest is made of besides the recipe.

    Attributes:
        retries: pods that may fail for each node; a preempted one does not count.
        grace: seconds between SIGTERM and SIGKILL: time for a checkpoint.
        secrets: Secrets whose keys become environment variables.
    """

    name: str
    image: str
    nodes: int
    gpus: int
    claims: tuple[Claim, ...]
    namespace: str | None = None
    secrets: tuple[str, ...] = ()
    retries: int = 3
    grace: int = 600

    def __post_init__(self) -> None:
        _check_label("--name", self.name, _LABEL_LENGTH - len(f"-{self.nodes - 1}"))
        if self.namespace is not None:
            _check_label("--namespace", self.namespace, _LABEL_LENGTH)
        for secret in self.secrets:
            _check_subdomain("--secret", secret)
        if not self.image or any(letter.isspace() for letter in self.image):
            raise UserError("--image", f"{self.image!r} is no image", "write it like registry/name:tag")
        mounts = [claim.mount for claim in self.claims]
        if twice := next((mount for mount in mounts if mounts.count(mount) > 1), None):
            raise UserError("--claim", f"two claims are mounted at {twice}", "give each a path of its own")

    @property
    def script(self) -> str:
        """What a pod's shell runs. Pod 0 holds the rendezvous: it is told so, since its name may not resolve yet."""
        configuration = f"is_host=$is_host,join_timeout={JOIN_SECONDS},read_timeout={JOIN_SECONDS}"
        words = [
            "exec python -m torch.distributed.run",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.gpus}",
            f"--max-restarts={RESTARTS}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={shlex.quote(self.name)}",
            f"--rdzv-endpoint={self.name}-0.{self.name}:{PORT}",
            f'--rdzv-conf="{configuration}"',
            f"-m packtrain train {RECIPE} output.name={shlex.quote(self.name)} --resume",
        ]
        first = 'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then is_host=true; else is_host=false; fi'
        return first + "\n" + " \\\n  ".join(words) + "\n"


def job_name(recipe: Recipe, recipe_path: str | Path) -> str:
    """The run's name, or the recipe's, as a DNS label."""
    name = Path(recipe_path).stem if recipe.output.name == "auto" else recipe.output.name
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label:
        raise UserError("--name", f"{name!r} makes no DNS label", "give --name")
    return label if label[0].isalpha() else f"run-{label}"


def manifest(recipe_text: str, job: ClusterJob) -> str:
    """The manifest as YAML."""
    documents = [_service(job), _config_map(recipe_text, job), _job(job)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def warnings(recipe: Recipe, job: ClusterJob) -> list[str]:
    """Paths of the recipe that a pod may not see, a sentence each.

    Raises:
        UserError: the run folder would be lost with its pod.
    """
    output = _in_pod(recipe.output.folder)
    if _claim_of(output, job) is None:
        what = f"{recipe.output.folder} is on no claim, so it would be lost with its pod"
        raise UserError("output.folder", what, "mount a claim there with --claim PVC:/PATH, or give a path in one")
    return [sentence for key, path in _local_paths(recipe) if (sentence := _unseen(key, path, job))]


def _unseen(key: str, path: str, job: ClusterJob) -> str:
    claim = _claim_of(_in_pod(path), job)
    if claim is None:
        return f"{key}: {path} is on no claim, so the pods see it only if it is in the image."
    if not PurePosixPath(path).is_absolute():
        return f"{key}: the pods look for {path} in {WORK}, so copy it to claim {claim.name}."
    return ""


def _in_pod(path: str) -> PurePosixPath:
    return PurePosixPath(WORK, path)


def _claim_of(path: PurePosixPath, job: ClusterJob) -> Claim | None:
    if ".." in path.parts or any(part.startswith("~") for part in path.parts):
        return None
    return next((claim for claim in job.claims if path.is_relative_to(claim.mount)), None)


def _local_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Settings that name something on a disk, and not a hub id or a registered name."""
    model = recipe.model.path
    if model != "demo" and (Path(model).expanduser().exists() or not _HUB_ID.fullmatch(model)):
        yield "model.path", model
    evals = recipe.data.eval if isinstance(recipe.data.eval, list) else []
    for key, entries in (("data.train", recipe.data.train), ("data.eval", evals)):
        for entry in entries:
            path = re.sub(r"(\.py):\w+$", r"\1", entry.path)
            if Path(path).suffix or Path(path).expanduser().exists() or path[0] in "/.~":
                yield key, path
    parallel = recipe.parallel
    named = {
        "data.template": recipe.data.template if recipe.data.template.endswith(".jinja") else None,
        "data.cache": recipe.data.cache if recipe.data.cache != "auto" else None,
        "parallel.deepspeed_config": parallel.deepspeed_config,
        "parallel.offload_dir": parallel.offload_dir,
    }
    yield from ((key, path) for key, path in named.items() if isinstance(path, str))


def _metadata(job: ClusterJob, name: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "packtrain", "app.kubernetes.io/instance": job.name}
    place = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name, **place, "labels": labels}


def _service(job: ClusterJob) -> dict[str, Any]:
    """Headless: it gives the pods their names, before they are ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _config_map(recipe_text: str, job: ClusterJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-recipe"),
        "data": {PurePosixPath(RECIPE).name: recipe_text},
    }


def _job(job: ClusterJob) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, job.name),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": job.retries * job.nodes,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {"metadata": {"labels": _metadata(job, job.name)["labels"]}, "spec": _pod(job)},
        },
    }


def _pod(job: ClusterJob) -> dict[str, Any]:
    volumes = [(f"claim-{n}", claim) for n, claim in enumerate(job.claims)]
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "containers": [_container(job, [{"name": name, "mountPath": claim.mount} for name, claim in volumes])],
        "volumes": [
            {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *({"name": name, "persistentVolumeClaim": {"claimName": claim.name}} for name, claim in volumes),
        ],
    }


def _container(job: ClusterJob, claim_mounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    caches = f"{job.claims[0].mount}/.cache"
    environment = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace - _KILL_SECONDS),
        "PACKTRAIN_CACHE": f"{caches}/packtrain",
        "HF_HOME": f"{caches}/huggingface",
        "PYTHONUNBUFFERED": "1",
    }
    return {
        "name": "train",
        "image": job.image,
        "workingDir": WORK,
        "command": ["/bin/sh", "-c", job.script],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        **({"envFrom": [{"secretRef": {"name": secret}} for secret in job.secrets]} if job.secrets else {}),
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus}},
        "volumeMounts": [
            {"name": "recipe", "mountPath": str(PurePosixPath(RECIPE).parent), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *claim_mounts,
        ],
    }


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks that can be read; no anchors for what stands twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _check_label(option: str, name: str, length: int) -> None:
    if not _LABEL.fullmatch(name) or len(name) > length:
        mend = f"use at most {length} small letters, digits and '-', a letter first and no '-' last"
        raise UserError(option, f"{name!r} is not a DNS label", mend)


def _check_subdomain(option: str, name: str) -> None:
    if not _SUBDOMAIN.fullmatch(name) or len(name) > _SUBDOMAIN_LENGTH:
        raise UserError(option, f"{name!r} is not a Kubernetes name", "use small letters, digits, '-' and '.'")
