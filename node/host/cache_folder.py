"""Where this user keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtfm"
