"""Questions of SGLang's API server to its scheduler."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.errors import EngineTimeoutError, UnsupportedError
from plait.backends.sglang.channel import STATE_KEY, ReportSince
from plait.backends.sglang.route import SchedulerAccess


class TokenizerManager:
    """Passes questions on. They have no answer before the test gives one."""

    def __init__(self) -> None:
        self.gracefully_exit = False
        self.answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def auto_create_handle_loop(self) -> None: ...

    async def get_internal_state_communicator(self, _request: Any) -> list[Any]:
        return await self.answer

    def answered(self, **state: bytes) -> None:
        self.answer.set_result([SimpleNamespace(internal_state=state)])


@pytest.fixture
async def manager(monkeypatch: pytest.MonkeyPatch) -> TokenizerManager:
    manager = TokenizerManager()
    names = {
        "get_global_state": lambda: SimpleNamespace(tokenizer_manager=manager),
        "GetInternalStateReq": SimpleNamespace,
    }
    monkeypatch.setattr("plait.backends.sglang.route.load", lambda name: names[name.rpartition(".")[2]])
    monkeypatch.setattr("plait.backends.sglang.route.EXIT_S", 0.01)
    return manager


async def test_the_scheduler_answers_in_its_time(manager: TokenizerManager) -> None:
    asked = asyncio.create_task(SchedulerAccess().ask(ReportSince()))
    await asyncio.sleep(0.05)
    assert not asked.done()
    manager.answered(**{STATE_KEY: b"report"})
    assert await asked == b"report"


async def test_a_stopping_server_does_not_wait_for_a_scheduler_that_has_exited(manager: TokenizerManager) -> None:
    manager.gracefully_exit = True
    with pytest.raises(EngineTimeoutError, match="stopping"):
        await SchedulerAccess().ask(ReportSince())


async def test_a_stopping_server_passes_on_what_comes(manager: TokenizerManager) -> None:
    manager.gracefully_exit = True
    manager.answered(**{STATE_KEY: b"report"})
    assert await SchedulerAccess().ask(ReportSince()) == b"report"


async def test_a_silent_scheduler_is_given_up_and_its_answer_is_still_taken(
    manager: TokenizerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.backends.sglang.route.ANSWER_DEADLINE_S", 0.02)
    with pytest.raises(EngineTimeoutError, match="did not answer within"):
        await SchedulerAccess().ask(ReportSince())
    assert not manager.answer.cancelled(), "or SGLang would take it for the answer to the next question"
    manager.answered()


async def test_a_scheduler_without_the_plugin_says_nothing_of_it(manager: TokenizerManager) -> None:
    manager.answered()
    with pytest.raises(UnsupportedError, match="because"):
        await SchedulerAccess("because").ask(ReportSince())
