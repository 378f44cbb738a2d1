"""Watching a run that somebody else leads, until it ends. Starts without torch."""

from __future__ import annotations

import sys
import time

from packtrain.launch import summary
from packtrain.launch.folder import RunFolder
from packtrain.launch.progress import open_progress
from packtrain.metrics.reader import EventReader

POLL_SECONDS = 0.3


def follow(folder: RunFolder, to_the_end: bool) -> None:
    """Print the progress of a run so far, and with ``to_the_end`` all that comes and how it ends."""
    progress = open_progress(EventReader(folder.events))
    note = ""
    try:
        while True:
            status = folder.read_status()
            alive = folder.alive(status)
            if status.note and status.note != note:
                progress.line(f"queued {status.note}")
            note = status.note
            progress.update()
            if not (to_the_end and alive):
                break
            time.sleep(POLL_SECONDS)
    finally:
        progress.close()
    if to_the_end:
        _tell_end(folder)


def _tell_end(folder: RunFolder) -> None:
    status = folder.read_status()
    if status.error:
        print("\n".join(summary.failed(status.error)), file=sys.stderr, flush=True)
    else:
        print("\n".join(summary.ended(folder, folder.derived_state(status))), flush=True)
