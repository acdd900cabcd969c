"""A SGLang that is not known, or not set up for it, is refused at the start, with what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sglang
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, PrefillAdder
from sglang.srt.managers.scheduler import Scheduler

from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.backends.adapter.scheduler_settings import VARIABLE, SettingsError, SglangSettings, read_settings
from plait.backends.sglang import plugin
from plait.backends.sglang.compatibility import REQUIRED
from plait.backends.sglang.scheduler import scheduler_class


def _other_release_req(self: ScheduleBatch, request: object) -> None:
    """Takes a request, as no version does."""


@pytest.fixture
def planned(scheduler: Any) -> Iterator[Any]:
    """The scheduler with our hooks, which are not attached yet."""
    scheduler.__class__ = scheduler_class(Scheduler)
    yield scheduler
    scheduler.__class__ = Scheduler


def test_the_installed_version_has_every_name() -> None:
    assert REQUIRED.installed_tier("chunks") == "chunks"


def test_missing_names_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"require": "chunks"}')
    monkeypatch.delattr(PrefillAdder, "add_chunked_req")
    monkeypatch.setattr(ScheduleBatch, "release_req", _other_release_req)
    with pytest.raises(UnsupportedEngineError) as refusal:
        plugin.check()
    message = str(refusal.value)
    assert f"({sglang.__version__})" in message
    assert "PrefillAdder.add_chunked_req" in message
    assert "ScheduleBatch.release_req(idx, remaing_req_count)" in message
    assert "PrefillAdder.add_one_req" not in message


def test_missing_attributes_are_listed(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(planned, "chunked_req")
    monkeypatch.delattr(planned.policy, "policy")
    with pytest.raises(UnsupportedEngineError, match=r"Scheduler\.chunked_req.*policy\.policy"):
        planned.attach(SglangSettings(require="order"))


def test_what_plait_does_itself_is_refused(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned.policy, "policy", CacheAgnosticPolicy.LOF)
    monkeypatch.setattr(planned, "enable_priority_scheduling", True)
    monkeypatch.setattr(planned, "chunked_prefill_size", None)
    with pytest.raises(UnsupportedEngineError) as refusal:
        planned.attach(SglangSettings())
    for option in ("--schedule-policy", "--enable-priority-scheduling", "--chunked-prefill-size -1"):
        assert option in str(refusal.value)


def test_settings_that_are_no_json_are_refused() -> None:
    with pytest.raises(SettingsError, match="not JSON"):
        read_settings({VARIABLE: "{"})
