"""Which addresses of a name are its engines, where it has addresses of both families."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.membership.dual_stack import SETTLING_LOOKUPS, DualStack
from plait.gateway.membership.engine_requests import identity
from tests.gateway.membership.fake_http import answer_requests

V4, V6 = [f"10.0.0.{number}" for number in range(4)], [f"fd00::{number}" for number in range(4)]


class Network:
    """Engines by address, as they answer: an epoch, "" without the adapter. Others do not answer."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.asked: list[str] = []

    async def identify(self, address: str) -> str | None:
        self.asked.append(address)
        return self.answers.get(address)


class Looking:
    """A name that is looked up again and again."""

    def __init__(self) -> None:
        self.network = Network()
        self.stack = DualStack(self.network.identify)
        self.used: set[str] = set()

    async def up(self, *found: str, times: int = 1) -> set[str]:
        for _ in range(times):
            self.used = await self.stack.engines(found, self.used)
        return self.used


@pytest.fixture
def looking() -> Looking:
    return Looking()


async def test_one_family_is_used_as_it_is(looking: Looking) -> None:
    assert await looking.up(*V4) == set(V4)
    assert await looking.up(*V4[1:]) == set(V4[1:])
    assert looking.network.asked == [], "nothing is asked"


async def test_two_addresses_with_one_epoch_are_one_engine(looking: Looking) -> None:
    looking.network.answers = {V4[0]: "a", V6[0]: "a", V4[1]: "b", V6[1]: "b", V4[2]: "c", V6[3]: "d"}
    for _ in range(2):
        assert await looking.up(*V4[:3], V6[0], V6[1], V6[3]) == {*V4[:3], V6[3]}
    assert len(looking.network.asked) == 6, "each is asked once"
    assert looking.stack.left_out == set()


async def test_an_address_that_is_used_stays(looking: Looking) -> None:
    looking.network.answers = {V6[0]: "a"}
    assert await looking.up(V6[0]) == {V6[0]}
    looking.network.answers[V4[0]] = "a"
    assert await looking.up(V4[0], V6[0]) == {V6[0]}


async def test_engines_that_cannot_be_told_apart_are_used_by_one_family(looking: Looking) -> None:
    looking.network.answers = dict.fromkeys((*V4[:2], *V6[:2]), "")
    assert await looking.up(*V4[:2], *V6[:2]) == set(V4[:2])
    assert looking.stack.left_out == set(V6[:2])


async def test_the_family_of_which_more_addresses_answer_is_used(looking: Looking) -> None:
    """An engine that has only an IPv6 address is not lost."""
    looking.network.answers = dict.fromkeys((*V4[:2], *V6[:3]), "")
    assert await looking.up(*V4[:2], *V6[:3]) == set(V6[:3])


async def test_addresses_that_nobody_answers_are_not_twice_an_engine(looking: Looking) -> None:
    """As localhost, of an engine that listens on one family."""
    assert await looking.up(V4[0], V6[0]) == {V4[0]}, "it may come"
    looking = Looking()
    looking.network.answers = {V6[0]: ""}
    assert await looking.up(V4[0], V6[0]) == {V6[0]}
    assert looking.stack.left_out == set()


async def test_an_engine_that_comes_up_is_told_apart_then(looking: Looking) -> None:
    looking.network.answers = {V4[0]: "a", V6[0]: "a"}
    everything = (*V4[:2], *V6[:2])
    assert await looking.up(*everything) == {V4[0], V4[1]}
    looking.network.answers |= {V6[1]: "b"}
    assert V6[1] in await looking.up(*everything), "it answers there"
    looking.network.answers |= {V4[1]: "b"}
    assert await looking.up(*everything) == {V4[0], V4[1]}


async def test_a_lookup_that_misses_a_family_changes_nothing(looking: Looking) -> None:
    looking.network.answers = dict.fromkeys((*V4[:2], *V6[:2]), "")
    await looking.up(*V4[:2], *V6[:2])
    assert await looking.up(*V6[:2], times=SETTLING_LOOKUPS - 1) == set(V4[:2])
    assert await looking.up(*V4[:2], *V6[:2]) == set(V4[:2])
    assert await looking.up(*V6[:2], times=SETTLING_LOOKUPS) == set(V6[:2]), "it has really gone"


async def test_the_other_family_is_used_once_it_has_had_more_for_a_time(looking: Looking) -> None:
    looking.network.answers = dict.fromkeys((*V4[:2], *V6[:3]), "")
    await looking.up(*V4[:2], *V6[:2])
    assert await looking.up(*V4[:2], *V6[:3], times=SETTLING_LOOKUPS - 1) == set(V4[:2])
    assert await looking.up(*V4[:2], *V6[:3]) == set(V6[:3])


async def test_a_family_that_does_not_answer_any_more_is_replaced_at_once(looking: Looking) -> None:
    looking.network.answers = dict.fromkeys((*V4[:2], *V6[:2]), "")
    await looking.up(*V4[:2], *V6[:2])
    looking.network.answers = dict.fromkeys(V6[:2], "")
    assert await looking.up(*V4[:2], *V6[:2]) == {*V4[:2], *V6[:2]}, "those of IPv4 are down"
    looking.network.answers |= dict.fromkeys(V4[:2], "")
    assert await looking.up(*V4[:2], *V6[:2]) == set(V4[:2])


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, msgspec.msgpack.encode({"engine": "e", "epoch": "one", "stored": []}), "one"),
        (200, b"<html>", ""),
        (404, b"", ""),
        (501, b"", ""),
        (503, b"", None),
        (401, b"", None),
    ],
)
async def test_an_engine_says_which_process_it_is(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, said: str | None
) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://engine/cache_state"
        return httpx.Response(status, content=body)

    answer_requests(monkeypatch, answer)
    assert await identity(EngineConfig(url="http://engine"), UpstreamConfig()) == said


async def test_an_engine_that_does_not_answer_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    answer_requests(monkeypatch, answer)
    assert await identity(EngineConfig(url="http://engine"), UpstreamConfig()) is None
