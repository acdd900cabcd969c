"""What an engine evicts for the prompts that it still has to compute, case by case; a block is a letter of 4 tokens."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.fleet.expected_evictions import ExpectedEvictions, Prompt
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from tests.invariants import check

BLOCK_TOKENS = 4


def hashes(text: str) -> array[int]:
    return chain(list(text.encode()), 1, 0)


class Engine:
    """An engine that has stored some texts, the oldest first, and has room for `free_tokens` more."""

    def __init__(self, *stored: str, free_tokens: float = 0) -> None:
        self.tree = PrefixTree()
        self.residency = Residency("a", self.tree)
        self.evictions = ExpectedEvictions(self.residency, BLOCK_TOKENS)
        self.prompts: dict[object, Prompt] = {}
        self.report(*stored, free_tokens=free_tokens)

    def report(self, *stored: str, removed: str = "", free_tokens: float = 0) -> None:
        """The engine has stored texts and removed the last block of one."""
        if removed:
            self.residency.resident.remove(hashes(removed)[-1])
        for text in stored:
            self.residency.resident.store(None, list(hashes(text)))
        self.evictions.update(free_tokens, dict(self.prompts))

    def book(self, text: str, rest_tokens: int = 0) -> str:
        self.send(text, text, rest_tokens)
        return text

    def send(self, call: object, text: str, rest_tokens: int) -> None:
        leaf = self.tree.insert(hashes(text))
        self.residency.book(leaf)
        self.prompts[call] = leaf, BLOCK_TOKENS * len(text) + rest_tokens

    def compute(self, call: object) -> None:
        del self.prompts[call]
        self.evictions.computed(call)

    def held(self, text: str) -> int:
        return self.residency.cached_blocks(self.tree.match(hashes(text)))


def test_a_prompt_evicts_what_it_needs_beyond_the_free_room() -> None:
    engine = Engine("abcdef", "xyz")
    engine.book("mnop", rest_tokens=1)
    engine.report(free_tokens=8)
    assert (engine.held("abcdef"), engine.held("xyz")) == (4, 3), "17 tokens are needed, 9 of them are two whole blocks"


def test_a_prompt_counts_from_the_next_report_on() -> None:
    engine = Engine("abcdef")
    engine.book("mn")
    assert engine.held("abcdef") == 6
    engine.report()
    assert engine.held("abcdef") == 4
    engine.book("op")
    assert engine.held("abcdef") == 4
    engine.report()
    assert engine.held("abcdef") == 2


def test_each_report_shows_what_the_prompts_still_need() -> None:
    engine = Engine("abcdef", "xyz")
    engine.book("mnop")
    engine.report()
    assert engine.held("abcdef") == 2
    engine.report("mno", removed="abcdef", free_tokens=0)
    assert engine.held("abcdef") == 4, "one block is still to come, although only one of three was evicted"
    engine.report("mnop")
    assert engine.held("abcdef") == 5, "the engine found room elsewhere"


def test_room_that_other_calls_gave_back_is_not_evicted_again() -> None:
    engine = Engine("abcdef")
    engine.book("mnop")
    engine.report()
    assert engine.held("abcdef") == 2
    engine.report(free_tokens=8)
    assert engine.held("abcdef") == 4


def test_what_several_prompts_bring_counts_once() -> None:
    engine = Engine("abcdefgh")
    engine.book("mnop")
    engine.book("mnoq")
    engine.report()
    assert engine.held("abcdefgh") == 3


def test_the_last_tokens_of_a_prompt_count_while_it_is_not_stored() -> None:
    engine = Engine("abcdef")
    engine.book("mn", rest_tokens=3)
    engine.book("op", rest_tokens=1)
    engine.report()
    assert engine.held("abcdef") == 1
    engine.report("mn", removed="abcdef")
    assert engine.held("abcdef") == 3, "they were given their block with the one before"


def test_the_expectation_ends_with_the_last_prompt() -> None:
    engine = Engine("abcdef")
    first, second = engine.book("m"), engine.book("n")
    engine.report()
    engine.compute(first)
    assert engine.held("abcdef") == 4, "a report will show which of them have gone"
    later = engine.book("o")
    engine.compute(second)
    assert engine.held("abcdef") == 6
    engine.compute(later)
    engine.report()
    assert engine.held("abcdef") == 6, "none of them counts any more"


def test_a_call_that_is_given_up_evicts_nothing() -> None:
    engine = Engine("abcdef")
    given_up = engine.book("mno")
    engine.book("n")
    engine.report()
    assert engine.held("abcdef") == 2
    engine.evictions.given_up(given_up)
    assert engine.held("abcdef") == 5
    engine.evictions.given_up(given_up)
    assert engine.held("abcdef") == 5, "it has ended already"


def test_without_reports_nothing_is_expected() -> None:
    engine = Engine("abcdef")
    engine.book("mnop")
    engine.report()
    engine.evictions.end()
    engine.book("qrst")
    assert engine.held("abcdef") == 6


@given(
    prompts=st.lists(st.text("abc", min_size=1, max_size=5), max_size=6),
    stored=st.lists(st.text("abc", max_size=5), max_size=4),
    free_tokens=st.integers(0, 30),
    rest_tokens=st.integers(0, BLOCK_TOKENS - 1),
    reports=st.sets(st.integers(0, 5)),
)
def test_the_shortage_is_that_of_all_blocks_that_are_missing_each_once(
    prompts: list[str], stored: list[str], free_tokens: int, rest_tokens: int, reports: set[int]
) -> None:
    """However many reports there were before."""
    engine = Engine("x" * 40, *stored, free_tokens=free_tokens)
    for number, text in enumerate(prompts):
        engine.send(number, text, rest_tokens)
        if number in reports:
            engine.report(free_tokens=free_tokens)
    engine.report(free_tokens=free_tokens)
    known = {text[:end] for text in stored for end in range(1, len(text) + 1)}
    missing = {text[:end] for text in prompts for end in range(1, len(text) + 1)} - known
    rests = sum(rest_tokens for text in prompts if text not in known)
    shortage_tokens = max(0, BLOCK_TOKENS * len(missing) + rests - free_tokens)
    assert engine.held("x" * 40) == 40 - shortage_tokens // BLOCK_TOKENS
    check(engine.tree)
    check(engine.residency)
