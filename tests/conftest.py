"""What every test runs under."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

NIGHTLY = "PLAIT_NIGHTLY" in os.environ

# A busy machine is no failure: examples are bounded in number, not in time. A CI run judges one change, so it draws the
# same examples every time. New ones are drawn at the desk, and many of them by nightly parts.
settings.register_profile(
    "plait",
    deadline=None,
    max_examples=200 if NIGHTLY else 40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ and not NIGHTLY,
)
settings.load_profile("plait")


def pytest_collection_finish() -> None:
    """What is loaded by now stays. Full collections of garbage, which look at all of it, took a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_logger_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Else a module's logger writes where an earlier test has sent it, past `capture_logs`."""
    configure = structlog.configure

    def without_cache(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", without_cache)
    yield
    structlog.reset_defaults()
