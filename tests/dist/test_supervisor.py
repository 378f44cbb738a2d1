"""The supervisor with real processes: who fails is named, who is told to stop stops, nobody survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.trial import wait as wait_for

from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder
from packtrain.launch.gpus import Claim, Gpu, Reservation
from packtrain.launch.supervisor import Outcome, supervise

pytestmark = pytest.mark.timeout(40)

PRELUDE = """
import os, signal, subprocess, sys, time
from packtrain.errors import UserError
from packtrain.launch.folder import RunFolder
from packtrain.launch.process import StopFlag, die_with_supervisor
from packtrain.launch.worker import raise_at_once

die_with_supervisor()
folder, rank = RunFolder(sys.argv[1]), int(os.environ["RANK"])

def main():
"""
EPILOGUE = """
try:
    main()
except BaseException as error:
    raise_at_once(folder, error)
"""
SUPERVISE = """
import sys
from packtrain.launch.folder import RunFolder
from packtrain.launch.supervisor import supervise

folder = RunFolder(sys.argv[1])
sys.exit(supervise(folder, [sys.executable, sys.argv[2], sys.argv[1]], 2).exit)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "trial")


def script(folder: RunFolder, body: str) -> Path:
    """A worker whose ``main`` is ``body``."""
    path = folder.path / "worker.py"
    path.write_text(PRELUDE + textwrap.indent(textwrap.dedent(body), "    ") + EPILOGUE)
    return path


def run(folder: RunFolder, body: str, processes: int = 2) -> Outcome:
    return supervise(folder, [sys.executable, str(script(folder, body)), str(folder.path)], processes)


def in_background(folder: RunFolder, body: str) -> subprocess.Popen[bytes]:
    """A supervisor in a process of its own, its two workers past their start."""
    launcher = folder.path / "supervise.py"
    launcher.write_text(SUPERVISE)
    command = [sys.executable, str(launcher), str(folder.path), str(script(folder, body))]
    process = subprocess.Popen(command, start_new_session=True)
    wait_for(lambda: all((folder.path / f"ready-{rank}").exists() for rank in range(2)), 10)
    return process


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def worker_pids(folder: RunFolder) -> list[int]:
    return [rank["pid"] for rank in folder.read_status().ranks]


READY = "(folder.path / f'ready-{rank}').touch()\n"
POLITE = (
    "stop = StopFlag(); stop.listen()\n"
    + READY
    + "while not stop.set: time.sleep(0.02)\n"
    + "(folder.path / f'saved-{rank}').touch()\n"
)
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)\n"


def test_all_ranks_succeed(folder: RunFolder) -> None:
    outcome = run(folder, "print(os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'], os.environ['LOCAL_RANK'])")
    assert outcome == Outcome("done", 0)
    status = folder.read_status()
    assert (status.state, status.exit, [rank["exit"] for rank in status.ranks]) == ("done", 0, [0, 0])
    assert folder.log(1).read_text() == "2 127.0.0.1 1\n"


def test_bug_names_rank_and_ends_the_one_that_hangs(folder: RunFolder) -> None:
    begun = time.monotonic()
    outcome = run(folder, "if rank == 1: raise ValueError('bad row')\ntime.sleep(60)")
    assert time.monotonic() - begun < 5
    assert (outcome.state, outcome.exit) == ("failed", 1)
    assert outcome.failure and outcome.failure.rank == 1 and outcome.failure.message == "ValueError: bad row"
    assert "Traceback" in folder.log(1).read_text()
    status = folder.read_status()
    assert status.error == {**outcome.failure.as_status()} and status.ranks[0]["exit"] == -signal.SIGTERM


def test_the_first_of_two_failures_counts(folder: RunFolder) -> None:
    outcome = run(folder, "time.sleep(0.4 if rank == 0 else 0.1)\nraise ValueError(f'from {rank}')")
    assert outcome.failure and outcome.failure.message == "ValueError: from 1"


def test_lost_peer_is_a_consequence(folder: RunFolder) -> None:
    body = """
    if rank == 0:
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    outcome = run(folder, body)
    assert outcome.failure and outcome.failure.rank == 1 and outcome.failure.kind == "signal"


def test_sigkill_is_named(folder: RunFolder) -> None:
    outcome = run(folder, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert outcome.exit == 1 and outcome.failure
    assert outcome.failure.message == "rank 1 was killed by SIGKILL"


def test_exit_without_a_word(folder: RunFolder) -> None:
    outcome = run(folder, "if rank == 0: os._exit(7)\ntime.sleep(60)")
    assert outcome.failure and outcome.failure.message == "rank 0 ended with exit status 7"


def test_user_error_is_exit_2(folder: RunFolder) -> None:
    outcome = run(folder, "raise UserError('train.epochs', 'is odd', 'give an even number')")
    assert outcome.exit == 2 and outcome.failure and outcome.failure.kind == "user"
    assert str(outcome.failure.user_error()) == "train.epochs: is odd; give an even number."


def test_deaf_rank_is_killed_after_the_grace(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.launch.supervisor.GRACE_SECONDS", 0.5)
    run(folder, "if rank == 1: time.sleep(0.5); raise ValueError\n" + DEAF)
    assert folder.read_status().ranks[0]["exit"] == -signal.SIGKILL


def test_old_error_files_do_not_count(folder: RunFolder) -> None:
    run(folder, "raise ValueError('yesterday')")
    assert run(folder, "pass") == Outcome("done", 0)
    assert folder.read_status().error is None


@pytest.mark.parametrize("failing", [False, True])
def test_no_grandchild_survives(folder: RunFolder, failing: bool) -> None:
    body = f"""
    child = subprocess.Popen(["sleep", "60"])
    (folder.path / f"child-{{rank}}").write_text(str(child.pid))
    time.sleep(0.3)
    if {failing} and rank == 0:
        raise ValueError
    """
    run(folder, body)
    for rank in range(2):
        pid = int((folder.path / f"child-{rank}").read_text())
        wait_for(lambda pid=pid: not alive(pid), 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_with_a_checkpoint(folder: RunFolder, number: signal.Signals) -> None:
    supervisor = in_background(folder, POLITE)
    supervisor.send_signal(number)
    assert supervisor.wait(10) == 130
    assert (folder.read_status().state, folder.read_status().exit) == ("stopped", 130)
    assert all((folder.path / f"saved-{rank}").exists() for rank in range(2))


def test_stop_before_a_worker_listens_does_not_leave_the_other_waiting(folder: RunFolder) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_DFL if rank == 0 else signal.SIG_IGN)\n"
    supervisor = in_background(folder, deaf + "(folder.path / f'ready-{rank}').touch()\ntime.sleep(60)")
    time.sleep(0.3)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(3) == 130
    assert folder.read_status().state == "stopped"


def test_failure_while_stopping_is_a_failure(folder: RunFolder) -> None:
    supervisor = in_background(folder, POLITE + "raise OSError('disk full')")
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(10) == 1
    assert folder.read_status().state == "failed"


def test_second_signal_kills_at_once(folder: RunFolder) -> None:
    supervisor = in_background(folder, DEAF)
    pids = worker_pids(folder)
    supervisor.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert supervisor.poll() is None and all(alive(pid) for pid in pids)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(3) == 130
    assert folder.read_status().state == "stopped" and not any(alive(pid) for pid in pids)


def test_workers_die_with_their_supervisor(folder: RunFolder) -> None:
    supervisor = in_background(folder, DEAF)
    pids = worker_pids(folder)
    supervisor.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids), 3)
    # Not waited for yet, so it is a zombie: that counts as dead.
    assert folder.derived_state() == "lost"
    supervisor.wait()


def test_what_workers_started_dies_with_a_killed_supervisor(folder: RunFolder) -> None:
    child = "(folder.path / f'child-{rank}').write_text(str(subprocess.Popen(['sleep', '60']).pid))\n"
    supervisor = in_background(folder, child + DEAF)
    children = [int((folder.path / f"child-{rank}").read_text()) for rank in range(2)]
    assert all(alive(pid) for pid in children)
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not any(alive(pid) for pid in children), 3)


@pytest.mark.parametrize(("request_", "saved"), [("stop", True), ("kill", False)])
def test_requests_are_as_good_as_signals(folder: RunFolder, request_: Any, saved: bool) -> None:
    supervisor = in_background(folder, POLITE if saved else DEAF)
    folder.ask(request_)
    assert supervisor.wait(10) == 130
    assert (folder.read_status().state, folder.read_status().exit) == ("stopped", 130)
    assert (folder.path / "saved-0").exists() is saved


HANG = """
from packtrain.launch.pulse import Pulse
with Pulse(folder.beat(rank)) as pulse:
    pulse("step"); pulse("step")
    if rank == 1:
        time.sleep(60)
    from packtrain.parallel import world
    wait = compile("def wait(): time.sleep(60)", world.__file__, "exec")  # a frame where others are waited for
    exec(wait, globals())
    globals()["wait"]()
"""


def test_the_rank_that_hangs_is_named_with_its_place(folder: RunFolder) -> None:
    command = [sys.executable, str(script(folder, HANG)), str(folder.path)]
    outcome = supervise(folder, command, 2, heartbeat=2.0)
    assert outcome.failure and (outcome.failure.rank, outcome.failure.kind) == (1, "hang")
    assert "rank 1 hangs: it made no progress for" in outcome.failure.message
    assert "worker.py" in outcome.failure.message and folder.read_status().state == "failed"
    assert not list(folder.logs.glob("*.beat"))


FREEZE = """
from packtrain.launch.pulse import Pulse
with Pulse(folder.beat(rank)):
    time.sleep(1.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(4)
    raise RuntimeError("[gloo] Timed out waiting 4000ms for send operation to complete")
"""


def test_a_rank_that_freezes_is_named_where_the_others_only_lost_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.launch.supervisor.SILENT_SECONDS", 2.5)
    outcome = run(folder, FREEZE)
    assert outcome.failure and (outcome.failure.rank, outcome.failure.kind) == (1, "hang")
    assert "rank 1 hangs: it gave no sign of life" in outcome.failure.message


def held(tmp_path: Path) -> tuple[Claim, Reservation]:
    """A GPU that another run owns, and a place in the queue for it."""
    places = [Reservation(owner, 1, tmp_path / "locks", lambda: [Gpu(0, "GPU-0", 0)]) for owner in ("other", "me")]
    claim = places[0].attempt()
    assert claim is not None
    return claim, places[1]


def test_a_run_waits_for_its_gpu_and_owns_it(folder: RunFolder, tmp_path: Path) -> None:
    claim, reservation = held(tmp_path)
    reasons: list[str] = []

    def watch() -> None:
        if folder.read_status().state == "queued" and reasons:
            claim.close()

    body = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    command = [sys.executable, str(script(folder, body)), str(folder.path)]
    assert supervise(folder, command, 1, watch, reservation, reasons.append) == Outcome("done", 0)
    assert reasons == ["for 1 free GPU: GPU 0 is owned by other"]
    assert folder.log(0).read_text() == "GPU-0\n" and folder.read_status().gpus == []
    assert held(tmp_path)[0].gpus  # given back


def test_a_queued_run_can_be_stopped(folder: RunFolder, tmp_path: Path) -> None:
    claim, reservation = held(tmp_path)
    outcome = supervise(folder, ["false"], 1, lambda: folder.ask("stop"), reservation)
    assert outcome == Outcome("stopped", 130) and folder.read_status().ranks == []
    claim.close()
    assert not list((tmp_path / "locks").glob("*.ticket"))


def test_orphan_at_birth_ends_itself(folder: RunFolder) -> None:
    command = [sys.executable, str(script(folder, READY)), str(folder.path)]
    env = {**os.environ, "RANK": "0", "PACKTRAIN_SUPERVISOR_PID": "1" if os.getppid() != 1 else "2"}
    assert subprocess.run(command, env=env, timeout=10, check=False).returncode == 1
    assert not (folder.path / "ready-0").exists()


def test_heartbeat_and_single_leader(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.launch.supervisor.HEARTBEAT_SECONDS", 0.1)
    beats: set[float] = set()

    def watch() -> None:
        status = json.loads(folder.status.read_text())
        beats.add(status["updated"])
        assert folder.alive() and folder.derived_state() == "starting"
        with pytest.raises(UserError, match="is running already"):
            supervise(folder, ["true"], 1)

    supervise(folder, [sys.executable, "-c", "import time; time.sleep(1)"], 1, watch=watch)
    assert len(beats) >= 4


def test_a_bug_in_the_supervisor_leaves_nobody(folder: RunFolder) -> None:
    def watch() -> None:
        if all((folder.path / f"ready-{rank}").exists() for rank in range(2)):
            raise ZeroDivisionError("a bug in the display")

    command = [sys.executable, str(script(folder, DEAF)), str(folder.path)]
    with pytest.raises(ZeroDivisionError):
        supervise(folder, command, 2, watch=watch)
    assert not any(alive(pid) for pid in worker_pids(folder))
    assert folder.read_status().state == "failed"
