"""Whether another gateway is at an address already, asked before a gateway takes that address for its own."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import Final

from plait.backends.errors import EngineError
from plait.backends.http.client import HttpClient, Timeouts
from plait.backends.http.trust import SYSTEM_TRUST
from plait.gateway.peers.peers import Peers
from plait.gateway.peers.signatures import PEER_KEY, Checked, Forwarded

WAITS: Final = Timeouts(connect_s=2.0, first_byte_s=2.0, idle_s=2.0)
"""A gateway that is there answers in some milliseconds. Without an answer nobody is there."""

MAX_ANSWER_BYTES: Final = 1024


async def has_namesake(peers: Peers) -> bool:
    """Whether another gateway with the same key and the same address answers there.

    What answers in another way is none: a release that does not know the question, or a gateway of others.
    """
    if peers.own.startswith("https:"):
        SYSTEM_TRUST.load()
    question = Forwarded("GET", f"/peer?{token_hex(16)}", (), Checked(PEER_KEY))
    header = peers.key.sign_request(question, peers.own, time.time())
    client = HttpClient(peers.own, name=f"gateway {peers.own}", timeouts=WAITS)
    try:
        response = await client.request(question.method, question.target, [header])
        answer = await response.gather(MAX_ANSWER_BYTES)
    except EngineError:
        return False
    finally:
        await client.aclose()
    return response.status == 200 and bytes(answer) == peers.key.answer(header[1])
