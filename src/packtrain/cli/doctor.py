"""``packtrain doctor``: what would stop a run on this machine, and what mends it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.config import load_recipe
from packtrain.config.rule import SEVERITIES, Finding
from packtrain.errors import UserError
from packtrain.launch.disk_space import size
from packtrain.launch.doctor import examine, examine_machine
from packtrain.launch.inventory import inventory
from packtrain.launch.mend import Mended, mend
from packtrain.launch.secrets import redact

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ERRORS_FOUND = 1
_STYLES = {"error": "bold red", "warning": "yellow"}


def run_doctor(recipe_path: str | None, overrides: Sequence[str], fix: bool, as_json: bool) -> int:
    """Look at a recipe on this machine, or at the machine alone; 0 where no error was found.

    Raises:
        UserError: the recipe cannot be read, or there is nothing that ``fix`` could edit.
    """
    if recipe_path is None:
        if fix:
            raise UserError("--fix", "there is no recipe to edit", "give one")
        return _machine(as_json)
    if fix and overrides:
        what = f"it edits the file, and {overrides[0]} is on the command line"
        raise UserError("--fix", what, "write it into the recipe, or leave --fix out")
    mended = mend(Path(recipe_path)) if fix else None
    if mended:
        mended.write()
    findings = examine(load_recipe(recipe_path, overrides))
    if as_json:
        _print_json({"recipe": recipe_path}, findings, mended)
    else:
        _print_recipe(findings, mended)
    return _status(findings)


def _machine(as_json: bool) -> int:
    here, findings = inventory(), examine_machine()
    if as_json:
        _print_json({"machine": here}, findings)
        return _status(findings)
    console = _console()
    console.print(_described(here))
    if findings:
        console.print()
    _print(console, findings)
    if not findings:
        print("\nnothing is wrong with this machine; `packtrain doctor RECIPE.yaml` looks at a run on it")
    return _status(findings)


def _status(findings: Sequence[Finding]) -> int:
    return ERRORS_FOUND if any(finding.severity == "error" for finding in findings) else 0


def _print_json(what: dict[str, Any], findings: Sequence[Finding], mended: Mended | None = None) -> None:
    made: dict[str, Any] = {**what, "findings": [asdict(finding) for finding in findings]}
    if mended:
        made |= {"mended": [asdict(finding) for finding in mended.findings], "difference": mended.difference}
    print(redact(json.dumps(made, indent=2)))


def _print_recipe(findings: Sequence[Finding], mended: Mended | None) -> None:
    console = _console()
    if mended and mended.difference:
        print(redact(mended.difference), end="")
        rules = ", ".join(dict.fromkeys(finding.rule for finding in mended.findings))
        console.print(f"\n{mended.path} is changed; mended: {rules}\n", markup=False, soft_wrap=True)
    _print(console, findings)
    console.print(_closing(findings, mended is not None), markup=False, soft_wrap=True)


def _print(console: Console, findings: Sequence[Finding]) -> None:
    wide = max((len(finding.rule) for finding in findings), default=0)
    for finding in findings:
        console.print(f"{finding.severity:7}", style=_STYLES[finding.severity], end="  ")
        text = redact(f"{finding.rule:{wide}}  {finding.setting}: {finding.message}")
        console.print(text, markup=False, soft_wrap=True)
        console.print(redact(f"{'':7}  {'':{wide}}  -> {finding.mend}"), markup=False, soft_wrap=True)
    if findings:
        console.print()


def _closing(findings: Sequence[Finding], tried: bool) -> str:
    if not findings:
        return "nothing stands in the way of this run"
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    text = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
    fixable = sum(bool(finding.edits) for finding in findings)
    if tried:
        text += "; --fix cannot mend the rest"
    elif fixable:
        text += f"; --fix can mend {fixable} of them"
    return text if counts["error"] else f"nothing stands in the way of this run ({text})"


def _described(here: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _lines(here).items():
        table.add_row(name, text)
    return table


def _lines(here: dict[str, Any]) -> dict[str, str]:
    gpus = [f"{index} {gpu['name']}, {size(gpu['memory_bytes'])}" for index, gpu in enumerate(here["gpus"])]
    if here["visible_gpus"] != len(gpus):
        gpus.append(f"{here['visible_gpus']} of them visible (CUDA_VISIBLE_DEVICES)")
    driver = f"{here['driver']} (CUDA up to {here['driver_cuda']})" if here["driver"] else "none"
    torch = f"{here['packages']['torch']} ({'CUDA ' + here['torch_cuda'] if here['torch_cuda'] else 'CPU build'})"
    others = [f"{name} {version}" for name, version in here["packages"].items() if version and name != "torch"]
    return {
        "GPUs": "\n".join(gpus) or "none",
        "NVIDIA driver": driver,
        "Python": here["python"],
        "torch": torch,
        "libraries": ", ".join(others),
        "optional": ", ".join(f"{name} {found or 'no'}" for name, found in here["optional_packages"].items()),
        "compilers": ", ".join(f"{name} {'yes' if path else 'no'}" for name, path in here["programs"].items()),
        "host": f"{here['num_cores']} cores, {size(here['host_memory_bytes'])} of memory, "
        f"/dev/shm {size(here['shared_memory_bytes'])}",
        "free disk": "\n".join(f"{size(free)} for {folder}" for folder, free in here["free_disk_bytes"].items()),
        "MASTER_PORT": here["master_port"] or "not set: none is needed on one node",
    }


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
