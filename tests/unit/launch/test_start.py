"""``start`` and ``resume`` up to the point where workers would be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.config import Recipe, build_recipe, dump_recipe, load_recipe
from packtrain.errors import UserError
from packtrain.launch import start as module
from packtrain.launch.folder import RunFolder
from packtrain.launch.lead import lead_detached
from packtrain.launch.prepare import named
from packtrain.launch.supervisor import Outcome


def recipe(**output: str) -> Recipe:
    return build_recipe({"model": {"path": "m"}, "data": {"train": "t"}, "output": output})


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A working directory with a recipe, and what was done, in order."""
    monkeypatch.chdir(tmp_path)
    Path("trial.yaml").write_text(dump_recipe(recipe(name="first")))
    done: list[str] = []

    def resolve(asked: Recipe, processes: int | None) -> tuple[Recipe, list[str]]:
        resolved = asked.model_copy(deep=True)
        if resolved.launch.processes == "auto":
            resolved.launch.processes = 1
        resolved.train.micro_batch_size = 3
        done.append("resolve")
        return resolved, ["slow; buy a GPU."]

    def supervise(folder: RunFolder, command: list[str], processes: int, **_: object) -> Outcome:
        done.append(f"supervise {processes}")
        folder.update_status(state="stopped", supervisor=None)
        return Outcome("stopped", 130)

    monkeypatch.setattr(module, "resolve", resolve)
    monkeypatch.setattr(module, "prepare", lambda _: done.append("prepare"))
    monkeypatch.setattr("packtrain.launch.prepare.plan_json", lambda _: done.append("plan") or {})
    monkeypatch.setattr("packtrain.launch.lead.supervise", supervise)
    return done


def test_start_writes_both_recipes_and_supervises(steps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert module.start("trial.yaml", ["launch.processes=2"]) == 130
    assert steps == ["resolve", "prepare", "plan", "supervise 2"]
    folder = RunFolder("runs/first")
    assert load_recipe(folder.recipe).train.micro_batch_size == 3
    assert load_recipe(folder.asked).train.micro_batch_size == "auto"
    out, err = capsys.readouterr()
    assert "packtrain runs resume first" in out and err == "packtrain: warning: slow; buy a GPU.\n"


def test_a_taken_name_is_found_before_the_data_is_prepared(steps: list[str]) -> None:
    module.start("trial.yaml")
    steps.clear()
    with pytest.raises(UserError, match="runs resume first"):
        module.start("trial.yaml")
    assert steps == ["resolve"]


def test_a_mistake_in_the_data_leaves_nothing(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_: Recipe) -> None:
        raise UserError("data.train", "is empty", "give rows")

    monkeypatch.setattr(module, "prepare", prepare)
    with pytest.raises(UserError, match="is empty"):
        module.start("trial.yaml")
    assert not Path("runs").exists()


def test_resume_takes_the_recipe_as_it_was(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module.start("trial.yaml")
    path = RunFolder("runs/first").path.absolute()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    steps.clear()
    assert module.resume(str(path)) == 130
    assert steps == ["prepare", "plan", "supervise 1"]
    assert Path.cwd() == path.parent.parent


def test_resume_on_other_processes_resolves_again(steps: list[str]) -> None:
    module.start("trial.yaml", ["output.name=auto"])
    (folder,) = (RunFolder(path) for path in Path("runs").iterdir())
    steps.clear()
    module.resume(folder.name, ["launch.processes=4"])
    assert steps == ["resolve", "prepare", "plan", "supervise 4"]
    assert load_recipe(folder.recipe).launch.processes == 4
    assert load_recipe(folder.recipe).output.name == folder.name


def test_automatic_names(tmp_path: Path) -> None:
    first = named(recipe(folder=str(tmp_path)), "conf/my data (2).yaml").output.name
    assert first.startswith("my-data-2-20") and len(first) == len("my-data-2-20261130-181512")
    assert named(recipe(name="given"), "a.yaml").output.name == "given"
    assert named(recipe(folder=str(tmp_path)), "....yaml").output.name.startswith("run-20")


def test_automatic_names_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20261130-181512")
    (tmp_path / "samsum-20261130-181512").mkdir()
    assert named(recipe(folder=str(tmp_path)), "samsum.yaml").output.name == "samsum-20261130-181512-2"


def test_a_detached_supervisor_that_cannot_lead_says_why_in_its_own_words(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    folder.recipe.write_text("modle: 3\n")
    with pytest.raises(UserError, match=r"recipe\.yaml: model: is missing; give model"):
        lead_detached(folder)
    ready = recipe()
    ready.launch.processes, ready.launch.device = 1, "cpu"
    folder.recipe.write_text(dump_recipe(ready))
    with folder.led(), pytest.raises(UserError, match="run: is running already"):
        lead_detached(folder)
