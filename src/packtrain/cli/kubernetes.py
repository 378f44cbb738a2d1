"""``packtrain kubernetes``: a manifest that trains a recipe on the nodes of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from packtrain.config import load_recipe
from packtrain.config.load import read_text
from packtrain.errors import UserError
from packtrain.launch.folder import refuse_other_than_file, write_text
from packtrain.launch.kubernetes import Claim, ClusterJob, job_name, manifest, warnings
from packtrain.launch.secrets import refuse_secrets


def run_kubernetes(
    recipe_path: str,
    *,
    image: str,
    nodes: int,
    gpus: int,
    claims: Sequence[str],
    name: str | None = None,
    namespace: str | None = None,
    secrets: Sequence[str] = (),
    retries: int = 3,
    grace: int = 600,
    output: str | None = None,
) -> None:
    """Print the manifest, or write it to ``output``; what the pods will not see is said on stderr.

    Raises:
        UserError: the recipe or an option is at fault.
    """
    recipe = load_recipe(recipe_path)
    job = ClusterJob(
        name=name if name is not None else job_name(recipe, recipe_path),
        image=image,
        nodes=nodes,
        gpus=gpus,
        claims=tuple(Claim.parse(word, first=number == 0) for number, word in enumerate(claims)),
        namespace=namespace,
        secrets=tuple(secrets),
        retries=retries,
        grace=grace,
    )
    for warning in warnings(recipe, job):
        print(f"packtrain: warning: {warning}", file=sys.stderr)
    text = manifest(read_text(Path(recipe_path)), job)
    refuse_secrets(text, "the manifest")
    if output is None:
        print(text, end="")
        return
    refuse_other_than_file("--output", Path(output).expanduser())
    try:
        write_text(Path(output).expanduser(), text)
    except OSError as error:
        raise UserError("--output", f"{output} cannot be written ({error.strerror})", "give another file") from error
    print(f"{output}: {nodes} x {gpus} GPUs; start it with: kubectl apply -f {output}")
