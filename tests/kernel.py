"""The kernel: what takes, places, sends and relays calls, watches engines, and admits. All else is a guest of it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.source_tree import ROOT, path_of, reached_from

ENTRIES: Final = (
    "gateway/api/call_api.py",
    "gateway/server/open_requests.py",
    "gateway/membership/engine_set.py",
    "gateway/membership/monitor.py",
    "gateway/admission/admission.py",
    "gateway/calls/relay.py",
    "gateway/calls/records.py",
)
"""Importing these imports the kernel."""

SERVED: Final = ("gateway/app.py", "gateway/server/http_server.py")
"""What serves it, without guests: `gateway/app.py` imports them by their names."""

GUESTS: Final = ("gateway/guests", "backends/translation", "policy/programs", "lab", "client")
"""The rooms of guests, the embedded engine and the client's library."""


def kernel() -> set[Path]:
    """The kernel's files, with all that they import."""
    return reached_from([ROOT / entry for entry in ENTRIES])


def lines_of_kernel() -> int:
    """Its lines, with comments and empty ones."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in kernel())


def guests_in_kernel() -> set[str]:
    """The files of guests' rooms that the kernel imports, or what serves it."""
    paths = map(path_of, kernel() | reached_from([ROOT / entry for entry in SERVED]))
    return {path for path in paths if path.startswith(GUESTS)}
