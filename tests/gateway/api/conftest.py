"""The routes of calls over a fake relay, without keys."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from plait.gateway.calls.call_reader import PromptReader
from plait.gateway.config.sections import Config, ModelConfig
from tests.gateway.api.fake_relay import Api


@pytest.fixture(scope="module")
def prompts() -> PromptReader:
    models = (ModelConfig(name="m", tokenizer="embedded"), ModelConfig(name="bytes", tokenizer="bytes"))
    return PromptReader(Config(models=models), 64)


@pytest.fixture
async def api(prompts: PromptReader) -> AsyncIterator[Api]:
    api = Api(prompts)
    yield api
    await api.http.aclose()
