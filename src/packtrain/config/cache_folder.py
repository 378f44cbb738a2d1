"""Where what can be made again is kept: models that were fetched, tokenised data, what a machine was measured at."""

from __future__ import annotations

import os
from pathlib import Path

from packtrain.errors import UserError


def cache_root() -> Path:
    """``$PACKTRAIN_CACHE``, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("PACKTRAIN_CACHE") or platformdirs.user_cache_dir("packtrain"))


def writable(folder: Path, setting: str) -> Path:
    """The folder, made where it is missing.

    Args:
        setting: what names the folder, for the message.

    Raises:
        UserError: it cannot be made or written to.
    """
    mend = f"set {setting} to a folder you may write to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(setting, f"{folder} cannot be made ({error.strerror})", mend) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(setting, f"{folder} cannot be written to", mend)
    return folder
