"""What every test of the gateway runs under, and the routes of calls over a fake relay, without keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf

import pytest

from plait.gateway.calls.call_reader import PromptReader
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.intake import turns
from tests.gateway.api.fake_relay import Api


@pytest.fixture(scope="module")
def prompts() -> PromptReader:
    models = (ModelConfig(name="m", tokenizer="embedded"), ModelConfig(name="bytes", tokenizer="bytes"))
    return PromptReader(Config(models=models), 64)


@pytest.fixture(params=[False, True], ids=["called", "begun"])
async def api(prompts: PromptReader, request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """The routes as any ASGI server calls them, and as Plait's own begins requests."""
    api = Api(prompts, begins=request.param)
    yield api
    await api.http.aclose()


@pytest.fixture(autouse=True)
def _no_work_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a test that takes 10 ms of CPU time somewhere would have to wait. Tests of turns have their own times."""
    monkeypatch.setattr(turns, "LONG_PASS_S", inf)
    monkeypatch.setattr(turns, "SLICE_S", inf)
    monkeypatch.setattr(turns, "LONG_BYTES", inf)
