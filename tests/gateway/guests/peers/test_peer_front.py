"""How requests of gateways are told from those of clients."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from starlette.types import Message, Scope

from plait.backends.errors import PlaitError
from plait.gateway.asgi import id_of
from plait.gateway.guests.peers.forwarding import Forwarding
from plait.gateway.guests.peers.membership import OF_PEER
from plait.gateway.guests.peers.peer_front import ChangedBodyError, PeerFront
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import LIFE_S, PeerKey
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.others import CHECKED, Checked, Forwarded, is_of_peer

KEY = PeerKey("the-key-of-all-gateways")
SENT = Forwarded("POST", "/v1/get?x=1", (), Checked("api_keys", "tenant"), b"a body", 8000)


class Front:
    """A front, and what came through it: scopes, bodies, and whether a gateway had sent it."""

    def __init__(self) -> None:
        peers = Peers({"0": "", "1": ""}, "1", KEY)
        self.front = PeerFront(self._app, Forwarding(peers), lambda _scope, error: self.refused.append(error))
        self.seen: list[tuple[Scope, bytes, bool]] = []
        self.refused: list[PlaitError] = []

    async def _app(self, scope: Scope, receive: Any, _send: Any) -> None:
        self.seen.append(
            (scope, await OpenBodies(100, 100).open(scope, "").read(receive, scope["headers"]), OF_PEER.get())
        )

    async def send(self, header: tuple[bytes, bytes], *pieces: bytes) -> list[Message]:
        """Send a request in so many pieces; returns what was answered in front."""
        headers, answer = [header, (b"a", b"b")], list[Message]()
        parts = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces or [b""]]
        parts[-1]["more_body"] = False

        async def receive() -> Message:
            return cast("Message", parts.pop(0))

        async def keep(message: Message) -> None:
            answer.append(message)

        path, _, query = SENT.target.partition("?")
        scope = {
            "type": "http",
            "method": SENT.method,
            "path": path,
            "query_string": query.encode(),
            "headers": headers,
        }
        await self.front({**scope, "server": ("host", 1)}, receive, keep)
        return answer


def signed(request: Forwarded = SENT, to: str = "1", ago_s: float = 0.0) -> tuple[bytes, bytes]:
    return KEY.sign_request(request, to, time.time() - ago_s)


@pytest.mark.parametrize("pieces", [[b"a body"], [b"a ", b"", b"body"]])
async def test_a_request_of_another_gateway_is_known_and_has_one_id(pieces: list[bytes]) -> None:
    front = Front()
    await front.send(signed(), *pieces)
    ((scope, body, of_peer),) = front.seen
    assert (body, of_peer, is_of_peer(scope), scope[CHECKED]) == (b"a body", True, True, SENT.checked)
    assert (scope["headers"], scope["server"]) == ([(b"a", b"b")], ("host", 8000))
    assert id_of(scope) == scope["plait.id"]
    assert not OF_PEER.get()


@pytest.mark.parametrize("pieces", [[b"another"], [b"a ", b"body", b"!"], [b""]])
async def test_a_request_with_another_body_does_not_come_through(pieces: list[bytes]) -> None:
    front = Front()
    with pytest.raises(ChangedBodyError):
        await front.send(signed(), *pieces)
    assert not front.seen


@pytest.mark.parametrize(
    "header",
    [
        signed(to="0"),
        signed(SENT._replace(method="GET")),
        signed(SENT._replace(target="/v1/get?x=2")),
        (b"plait-peer", b"guessed 80"),
        (b"plait-peer", b"\xff \xff"),
        (b"plait-peer", b"the-key-of-all-gateways 80"),
    ],
)
async def test_a_header_that_is_not_signed_for_this_is_a_clients(header: tuple[bytes, bytes]) -> None:
    front = Front()
    await front.send(header)
    ((scope, _, of_peer),) = front.seen
    assert (of_peer, is_of_peer(scope), CHECKED in scope, scope["headers"][0]) == (False, False, False, header)


async def test_clocks_that_differ_are_said_to() -> None:
    front = Front()
    start, _ = await front.send(signed(ago_s=LIFE_S + 1), b"a body")
    assert (start["status"], front.seen) == (503, [])


async def test_a_gateway_that_asks_who_is_here_gets_what_only_gateways_can_say() -> None:
    front = Front()
    question = signed(SENT._replace(checked=Checked("peer_key")))
    start, body = await front.send(question)
    assert (start["status"], body["body"], front.seen) == (200, KEY.answer(question[1]), [])
