"""The folder for what a gateway may lose: below the user's cache folder, which XDG_CACHE_HOME names."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "plait" / kind
