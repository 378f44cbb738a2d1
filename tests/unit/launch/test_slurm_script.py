"""The batch script for Slurm, its options, and following a job: with programs that answer as Slurm does."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from packtrain.cli.slurm import run_slurm
from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder
from packtrain.launch.slurm import Job, Options, make_job, time_limit
from packtrain.launch.slurm_job import follow, submit

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_recipe(path: Path, **sections: Any) -> Path:
    sections = {"launch": {"device": "cpu"}, **sections}
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"train": "t"}, **sections}))
    return path


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def fake(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(nodes=4, partition="gpu,long", time="1-12:00:00", account="a.b", qos="high", cpus=8),
        Options(requeue=False, signal=600, setup=("module load cuda", "source ~/env/bin/activate"), extra=("--mem=0",)),
    ],
)
def test_the_script_is_bash_and_asks_for_what_was_given(here: Path, options: Options) -> None:
    text = make_job(write_recipe(here / "r.yaml"), [], options).text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    asked = directives(text)
    assert asked["--nodes"] == str(options.nodes) and asked["--ntasks-per-node"] == "1"
    assert asked["--signal"] == f"B:USR1@{options.signal}"
    assert ("--requeue" if options.requeue else "--no-requeue") in asked
    assert asked.get("--time") == options.time and asked.get("--partition") == options.partition
    assert "--gpus-per-node" not in asked
    assert all(f"\n{line}\n" in text for line in options.setup)
    assert all(word.partition("=")[0] in asked for word in options.extra)
    # Slurm reads no option after the first command.
    assert text.rindex("#SBATCH") < text.index("set -eo pipefail")


def test_gpus_are_those_of_the_option_or_of_the_recipe(here: Path) -> None:
    recipe = write_recipe(here / "r.yaml", launch={})
    assert directives(make_job(recipe, [], Options(gpus=8)).text)["--gpus-per-node"] == "8"
    text = make_job(recipe, ["launch.processes=4"], Options()).text
    assert directives(text)["--gpus-per-node"] == directives(text)["--cpus-per-task"] == "4"
    assert "--nproc-per-node 4 " in text
    assert directives(make_job(recipe, ["launch.gpus=2"], Options()).text)["--gpus-per-node"] == "2"
    with pytest.raises(UserError, match=r"--gpus: not given.*give the GPUs of each node"):
        make_job(recipe, [], Options())
    with pytest.raises(UserError, match=r"8 a node with launch.processes: 4"):
        make_job(recipe, ["launch.processes=4"], Options(gpus=8))
    with pytest.raises(UserError, match=r"8 with launch.device: cpu"):
        make_job(recipe, ["launch.device=cpu"], Options(gpus=8))


def test_what_a_user_typed_reaches_the_command_as_it_is(here: Path) -> None:
    """The script runs with programs in place of Slurm's and of Python; its words are what torchrun would get."""
    folder = here / "it's $HOME; `x`"
    folder.mkdir()
    recipe = write_recipe(folder / "my recipe.yaml", output={"folder": str(folder / "a b")})
    word = "data.train=a b'c\"$(touch gone)"
    with pytest.raises(UserError, match=r"#SBATCH --output.*has quotes"):
        make_job(recipe, [word], Options())
    job = make_job(recipe, [word, f"output.folder={here / 'a b'}"], Options(setup=["true"]))
    fake(here / "bin", "srun", 'printf "%s\\0" "$@" >words')
    fake(here / "bin", "scontrol", "echo '   NodeAddr=10.1.2.3 NodeHostName=n'")
    python = f'exec {shlex.quote(sys.executable)} "$@"'
    fake(here / "bin", "python3", f'[[ $3 == runs ]] && echo \'{{"state": "done"}}\' || {python}')
    env = {"PATH": f"{here / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    env |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(["bash"], input=job.text, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = (here / "words").read_text().split("\0")
    assert words[words.index("train") + 1 :] == [str(recipe), word, f"output.folder={here / 'a b'}",
                                                  "output.name='my-recipe-7'", "--resume", ""]  # fmt: skip
    assert words[words.index("--rdzv-endpoint") + 1].startswith("10.1.2.3:")
    assert not (here / "gone").exists()


@pytest.mark.parametrize(
    ("state", "job", "node", "requeue", "again"),
    [
        ("stopped", "JobState=RUNNING PreemptTime=None", "true", True, False),  # by `runs stop`
        ("stopped", "JobState=RUNNING PreemptTime=2026-12-01T05:00:00", "true", True, True),
        ("stopped", "JobState=CANCELLED PreemptTime=None", "true", True, False),
        ("running", "JobState=RUNNING PreemptTime=None", "false", True, True),  # a node is gone
        ("running", "JobState=RUNNING PreemptTime=None", "false", False, False),
        ("running", "JobState=CANCELLED PreemptTime=None", "false", True, False),
        ("failed", "JobState=RUNNING PreemptTime=None", "true", True, False),
    ],
)
def test_when_the_job_is_queued_again(here: Path, state: str, job: str, node: str, requeue: bool, again: bool) -> None:
    text = make_job(write_recipe(here / "r.yaml"), [], Options(setup=["true"], requeue=requeue)).text
    fake(here / "bin", "srun", f"[[ $1 == --overlap ]] && exec {node}; exit 9")
    fake(here / "bin", "scontrol", f'[[ $1 == requeue ]] && echo "$2" >requeued; echo "NodeAddr=10.1.2.3 {job}"')
    python = f'exec {shlex.quote(sys.executable)} "$@"'
    fake(here / "bin", "python3", f'[[ $3 == runs ]] && echo \'{{"state": "{state}"}}\' || {python}')
    env = {"PATH": f"{here / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    env |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert (here / "requeued").exists() == again


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 0}, "--nodes: 0 is not allowed; give a number of at least 1."),
        ({"gpus": -1}, "--gpus: -1 is not allowed; give a number of at least 0."),
        ({"cpus": 0}, "--cpus: 0 is not allowed; give a number of at least 1."),
        ({"signal": 0}, "--signal: 0 is not allowed; give seconds from 1 to 65535."),
        ({"time": "soon"}, "--time: 'soon' is not a time limit; write it like 90, 2:30:00 or 1-12:00:00."),
        ({"time": "2"}, "--time: 2 is no longer than the 120 s of --signal; give the run more time."),
        ({"partition": "a\n#SBATCH --x"}, "--partition: 'a\\n#SBATCH --x' is not a name in Slurm"),
        ({"account": "my account"}, "--account: 'my account' is not a name in Slurm"),
        ({"extra": ("mem=0",)}, "--sbatch: 'mem=0' is not an option of sbatch; write it like --sbatch=--mem=0."),
        ({"extra": ("--mem=0\nrm x",)}, "--sbatch: '--mem=0\\nrm x' is not an option of sbatch"),
    ],
)
def test_a_wrong_option_is_one_sentence(here: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job(write_recipe(here / "r.yaml"), [], replace(Options(), **changes))
    assert str(caught.value).startswith(sentence)


def test_a_wrong_recipe_is_found_before_the_submission(here: Path) -> None:
    with pytest.raises(UserError, match="unknown key 'trian'"):
        make_job(write_recipe(here / "r.yaml", trian={}), [], Options())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("5:30", 330), ("1:30:00", 5400), ("2-12", 216000), ("1-0:30", 88200), ("1-1:1:1", 90061),
     ("UNLIMITED", None)],
)  # fmt: skip
def test_time_limits_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert time_limit(text) == seconds


def test_the_script_is_a_new_file_or_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(here / "r.yaml"))
    assert run_slurm(recipe, [], Options(), None, submit=False) == 0
    assert "submit it with: sbatch r.sbatch" in capsys.readouterr().out
    assert (here / "runs" / "slurm").is_dir()  # Slurm does not make it, and drops the output where it is missing
    assert run_slurm(recipe, [], Options(), None, submit=False) == 0
    with pytest.raises(UserError, match=r"r.sbatch: exists and is different; remove it"):
        run_slurm(recipe, [], Options(nodes=2), None, submit=False)
    capsys.readouterr()
    run_slurm(recipe, [], Options(), "-", submit=False)
    assert capsys.readouterr().out == (here / "r.sbatch").read_text()


def test_a_file_that_cannot_be_written_is_one_sentence(here: Path) -> None:
    recipe = str(write_recipe(here / "r.yaml"))
    with pytest.raises(
        UserError, match=r"no/such/r.sbatch: cannot be written \(No such file or directory\); give --out"
    ):
        run_slurm(recipe, [], Options(), "no/such/r.sbatch", submit=False)
    (here / "runs" / "slurm").rmdir()
    (here / "runs" / "slurm").touch()
    with pytest.raises(UserError, match=r"output.folder: .*runs/slurm cannot be made"):
        run_slurm(recipe, [], Options(), None, submit=False)


def job_of(here: Path) -> Job:
    return make_job(write_recipe(here / "r.yaml"), [], Options())


def test_sbatch_is_missing_or_refuses(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here / "bin"))
    with pytest.raises(UserError, match=r"sbatch: no such program here; submit on a login node"):
        submit(job_of(here))
    monkeypatch.setenv("PATH", f"{here / 'bin'}:/usr/bin:/bin")
    fake(here / "bin", "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(UserError, match=r"^sbatch: invalid partition specified: x; mend what it names"):
        submit(job_of(here))
    fake(here / "bin", "sbatch", "cat >got; echo '31;cluster'")
    assert submit(job_of(here)) == "31"
    assert (here / "got").read_text() == job_of(here).text


def play(here: Path, monkeypatch: pytest.MonkeyPatch, squeue: list[str], end: str) -> None:
    """squeue answers line after line, then nothing; scontrol tells the end."""
    (here / "lines").write_text("".join(f"{line}\n" for line in squeue))
    fake(here / "bin", "squeue", "head -1 lines; sed -i 1d lines")
    fake(here / "bin", "scontrol", end)
    monkeypatch.setenv("PATH", f"{here / 'bin'}:/usr/bin:/bin")


def make_run(here: Path, state: str, **changes: Any) -> RunFolder:
    folder = RunFolder.create(here / "runs", "r-5")
    folder.update_status(state=state, **changes)
    step = {"event": "step", "step": 3, "loss": 1.5, "tokens_per_second": 10.0}
    folder.events.write_text(json.dumps(step) + "\n")
    return folder


@pytest.mark.parametrize(("state", "end", "status"), [("done", "COMPLETED", 0), ("stopped", "FAILED", 130),
                                                      ("running", "NODE_FAIL", 1)])  # fmt: skip
def test_a_job_is_followed_through_a_requeue(
    here: Path, monkeypatch: pytest.MonkeyPatch, state: str, end: str, status: int
) -> None:
    squeue = ["PENDING|Priority|", "RUNNING|None|n[1-2]", "RUNNING|None|n[1-2]", "COMPLETING|None|n[1-2]"]
    squeue += ["PENDING|BeginTime|", "RUNNING|None|n[3-4]"]
    play(here, monkeypatch, squeue, f"echo 'JobId=5 JobState={end} Reason=None'")
    make_run(here, state)
    stream = io.StringIO()
    assert follow(job_of(here), "5", 0.01, stream) == status
    said = stream.getvalue()
    shown = [line.removeprefix("job 5: ") for line in said.splitlines() if line.startswith("job 5: ")]
    assert shown == ["PENDING (Priority)", "RUNNING on n[1-2]", "COMPLETING on n[1-2]", "PENDING (BeginTime)",
                     "RUNNING on n[3-4]", end]  # fmt: skip
    assert said.count("step 3/") == 1


def test_a_failed_run_says_why(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(here, monkeypatch, [], "echo JobState=FAILED")
    make_run(here, "failed", error={"rank": 3, "message": "ValueError: bad row", "log": ""})
    stream = io.StringIO()
    assert follow(job_of(here), "5", 0.01, stream) == 1
    assert "rank 3 failed: ValueError: bad row" in stream.getvalue()


def test_a_run_that_never_started_shows_the_jobs_output(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(here, monkeypatch, [], "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job = job_of(here)
    job.logs.mkdir(parents=True)
    job.log("5").write_text("bash: module: command not found\n")
    stream = io.StringIO()
    assert follow(job, "5", 0.01, stream) == 1
    assert "job 5: forgotten" in stream.getvalue() and "  | bash: module: command not found" in stream.getvalue()


def test_a_silent_slurm_is_asked_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = "echo 'Unable to contact slurm controller' >&2; exit 1"
    play(here, monkeypatch, [], f"if [ -e asked ]; then echo JobState=COMPLETED; else touch asked; {unreachable}; fi")
    make_run(here, "done")
    began = time.monotonic()
    assert follow(job_of(here), "5", 0.5, io.StringIO()) == 0
    assert time.monotonic() - began >= 0.5


def test_ctrl_c_leaves_the_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    play(here, monkeypatch, ["PENDING|Resources|"] * 3, "exit 1")
    monkeypatch.setattr("packtrain.launch.slurm_job.time.sleep", interrupt)
    stream = io.StringIO()
    assert follow(job_of(here), "5", 0.01, stream) == 130
    assert "job 5 goes on; end it with `scancel 5`" in stream.getvalue()


def test_a_secret_of_the_environment_is_not_written_into_the_script(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    options = Options(setup=("export WANDB_API_KEY=0123456789abcdef",))
    with pytest.raises(UserError, match="the script: it holds the value of WANDB_API_KEY") as caught:
        make_job(write_recipe(here / "r.yaml"), [], options)
    assert "0123456789abcdef" not in str(caught.value)
