"""Questions of SGLang's API server to its scheduler."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.errors import EngineTimeoutError, UnsupportedError
from plait.backends.sglang.channel import STATE_KEY, ChangeObjectives, ReportSince, SchedulerQuery, parse_queries
from plait.backends.sglang.route import SchedulerAccess


class TokenizerManager:
    """Passes questions on. They have no answer before the test gives one."""

    def __init__(self) -> None:
        self.gracefully_exit = False
        self.asked: list[list[SchedulerQuery] | None] = []
        self.answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def auto_create_handle_loop(self) -> None: ...

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        self.asked.append(parse_queries(request.rid))
        return await self.answer

    def answered(self, *ranks: dict[str, list[bytes | int | None]]) -> None:
        """The schedulers of these ranks have answered."""
        self.answer.set_result([SimpleNamespace(internal_state=state) for state in ranks])


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
    manager.answered({STATE_KEY: [b"report"]})
    assert await asked == b"report"


async def test_a_stopping_server_does_not_wait_for_a_scheduler_that_has_exited(manager: TokenizerManager) -> None:
    manager.gracefully_exit = True
    with pytest.raises(EngineTimeoutError, match="stopping"):
        await SchedulerAccess().ask(ReportSince())


async def test_a_stopping_server_passes_on_what_comes(manager: TokenizerManager) -> None:
    manager.gracefully_exit = True
    manager.answered({STATE_KEY: [b"report"]})
    assert await SchedulerAccess().ask(ReportSince()) == b"report"


async def test_a_silent_scheduler_is_given_up_and_its_answer_is_still_taken(
    manager: TokenizerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.backends.sglang.route.ANSWER_DEADLINE_S", 0.02)
    with pytest.raises(EngineTimeoutError, match="did not answer within"):
        await SchedulerAccess().ask(ReportSince())
    assert not manager.answer.cancelled(), "or SGLang would take it for the answer to the next question"
    manager.answered({})


async def test_while_a_scheduler_is_silent_one_request_waits_for_it(
    manager: TokenizerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.backends.sglang.route.ANSWER_DEADLINE_S", 0.02)
    access = SchedulerAccess()
    for _ in range(3):
        given_up = await asyncio.gather(*(access.ask(ReportSince()) for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in given_up] == [EngineTimeoutError] * 5
    assert len(manager.asked) == 1
    last = asyncio.create_task(access.ask(ReportSince(8)))
    await asyncio.sleep(0)
    manager.answered({STATE_KEY: [b"late"] * 5})
    assert await last == b"late"
    assert manager.asked[1:] == [[ReportSince(8)]], "nobody waits for the others"


async def test_queries_that_come_meanwhile_are_sent_together(manager: TokenizerManager) -> None:
    access, queries = SchedulerAccess(), [ReportSince(since, rank=1) for since in range(3)]
    first = asyncio.create_task(access.ask(ReportSince()))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(access.ask(query)) for query in queries]
    await asyncio.sleep(0.01)
    manager.answered({STATE_KEY: [None, None, None]}, {STATE_KEY: [b"a", b"b", b"c"]})
    assert await first == b"a"
    assert manager.asked == [[ReportSince()], queries]
    assert await asyncio.gather(*others) == [b"a", b"b", b"c"]


async def test_the_answer_is_that_of_the_rank_that_was_meant(manager: TokenizerManager) -> None:
    manager.answered({STATE_KEY: [None]}, {STATE_KEY: [0]})
    assert await SchedulerAccess().ask(ChangeObjectives("[]", rank=1)) == 0


async def test_a_rank_without_the_plugin_is_told(manager: TokenizerManager) -> None:
    manager.answered({STATE_KEY: [b"report"]}, {})
    with pytest.raises(UnsupportedError, match="not active"):
        await SchedulerAccess().ask(ReportSince())


async def test_a_scheduler_without_the_plugin_says_nothing_of_it(manager: TokenizerManager) -> None:
    manager.answered({})
    with pytest.raises(UnsupportedError, match="because"):
        await SchedulerAccess("because").ask(ReportSince())
