"""Ages of files that several hosts see."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path


def file_age(path: Path) -> float:
    """Seconds since ``path`` was written, both moments by the file server's clock, not by this host's.

    Raises:
        FileNotFoundError: there is no such file.
    """
    written = path.stat().st_mtime
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            return os.fstat(probe.fileno()).st_mtime - written
    except OSError:  # somebody else's folder, or a full disk
        return time.time() - written
