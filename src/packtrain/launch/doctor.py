"""What would stop a run, found before it starts: the rules, the plan, the disk, the data, what is there already."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from packtrain.config import Recipe, build_recipe, dump_recipe
from packtrain.config.facts import Facts, ModelFacts
from packtrain.config.host_rules import HOST_RULES
from packtrain.config.resolve import auto_max_length
from packtrain.config.rule import Finding
from packtrain.config.rules import check, worst_first
from packtrain.errors import UserError
from packtrain.launch.disk_space import disk_shortage, unwritable
from packtrain.launch.facts import gather_facts, num_processes, usable_gpus
from packtrain.launch.folder import RunFolder
from packtrain.launch.host import gather_host
from packtrain.launch.ports import taken_port
from packtrain.launch.resolve_recipe import fill, shortage
from packtrain.launch.secrets import refuse_secrets
from packtrain.launch.start import adopted
from packtrain.models.files import WeightFiles
from packtrain.models.locate import model_folder
from packtrain.plan.report import plan_resolved

T = TypeVar("T")


def examine_machine() -> list[Finding]:
    """What this machine lacks for any run."""
    any_recipe = build_recipe({"model": {"path": "demo"}, "data": {"train": ["samsum_mini"]}})
    port = taken_port()
    return worst_first(_machine_findings(any_recipe) + ([port] if port else []))


def _machine_findings(recipe: Recipe) -> list[Finding]:
    """What this machine lacks for a recipe, whatever its model."""
    gpus, processes = usable_gpus(recipe), num_processes(recipe)
    facts = Facts(
        processes=processes, local_processes=processes, device="cuda" if gpus else "cpu", num_gpus=gpus, memory=0,
        bf16=True, num_cores=len(os.sched_getaffinity(0)), model=ModelFacts(0, 0, 0, 0, 0, None), host=gather_host(),
    )  # fmt: skip
    return check(recipe, facts, HOST_RULES)


def examine(asked: Recipe) -> list[Finding]:
    """All that would stop a recipe's run here, or is unwise; no weights are loaded, and nothing is written."""
    look = Look(asked)
    return worst_first(look.settings() + look.surroundings())


class Look:
    """A look at one recipe on this machine. What a user's mistake hides is not looked at."""

    def __init__(self, asked: Recipe) -> None:
        self.asked = asked
        self.recipe: Recipe | None = None
        self.facts: Facts | None = None
        self.resolved: Recipe | None = None

    def settings(self) -> list[Finding]:
        """The rules, and where none is broken the plan: all that edits of the recipe may mend."""
        found: list[Finding] = []
        self.recipe = _tried(found, "deepspeed-config", lambda: adopted(self.asked))
        if self.recipe is None:
            return found
        recipe = self.recipe
        self.facts = _tried(found, "model", lambda: replace(gather_facts(recipe, planned=True), host=gather_host()))
        if self.facts is None:
            return found + _machine_findings(recipe)
        found += check(recipe, self.facts)
        if any(finding.severity == "error" for finding in found):
            return found
        self.resolved = fill(recipe, self.facts)
        return found + shortage(recipe, plan_resolved(self.resolved, self.facts))

    def surroundings(self) -> list[Finding]:
        """Disk, data, weights, the run's name and the port; after ``settings``."""
        found: list[Finding] = []
        refused = unwritable(self.asked)
        if refused:
            found.append(refused)
        elif self.resolved and self.facts and (short := disk_shortage(self.resolved, self.facts.model)):
            found.append(short)
        if self.facts:
            found += self._weights() + self._data(self.facts.model)
        found += self._run_folder()
        _tried(found, "secret", lambda: refuse_secrets(dump_recipe(self.asked)))
        port = taken_port()
        return found + ([port] if port else [])

    def _weights(self) -> list[Finding]:
        found: list[Finding] = []
        folder = Path(self.asked.model.path).expanduser()
        if folder.is_dir():
            _tried(found, "weights", lambda: WeightFiles.open(folder))
        return found

    def _data(self, model: ModelFacts) -> list[Finding]:
        from packtrain.data.sample import ROWS, sample_data

        recipe, found = self.resolved or self.asked, list[Finding]()
        given = recipe.data.max_length
        length = auto_max_length(model.max_length) if given == "auto" else given
        folder = _tried(found, "model", lambda: model_folder(recipe.model.path, weights=False))
        if folder is None:
            return found
        sample = _tried(found, "data", lambda: sample_data(recipe.data, folder, length, recipe.model.add_tokens))
        for note in sample.notes() if sample else []:
            mend = "see all of it with `packtrain data`"
            what = f"of the first {ROWS} rows of each data set: {note}"
            found.append(Finding("data-rows", "data", "warning", what, mend))
        return found

    def _run_folder(self) -> list[Finding]:
        output = self.asked.output
        if output.name == "auto":
            return []
        try:
            RunFolder.unused(output.folder, output.name)
        except UserError as error:
            return [replace(Finding.of("run-exists", error), severity="warning")]
        return []


def _tried(found: list[Finding], rule: str, look: Callable[[], T]) -> T | None:
    """What ``look`` returns; a user's mistake is among ``found`` instead."""
    try:
        return look()
    except UserError as error:
        found.append(Finding.of(rule, error))
        return None
