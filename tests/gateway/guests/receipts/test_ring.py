"""The bounded store of receipts, against a plain list."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.receipts.ring import OVERHEAD_BYTES, Ring

MAX_BYTES = 4000


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 900)), max_size=60))
def test_the_newest_are_kept_within_the_bound(added: list[tuple[int, int]]) -> None:
    ring, kept = Ring(MAX_BYTES), list[tuple[int, bytes]]()
    for number, (key, size) in enumerate(added):
        entry = f"{number:04d}".encode() + b"." * size
        ring.add(key, entry)
        kept.append((key, entry))
        while sum(len(one) + OVERHEAD_BYTES for _, one in kept) > MAX_BYTES:
            kept.pop(0)
    assert list(ring.newest()) == [entry for _, entry in reversed(kept)]
    for key in range(6):
        assert ring.get(key) == dict(kept).get(key), "the newest of a key"


def test_a_flood_of_entries_takes_no_more_memory_than_it_may() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        ring = Ring(2**21)
        for number in range(50_000):
            ring.add(hash(("tenant", f"request-{number}")), f"{number}".encode() + bytes(350))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= 1.1 * 2**21
    assert ring.get(hash(("tenant", "request-49999"))) is not None
