"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd of its own, all ended with it.

Debian's packages slurm-wlm and munge, run as root; their services need not run. Nothing outside the folder is written.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

NODES = ("n1", "n2")
SECONDS_TO_START = 30.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")

CONFIG = """
ClusterName=packtrain
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=0
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MinJobAge=300
SlurmdParameters=config_overrides
SlurmctldDebug=verbose
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs=2 State=UNKNOWN
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class Cluster:
    """Starts with ``start``, ends with ``stop``; between them Slurm's commands work with ``env``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
        assert not missing, f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
        assert os.geteuid() == 0, "slurmd starts the steps of other users: it must be root"
        (self.folder / "state").mkdir()
        text = CONFIG.format(folder=self.folder, host=socket.gethostname().partition(".")[0], ports=free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        at = {name: f"{self.folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--socket={at['socket']}", f"--key-file={key}", f"--pid-file={at['pid']}"]
        options += [f"--log-file={at['log']}", f"--seed-file={at['seed']}", "--foreground", "--force"]
        self._start("munged", "munged", *options)
        until((self.folder / "munge.socket").exists, 10, self.tail)
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        self.wait_idle()

    def start_node(self, node: str) -> None:
        """Start the slurmd of one node, also one that was killed."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """As a power cut: the node's slurmd, its steps and all they started are gone at once."""
        slurmd = self._daemons.pop(node)
        slurmd.kill()
        slurmd.wait()
        tasks = [process for process in self.processes() if self._of_node(process, node)]
        parents = [parent for task in tasks if (parent := task.parent()) is not None]
        for process in [*(one for one in parents if one.name().startswith("slurmstepd")), *tasks]:
            kill(process)

    def wait_idle(self) -> None:
        """Both nodes are there, and free."""
        until(lambda: self("sinfo", "-h", "-p", "usual", "-o", "%T").split() == ["idle"], SECONDS_TO_START, self.tail)

    def __call__(self, *command: str) -> str:
        """What one of Slurm's commands prints; on failure, an empty text."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout if done.returncode == 0 else ""

    def stop(self) -> None:
        """End the jobs, then the daemons, then whatever is left of theirs."""
        if "slurmctld" in self._daemons:
            self("scancel", "--user=root")
            self("scancel", "--signal=KILL", "--full", "--user=root")
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            kill(process)

    def processes(self) -> list[psutil.Process]:
        """Every process that belongs to this cluster: its configuration is in their environment."""
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and self._here(p)]

    def tail(self) -> str:
        """The ends of the daemons' logs, for a message."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-25:]) for log in logs)

    def _start(self, name: str, program: str, *options: str) -> None:
        path = shutil.which(program, path=_path())
        assert path is not None
        with (self.folder / f"{name}.out.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen([path, *options], env=self.env, stdout=log, stderr=log)

    def _here(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False

    def _of_node(self, process: psutil.Process, node: str) -> bool:
        """Whether it belongs to a task or a batch script on the node."""
        try:
            return process.environ().get("SLURMD_NODENAME") == node
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            return False


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster whose two nodes are idle."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        found = Cluster(Path(folder))
        try:
            found.start()
            yield found
        finally:
            found.stop()


def until(condition: Callable[[], bool], limit: float, explain: Callable[[], str]) -> None:
    """Wait for it; at the limit the test fails with what ``explain`` says."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
