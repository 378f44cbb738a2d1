"""Where what can be made again is kept: models that were fetched, tokenised data, what a machine was measured at."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$PACKTRAIN_CACHE``, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("PACKTRAIN_CACHE") or platformdirs.user_cache_dir("packtrain"))
