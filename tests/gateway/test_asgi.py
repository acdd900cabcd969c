from __future__ import annotations

from typing import Any

import pytest

from plait.backends.errors import BodyTooLargeError, CallerError, LimitError, MethodNotAllowedError, NoEngineError
from plait.gateway.asgi import ClientGoneError, Headers, header, read_body, send_error


def body_of(*pieces: bytes, gone: bool = False) -> tuple[Any, list[int]]:
    """An ASGI `receive`, and how many of its messages were taken."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if gone:
        messages.append({"type": "http.disconnect"})
    else:
        messages[-1]["more_body"] = False
    taken = [0]

    async def receive() -> dict[str, Any]:
        taken[0] += 1
        return messages[taken[0] - 1]

    return receive, taken


def test_a_header_is_its_first_value() -> None:
    headers = [(b"a", b"1"), (b"b", b"\xe9"), (b"b", b"3")]
    assert (header(headers, b"b"), header(headers, b"c")) == ("é", None)


@pytest.mark.parametrize("pieces", [[b""], [b"0123456789"], [b"01234", b"", b"56789"]])
async def test_a_body_up_to_the_limit(pieces: list[bytes]) -> None:
    receive, _ = body_of(*pieces)
    assert await read_body(receive, [], 10) == b"".join(pieces)


@pytest.mark.parametrize("declared", [b"11", b"99999999999999999999"])
async def test_a_body_that_says_it_is_too_large_is_not_read(declared: bytes) -> None:
    receive, taken = body_of(b"x")
    with pytest.raises(BodyTooLargeError, match="10 bytes"):
        await read_body(receive, [(b"content-length", declared)], 10)
    assert taken == [0]


@pytest.mark.parametrize(
    "headers", [[], [(b"content-length", b"3")], [(b"content-length", b"\xb2")], [(b"content-length", b"x")]]
)
async def test_a_body_that_turns_out_too_large_is_read_no_further(headers: Headers) -> None:
    receive, taken = body_of(b"01234", b"567890", b"never read")
    with pytest.raises(BodyTooLargeError):
        await read_body(receive, headers, 10)
    assert taken == [2]


async def test_a_client_that_goes_away_in_the_middle_of_its_body() -> None:
    receive, _ = body_of(b"01234", gone=True)
    with pytest.raises(ClientGoneError):
        await read_body(receive, [], 10)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (CallerError("no", param="x"), 400, {}),
        (MethodNotAllowedError("no"), 405, {b"allow": b"POST"}),
        (NoEngineError("no", retry_after_s=1.0), 503, {b"retry-after": b"1", b"x-should-retry": b"true"}),
        (NoEngineError("no", retry_after_s=0.2), 503, {b"retry-after": b"1", b"x-should-retry": b"true"}),
        (NoEngineError("no"), 503, {b"retry-after": b"1", b"x-should-retry": b"true"}),
        (LimitError("no"), 429, {b"retry-after": b"1"}),
    ],
)
async def test_an_error_is_a_whole_response(error: CallerError, status: int, headers: dict[bytes, bytes]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_error(send, error, "r1")
    start, body = sent
    length = str(len(error.body())).encode()
    always = {b"content-type": b"application/json", b"x-request-id": b"r1", b"content-length": length}
    assert (start["status"], dict(start["headers"])) == (status, always | headers)
    assert body == {"type": "http.response.body", "body": error.body()}
