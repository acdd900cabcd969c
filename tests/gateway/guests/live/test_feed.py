"""The feed of calls: bounded, silent without watchers, and without anybody's text."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.backends.errors import LimitError, NotFoundError
from plait.gateway.asgi import AsgiSink, ClientGoneError
from plait.gateway.guests.live.feed import MOST_CALLS, MOST_SENT, MOST_WATCHERS, Feed, Watcher
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import HASHES, JSON, Client, Exchange, FakeHttp, Gateway, gateway, until_stuck
from tests.gateway.calls.test_logged_waits import late_by

WHOLE = (
    b'{"choices":[{"index":0,"finish_reason":"length","text":"SECRET"}],'
    b'"usage":{"prompt_tokens":257,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":64}}}'
)


def exchanges(count: int) -> FakeHttp:
    return FakeHttp(*(Exchange(200, JSON, [WHOLE]) for _ in range(count)))


def feed_of(made: Gateway) -> Feed:
    return Feed(made.router, made.relay, lambda tenant: tenant[:8])


async def test_nothing_is_noted_while_nobody_watches() -> None:
    async with gateway(exchanges(300)) as made:
        feed = feed_of(made)
        await made.deliver_whole(Client())
        assert not feed._rows
        assert not feed._open
        with feed.watching() as watcher:
            assert feed.news(watcher).calls == []
            await made.deliver_whole(Client())
            assert len(feed.news(watcher).calls) == 1
        assert not feed._rows
        await made.deliver_whole(Client())
        assert not feed._rows


async def test_a_call_that_has_ended_says_where_it_was_and_how_long() -> None:
    async with gateway(exchanges(300)) as made:
        feed = feed_of(made)
        with feed.watching() as watcher:
            await made.deliver_whole(Client())
            (row,) = feed.news(watcher).calls
            assert (row.number, row.state, row.engine, row.reason) == (1, "ended", "a", "round_robin")
            assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (257, 64, 3)
            assert (row.status, row.outcome) == (200, "ok")
            assert feed.news(watcher).calls == []
            rates = feed.rates(loop_time_s())
            assert rates.calls_per_s > 0
            assert rates.hit_rate == pytest.approx(64 / 257)


@pytest.mark.parametrize(("keeps_receipts", "told"), [(True, "r1"), (False, "")])
async def test_a_call_has_its_request_id_where_receipts_are_kept(keeps_receipts: bool, told: str) -> None:
    async with gateway(exchanges(1)) as made:
        feed = Feed(made.router, made.relay, str, keeps_receipts=keeps_receipts)
        with feed.watching() as watcher:
            await made.relay.run(made.asked(call=Call("r1", "m", 257, 64, HASHES)), AsgiSink(Client().send))
            (row,) = feed.news(watcher).calls
    assert row.id == told


async def test_a_call_that_was_sent_before_anybody_watched_is_told_at_its_end() -> None:
    async with gateway(FakeHttp(None)) as made:
        feed, client = feed_of(made), Client()
        task = asyncio.create_task(made.deliver(client))
        await until_stuck()
        with feed.watching() as watcher:
            client.gone.set()
            with pytest.raises(ClientGoneError):
                await task
            (row,) = feed.news(watcher).calls
        assert (row.state, row.engine, row.reason, row.outcome) == ("ended", "a", "round_robin", "client_gone")


async def test_a_call_says_what_it_waited_for_longest() -> None:
    async with gateway(FakeHttp(None)) as made:
        feed, client = feed_of(made), Client()
        with feed.watching() as watcher:
            task = asyncio.create_task(made.deliver(client))
            await until_stuck()
            await late_by(made, 5.0)
            client.gone.set()
            with pytest.raises(ClientGoneError):
                await task
            (row,) = feed.news(watcher).calls
    assert row.waited_for == "gateway"
    assert row.waited_s == pytest.approx(5.0, abs=0.1)


async def test_a_slow_watcher_gets_the_newest_and_the_count_of_the_others() -> None:
    async with gateway(exchanges(300)) as made:
        feed = feed_of(made)
        with feed.watching() as slow, feed.watching() as quick:
            for _ in range(MOST_CALLS + 20):
                await made.deliver_whole(Client())
                assert len(feed.news(quick).calls) == 1
            assert len(feed._rows) == MOST_CALLS
            assert not feed._open
            news = feed.news(slow)
            assert [row.number for row in news.calls] == list(range(MOST_CALLS + 20 - MOST_SENT + 1, MOST_CALLS + 21))
            assert news.left_out == MOST_CALLS + 20 - MOST_SENT


async def test_there_are_only_so_many_watchers() -> None:
    async with gateway(exchanges(300)) as made:
        feed = feed_of(made)
        contexts: list[AbstractContextManager[Watcher]] = [feed.watching() for _ in range(MOST_WATCHERS)]
        for context in contexts:
            context.__enter__()
        with pytest.raises(LimitError), feed.watching():
            pass
        for context in contexts:
            context.__exit__(None, None, None)
        assert feed.watchers == 0


async def test_a_call_without_an_engine_is_told_without_the_clients_words() -> None:
    async with gateway(exchanges(300)) as made:
        feed = feed_of(made)
        call = Call("r1", "a model that a client made up", 257, 64, HASHES)
        client = Client()
        with feed.watching() as watcher:
            with pytest.raises(NotFoundError):
                await made.relay.deliver(made.asked(call=call), AsgiSink(client.send))
            (row,) = feed.news(watcher).calls
        assert (row.model, row.engine, row.status) == ("", None, 404)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(st.characters(max_codepoint=255, categories=["L", "P"]), min_size=12))
async def test_no_text_of_a_client_or_an_engine_is_told(text: str) -> None:
    """Prompt, session and output variable are the client's, the answer is the engine's. Request ids are told."""
    body = msgspec.json.encode({"model": "m", "prompt": text, "user": text})
    call = Call("r1", "m", 257, 64, HASHES, streamed=False)
    client = Client()
    async with gateway(exchanges(1)) as made:
        feed = feed_of(made)
        with feed.watching() as watcher:
            asked = made.asked(call=call, body=body, session=text, output=text, turn_of=text)
            await made.relay.run(asked, AsgiSink(client.send))
            told = msgspec.json.encode(feed.news(watcher))
    assert msgspec.json.encode(text)[1:-1] not in told
    assert b"SECRET" not in told
