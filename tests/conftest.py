"""What every test runs under."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.examples import NIGHTLY, examples

# A busy machine is no failure: examples are bounded in number, not in time. A CI run judges one change, so it draws the
# same examples every time. New ones are drawn at the desk and by nightly parts.
settings.register_profile(
    "plait",
    deadline=None,
    max_examples=examples(120),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ and not NIGHTLY,
)
settings.load_profile("plait")

# Native encoders prove themselves anew, whatever other processes have compared. Some are loaded before the first test.
pytest.MonkeyPatch().setattr("plait.backends.tokenization.kept_proof.cache_folder", Path(os.devnull).joinpath)


def pytest_collection_finish() -> None:
    """What is loaded by now stays, and garbage of single tests is small: collections took a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)


@pytest.fixture(autouse=True)
def _no_logger_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Else a module's logger writes where an earlier test has sent it, past `capture_logs`."""
    configure = structlog.configure

    def without_cache(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", without_cache)
    yield
    structlog.reset_defaults()
