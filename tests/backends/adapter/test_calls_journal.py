"""The journal of calls against its whole history: from any past state, a report leads to the present one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.adapter import calls_journal
from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.calls_journal import MAX_HASHES, CallsJournal

BLOCK_TOKENS = 16
Known = dict[int, bool]
"""The numbers of the calls, and whether each is computed."""


def follow(known: Known, cache: CacheJournal, calls: CallsJournal, cursor: int | None, asking: str) -> Known:
    """What a follower that knew `known` knows after a report."""
    snapshot = cache.since(cursor)[0]
    came, ended = calls.since(None if snapshot else cursor, asking)
    after = {} if snapshot else {number: known[number] for number in known if number not in ended}
    assert all(call.gateway != asking for call in came)
    return after | {call.number: call.is_computed for call in came}


@given(st.data(), st.sampled_from((1, 2, 1_000)))
def test_from_any_past_cursor_a_report_leads_to_exactly_the_calls_that_are_there(
    data: st.DataObject, remembered: int
) -> None:
    cache = CacheJournal()
    calls = CallsJournal(cache, BLOCK_TOKENS)
    calls_journal.MAX_ENDED, before = remembered, calls_journal.MAX_ENDED
    here: dict[str, tuple[int, bool, str]] = {}
    history: dict[int, Known] = {0: {}}
    came = 0
    try:
        for step in range(data.draw(st.integers(0, 30))):
            kind = data.draw(st.sampled_from(("arrive", "compute", "end", "store")))
            if kind == "store":
                cache.store(step, None)
            elif kind == "arrive":
                gateway = data.draw(st.sampled_from("abc"))
                came += 1
                here[f"key-{step}"] = (came, False, gateway)
                calls.arrived(f"key-{step}", gateway, 40, lambda: (1, 2, 3), is_urgent=False)
            elif here:
                key = data.draw(st.sampled_from(sorted(here)))
                number, _, gateway = here[key]
                if kind == "compute":
                    calls.computed(key)
                    here[key] = number, True, gateway
                else:
                    calls.ended(key)
                    del here[key]
            others = {number: computed for number, computed, gateway in here.values() if gateway != "a"}
            history[cache.cursor] = others
            cursor = data.draw(st.sampled_from(sorted(history)))
            assert follow(history[cursor], cache, calls, cursor, "a") == others
            assert calls.has_news(cursor, "a") == (any(cache.since(cursor)) or any(calls.since(cursor, "a")))
            assert follow({99: True}, cache, calls, None, "a") == others
            assert len(calls) == len(here)
    finally:
        calls_journal.MAX_ENDED = before


def test_what_is_missed_is_what_is_not_stored_now() -> None:
    cache = CacheJournal()
    calls = CallsJournal(cache, BLOCK_TOKENS)
    calls.arrived("key", "a", 50, lambda: (1, 2, 3, 4), is_urgent=True)
    (call,), _ = calls.since(None, "b")
    assert (call.missed_tokens, call.hashes, call.is_urgent) == (50, [1, 2, 3], True), "the fourth is of its answer"
    cache.store(1, None)
    cache.store(2, 1)
    assert calls.since(None, "b")[0][0].missed_tokens == 18
    cache.store(3, 2)
    assert calls.since(None, "b")[0][0].missed_tokens == 2
    calls.computed("key")
    (call,), _ = calls.since(None, "b")
    assert (call.missed_tokens, call.hashes, call.is_computed) == (0, [], True)


def test_of_a_very_long_prompt_the_first_blocks_are_reported() -> None:
    calls = CallsJournal(CacheJournal(), BLOCK_TOKENS)
    calls.arrived("key", "a", 10_000 * BLOCK_TOKENS, lambda: range(10_000), is_urgent=False)
    (call,), _ = calls.since(None, "b")
    assert call.hashes == list(range(MAX_HASHES))


def test_a_call_that_no_gateway_has_sent_is_not_reported() -> None:
    calls = CallsJournal(CacheJournal(), BLOCK_TOKENS)
    calls.arrived("key", "", 50, lambda: (1,), is_urgent=False)
    calls.computed("key")
    calls.ended("key")
    assert calls.since(None, "b") == ([], [])
