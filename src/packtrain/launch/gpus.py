"""Which GPUs there are, who owns each, and the queue of runs that wait for them. Starts without torch.

An owner holds a file lock, and so does each of its workers: the kernel gives the GPU back when the last of them is
gone, however they ended. No service runs and nothing has to be cleaned up.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.errors import UserError

BUSY_BYTES = 1 << 30
"""A GPU on which others have taken so much is left alone, unless it is named."""
Wanted = int | list[int]
"""How many GPUs, or which by index."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use. ``index``: its place among them; ``id``: the driver's name for it."""

    index: int
    id: str
    used_bytes: int


def present() -> list[Gpu]:
    """The visible GPUs in nvidia-smi's order; none is touched."""
    return [Gpu(index, name, used) for index, (name, used) in enumerate(visible(_every()))]


def _every() -> list[tuple[str, int]]:
    """(id, bytes in use) of each GPU of this machine."""
    if not shutil.which("nvidia-smi"):
        import torch

        return [(str(index), 0) for index in range(torch.cuda.device_count())]
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise UserError("nvidia-smi", f"failed ({error})", "mend the driver, or set launch.device to cpu") from error
    rows = [line.split(", ") for line in listed.stdout.splitlines()]
    return [(uuid, int(used) << 20 if used.isdigit() else 0) for uuid, used in rows]


def visible(every: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that CUDA_VISIBLE_DEVICES names, in its order; a slice of a GPU stands for itself."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return every
    found: list[tuple[str, int]] = []
    for name in filter(None, (part.strip() for part in named.split(","))):
        if name.isdigit():
            if int(name) >= len(every):
                break  # CUDA stops at the first that is not there
            found.append(every[int(name)])
        else:
            found += [entry for entry in every if entry[0].startswith(name)] or [(name, 0)]
    return found


@dataclass
class Claim:
    """GPUs that this process owns until it closes the claim or ends."""

    gpus: list[Gpu]
    files: list[int]

    @property
    def env(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in self.gpus)}

    def close(self) -> None:
        for descriptor in self.files:
            os.close(descriptor)
        self.files = []


def lock_folder() -> Path:
    """Where this machine's GPU locks are, for all of its users."""
    return Path(tempfile.gettempdir()) / "packtrain-gpus"


@dataclass
class Reservation:
    """A place in the queue for GPUs. The oldest one that waits is served first, so that no wide run starves.

    Args:
        owner: what others are told: the run's folder.
        wanted: how many GPUs, or which by index.
        folder: where the locks are.
    """

    owner: str
    wanted: Wanted
    folder: Path = field(default_factory=lock_folder)
    look: Callable[[], list[Gpu]] = present
    reason: str = ""
    _ticket: int | None = None
    _ticket_path: Path | None = None

    def attempt(self) -> Claim | None:
        """The GPUs, if it is this run's turn and they are free; else ``reason`` says what it waits for."""
        self._queue()
        if ahead := self._ahead():
            self.reason = f"behind {ahead} in the queue"
            return None
        found = self._take(self._candidates())
        if found is not None:
            self.close()
        return found

    def close(self) -> None:
        """Leave the queue."""
        if self._ticket is not None and self._ticket_path is not None:
            self._ticket_path.unlink(missing_ok=True)
            os.close(self._ticket)
            self._ticket = self._ticket_path = None

    def _candidates(self) -> list[Gpu]:
        gpus = self.look()
        if isinstance(self.wanted, int):
            return gpus
        missing = [index for index in self.wanted if index >= len(gpus)]
        if missing:
            what = f"GPU {missing[0]} of {len(gpus)} visible ones"
            raise UserError("launch.gpus", what, f"choose from {[gpu.index for gpu in gpus]}")
        return [gpus[index] for index in self.wanted]

    def _take(self, candidates: list[Gpu]) -> Claim | None:
        """All that are wanted, or none."""
        need = self.wanted if isinstance(self.wanted, int) else len(self.wanted)
        claim, busy = Claim([], []), []
        for gpu in candidates:
            if len(claim.gpus) == need:
                break
            path = self.folder / f"{_file_name(gpu.id)}.lock"
            descriptor = _lock(path, self.owner)
            if descriptor is None:
                busy.append(f"GPU {gpu.index} is owned by {_owner(path)}")
                continue
            if isinstance(self.wanted, int) and gpu.used_bytes > BUSY_BYTES:
                os.close(descriptor)
                busy.append(f"others have {gpu.used_bytes / 2**30:.1f} GiB of GPU {gpu.index}")
                continue
            claim.gpus.append(gpu)
            claim.files.append(descriptor)
        if len(claim.gpus) == need:
            return claim
        claim.close()
        self.reason = f"for {need} free GPU{'s' if need > 1 else ''}: " + ", ".join(busy or ["there are fewer"])
        return None

    def _queue(self) -> None:
        if self._ticket is None:
            _make_shared(self.folder)
            self._ticket_path = self.folder / f"{time.time_ns():020d}-{os.getpid()}.ticket"
            unlocked = self._ticket_path.with_suffix(".new")  # a ticket that nobody holds would be thrown away
            self._ticket = _lock(unlocked, self.owner)
            os.rename(unlocked, self._ticket_path)

    def _ahead(self) -> str | None:
        """The owner of the oldest ticket that somebody still holds, where it is not ours."""
        for path in sorted(self.folder.glob("*.ticket")):
            if path == self._ticket_path:
                return None
            descriptor = _lock(path, None)
            if descriptor is None:
                return _owner(path)
            os.close(descriptor)
            _forget(path)
        return None


def _make_shared(folder: Path) -> None:
    """A folder for all users: each removes only what is theirs."""
    try:
        folder.mkdir()
        folder.chmod(0o1777)
    except FileExistsError:
        pass


def _lock(path: Path, owner: str | None) -> int | None:
    """An open, locked file that names its owner, or None while somebody else holds it."""
    descriptor = _open(path)
    if descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if owner is not None:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, owner.encode())
    return descriptor


def _open(path: Path) -> int | None:
    """A file that any user may lock. A link in its place is refused: the folder is everybody's."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor


def _owner(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200] or "another run"
    except OSError:
        return "another run"


def _forget(path: Path) -> None:
    """Remove a ticket whose holder died; another user's stays where it is and is passed over each time."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return


def _file_name(gpu_id: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in gpu_id)
