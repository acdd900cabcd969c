"""The built-in load: prompts without end, from bounded memory."""

from __future__ import annotations

from collections import Counter
from statistics import mean

import msgspec

from plait.gateway.simulation.endless_load import MOST_TURNS, EndlessLoad


def test_the_same_seed_gives_the_same_calls() -> None:
    one, other = EndlessLoad(3), EndlessLoad(3)
    assert [one.next_body("m") for _ in range(50)] == [other.next_body("m") for _ in range(50)]


def test_prefixes_are_shared_conversations_grow_and_nothing_else_is_kept() -> None:
    load = EndlessLoad()
    bodies = [load.next_body("m") for _ in range(2_000)]
    beginnings = [msgspec.json.encode([body["messages"], body.get("tools")])[:1500] for body in bodies]
    assert sum(count for count in Counter(beginnings).values() if count >= 10) > len(bodies) / 2
    turns = [len(body["messages"]) // 2 for body in bodies]
    assert max(turns) == MOST_TURNS
    assert len(msgspec.json.encode(load._conversations)) < 2_000_000
    assert len({msgspec.json.encode(body) for body in bodies}) == len(bodies)


def test_calls_come_at_the_rate_and_in_waves() -> None:
    load = EndlessLoad()
    assert abs(mean(load.pause_s(10.0, 0.0, 0.0) for _ in range(4_000)) - 0.1) < 0.01
    peak, low = (mean(load.pause_s(10.0, since_s, 0.6) for _ in range(4_000)) for since_s in (15.0, 45.0))
    assert 3 < low / peak < 5
