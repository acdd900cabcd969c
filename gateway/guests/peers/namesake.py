"""Checks at a start that no other gateway has the configured address."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import Final

from plait.backends.errors import EngineError
from plait.backends.http.client import HttpClient, Timeouts
from plait.backends.http.trust import SYSTEM_TRUST
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.others import PEER_KEY, Checked, Forwarded

WAITS: Final = Timeouts(connect_s=2.0, first_byte_s=2.0, idle_s=2.0)
"""A running gateway answers in some milliseconds. Without an answer, the address is free."""

MAX_ANSWER_BYTES: Final = 1024


async def has_namesake(peers: Peers) -> bool:
    """Whether a gateway with the same key answers at this gateway's address.

    Any other answer does not count: from an older release, or from a gateway with another key.
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
