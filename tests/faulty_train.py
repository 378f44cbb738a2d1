"""``packtrain`` with ranks in which something goes wrong: ``python -m tests.faulty_train train ...``."""

from __future__ import annotations

import os
import sys

from packtrain.cli import app
from packtrain.launch import lead
from packtrain.launch.folder import RunFolder
from packtrain.launch.group import in_group
from tests.faulty_worker import arm, skew_clock


def faulty_command(folder: RunFolder) -> list[str]:
    return [sys.executable, "-m", "tests.faulty_worker", str(folder.path)]


if __name__ == "__main__":
    skew_clock()
    lead.worker_command = faulty_command
    if in_group() and "FAULT" in os.environ:
        arm()
    app.main()
