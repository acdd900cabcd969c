"""The headers of an answer: those forwarded from the engine, and the gateway's own."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import compress
from typing import Final

from plait.backends.http.client import Response
from plait.gateway.asgi import NAME, Headers
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.booking import Booking
from plait.gateway.timer import loop_time_s
from plait.policy.types import NO_SLO

LEAST_WAIT_S = 0.01
"""The answer has `plait-waited-s` if the engine was sent the call at least this long after the call's arrival."""

_USUAL: Final = frozenset((b"keep-alive", b"close"))
"""Values of `Connection` that list no headers."""


def answer_headers(
    delivery: Delivery, booking: Booking, response: Response, names: AbstractSet[bytes]
) -> list[tuple[bytes, bytes]]:
    """The engine's headers with these `names`, and the gateway's own."""
    placement, session = booking.placement, delivery.asked.session
    headers = passed(response.headers, names)
    headers += [
        (b"x-request-id", booking.call.call_id.encode("latin-1")),
        (b"plait-engine", placement.engine_id.encode("latin-1")),
        (b"plait-placement", placement.reason.encode()),
        (b"plait-cached-tokens", b"%d" % placement.cached_tokens),
    ]
    if placement.loaded:
        tiers = ", ".join(f"{tier}={tokens}" for tier, tokens in placement.loaded)
        headers.append((b"plait-loaded-tokens", tiers.encode()))
    if session is not None:
        headers.append((b"plait-session", session.encode("latin-1")))
    waited_s = booking.sent_s - delivery.arrived_s
    if waited_s >= LEAST_WAIT_S:
        headers.append((b"plait-waited-s", b"%.3f" % waited_s))
    is_promised = booking.call.slo not in (None, NO_SLO) and response.status == 200
    outlook = _outlook(booking, delivery.arrived_s) if is_promised else None
    if outlook is not None:
        headers.append((b"plait-slo", outlook))
    return headers


def _outlook(booking: Booking, arrived_s: float) -> bytes | None:
    """`plait-slo`: whether TTFT and JCT are missed, at risk or expected, at a stream's first token or an answer's end.

    A TPOT that no iteration can keep is missed too. None if nothing is missed, and the placement has no prediction.
    """
    slo, placement, first_s = booking.call.judged, booking.placement, booking.first_token_s
    if slo == NO_SLO:
        return b"not-judged"
    age_s = (loop_time_s() if first_s is None else first_s) - arrived_s
    if (booking.tpot_is_missed and slo.tpot_s is not None) or slo.is_missed(age_s):
        return b"missed"
    if placement.meets_slo is None:
        return None
    if first_s is None:  # the whole answer is there
        return b"expected"
    is_late = slo.jct_s is not None and age_s + placement.decode_s > slo.jct_s
    return b"at-risk" if is_late or not placement.meets_slo else b"expected"


def passed(headers: Headers, names: AbstractSet[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers with these names, except hop-by-hop ones that `Connection` lists (RFC 9110, 7.6.1)."""
    given = list(map(NAME, headers))
    found = list(compress(headers, map(names.__contains__, given)))
    if b"connection" not in given or (dict(headers)[b"connection"] in _USUAL and given.count(b"connection") == 1):
        return found
    of_hop = {one.strip().lower() for name, value in headers if name == b"connection" for one in value.split(b",")}
    return [item for item in found if item[0] not in of_hop]
