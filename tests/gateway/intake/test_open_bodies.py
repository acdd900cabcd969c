"""What a tenant's bodies may take together, and when they count no more."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive

from plait.backends.errors import BodyTooLargeError, LimitError, TooManyOpenRequestsError
from plait.gateway.asgi import PART_BYTES, ClientGoneError, Headers
from plait.gateway.intake.open_bodies import OpenBodies, OpenBody

MOST, MOST_OF_ALL, MANY = 10, 25, 2**30


def sending(*pieces: bytes, is_gone: bool = False) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if is_gone:
        messages.append({"type": "http.disconnect"})
    else:
        messages[-1]["more_body"] = False
    waiting = iter(messages)

    async def receive() -> Message:
        return next(waiting)

    return receive


async def test_a_body_counts_until_its_request_ends() -> None:
    bodies = OpenBodies(MOST, MOST_OF_ALL)
    for _ in range(100):
        with OpenBody(bodies, "a") as first, OpenBody(bodies, "a") as second:
            assert await first.read(sending(b"01234", b"56789"), []) == b"0123456789"
            assert await second.read(sending(b"0123456789"), []) == b"0123456789"
            with OpenBody(bodies, "a") as third, pytest.raises(LimitError, match="more than 25 bytes") as refused:
                await third.read(sending(b"01234", b"5"), [])
            assert (refused.value.code, refused.value.status) == ("too_many_open_bytes", 429)
    assert bodies.bytes_of("a") == 0


async def test_a_body_that_does_not_come_to_its_end_counts_too() -> None:
    bodies, rest = OpenBodies(MOST, MOST_OF_ALL), asyncio.Event()

    async def receive() -> Message:
        if bodies.bytes_of("a"):
            await rest.wait()
        return {"type": "http.request", "body": b"0123456789", "more_body": True}

    with OpenBody(bodies, "a") as body:
        reading = asyncio.create_task(body.read(receive, []))
        await asyncio.sleep(0)
        assert bodies.bytes_of("a") == 10
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert bodies.bytes_of("a") == 0


async def test_tenants_count_apart() -> None:
    bodies = OpenBodies(MOST, MOST_OF_ALL)
    with OpenBody(bodies, "a") as first, OpenBody(bodies, "a") as second, OpenBody(bodies, "b") as other:
        for body in (first, second, other):
            await body.read(sending(b"0123456789"), [])


async def test_what_is_refused_or_left_counts_no_more() -> None:
    bodies = OpenBodies(MOST, MOST_OF_ALL)
    with OpenBody(bodies, "a") as body, pytest.raises(BodyTooLargeError):
        await body.read(sending(b"0123456789", b"0"), [])
    with OpenBody(bodies, "a") as body, pytest.raises(ClientGoneError):
        await body.read(sending(b"01234", is_gone=True), [])
    assert bodies.bytes_of("a") == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-1, 12)), max_size=40))
def test_the_bytes_are_those_of_the_open_bodies(steps: list[tuple[str, int]]) -> None:
    """A step opens a body and sends so many bytes, or ends the oldest one."""
    bodies, open_ = OpenBodies(MOST, MOST_OF_ALL), list[tuple[OpenBody, int]]()
    for tenant, size in steps:
        if size < 0:
            if open_:
                open_.pop(0)[0].__exit__(None, None, None)
            continue
        body, held = OpenBody(bodies, tenant), sum(size for other, size in open_ if other.tenant == tenant)
        pieces = sending(b"x" * size)
        if size > MOST or held + size > MOST_OF_ALL:
            with body, pytest.raises((BodyTooLargeError, LimitError)):
                asyncio.run(_read(body, pieces))
        else:
            asyncio.run(_read(body, pieces))
            open_.append((body, size))
        assert bodies.bytes_of(tenant) == sum(size for body, size in open_ if body.tenant == tenant)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=80))
def test_tenants_with_many_requests_leave_the_last_connections_to_others(steps: list[tuple[str, bool]]) -> None:
    """A step begins a request, or ends one."""
    bodies, open_ = OpenBodies(MOST, MOST_OF_ALL), Counter[str]()
    bodies.serve(connections=16)
    for tenant, begins in steps:
        if not begins:
            if open_[tenant]:
                bodies.remove(tenant, 0, 1)
                open_[tenant] -= 1
        elif open_.total() >= 14 and 2 * open_[tenant] >= max(open_.values()):
            with pytest.raises(TooManyOpenRequestsError, match=f"{open_[tenant]} of them of this key"):
                bodies.add(tenant, 5, 1)
        else:
            bodies.add(tenant, 0, 1)
            open_[tenant] += 1
        assert (bodies.requests_of(tenant), bodies.bytes_of(tenant)) == (open_[tenant], 0)


async def _read(body: OpenBody, receive: Receive) -> bytes:
    return await body.read(receive, [])


async def read(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    return await OpenBody(OpenBodies(max_bytes, MANY), "a").read(receive, headers)


@pytest.mark.parametrize("pieces", [[b""], [b"0123456789"], [b"01234", b"", b"56789"]])
async def test_a_body_up_to_the_limit(pieces: list[bytes]) -> None:
    assert await read(sending(*pieces), [], 10) == b"".join(pieces)


@pytest.mark.parametrize("declared", [b"11", b"99999999999999999999"])
async def test_a_body_that_says_it_is_too_large_is_not_read(declared: bytes) -> None:
    receive = sending(b"never read")
    with pytest.raises(BodyTooLargeError, match="10 bytes"):
        await read(receive, [(b"content-length", declared)], 10)
    assert (await receive())["body"] == b"never read"


@pytest.mark.parametrize(
    "headers", [[], [(b"content-length", b"3")], [(b"content-length", b"\xb2")], [(b"content-length", b"x")]]
)
async def test_a_body_that_turns_out_too_large_is_read_no_further(headers: Headers) -> None:
    receive = sending(b"01234", b"567890", b"never read")
    with pytest.raises(BodyTooLargeError):
        await read(receive, headers, 10)
    assert (await receive())["body"] == b"never read"


async def test_a_client_that_goes_away_in_the_middle_of_its_body() -> None:
    with pytest.raises(ClientGoneError):
        await read(sending(b"01234", is_gone=True), [], 10)


@given(st.lists(st.binary(max_size=PART_BYTES // 2), max_size=8))
async def test_a_body_is_its_pieces(pieces: list[bytes]) -> None:
    assert await read(sending(*pieces, b""), [], 8 * PART_BYTES) == b"".join(pieces)


async def test_a_body_that_costs_much_yields_between_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, turns = OpenBodies(2**20, 2**22), list[tuple[str, int]]()

    async def go_on(tenant: str, size: int = 0) -> None:
        turns.append((tenant, size))

    monkeypatch.setattr(bodies.turns, "go_on", go_on)
    with OpenBody(bodies, "a") as body:
        await body.read(sending(*[bytes(2**16)] * 16), [])
    assert turns == [("a", 0)] * 15 + [("a", 2**20)], "what is read as a whole may take long to decode"


async def test_what_belongs_to_a_body_counts_with_it() -> None:
    bodies = OpenBodies(MOST, 3 * MOST)
    with OpenBody(bodies, "a") as body:
        await body.read(sending(b"01"), [])
        body.hold(MOST - 2)
        assert bodies.bytes_of("a") == 2 + 3 * (MOST - 2)
        with pytest.raises(BodyTooLargeError, match=f"{MOST} bytes"):
            body.hold(1)
    assert bodies.bytes_of("a") == 0


async def test_a_body_is_read_and_counted_once() -> None:
    bodies, scope = OpenBodies(MOST, MOST_OF_ALL), dict[str, Any]()
    with ExitStack() as held:
        first = await bodies.request(scope, "a", held)
        assert await first.read(sending(b"01234"), []) == b"01234"
        with bodies.open(scope, "a") as again:
            assert await again.read(sending(b"never read"), []) == b"01234"
            with pytest.raises(BodyTooLargeError, match="4 bytes"):
                await again.read(sending(b""), [], 4)
            assert (bodies.bytes_of("a"), bodies.requests_of("a")) == (5, 1)
        assert (bodies.bytes_of("a"), bodies.requests_of("a")) == (0, 1)
    assert (bodies.bytes_of("a"), bodies.requests_of("a")) == (0, 0)
