"""The order of a batch's lines: every line once, common beginnings together, and a part for each engine."""

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.batches.line_order import HASH_BYTES, MOST_STEPS, STEP_BYTES, LinesLeft, chain_of


def text(*pieces: str) -> bytes:
    return b"".join(piece.encode() * STEP_BYTES for piece in pieces)


def chains_of(*beginnings: str) -> list[bytes]:
    return [chain_of(text(*beginning)) for beginning in beginnings]


def test_a_chain_names_all_that_came_before() -> None:
    one, other = chain_of(text("a", "b")), chain_of(text("c", "b"))
    assert len(one) == 2 * HASH_BYTES
    assert one[HASH_BYTES:] != other[HASH_BYTES:]
    assert chain_of(text("a", "b", "c")).startswith(one)
    assert chain_of(b"short") == b""
    assert len(chain_of(text(*"a" * 50))) == MOST_STEPS * HASH_BYTES


@given(
    beginnings=st.lists(st.text("ab", max_size=4), max_size=60),
    engines=st.lists(st.sampled_from("xyz"), unique=True),
    asking=st.lists(st.sampled_from("xyzw"), max_size=80),
    again=st.sets(st.integers(0, 59)),
)
def test_each_line_runs_once(beginnings: list[str], engines: list[str], asking: list[str], again: set[int]) -> None:
    """Whoever asks, also an engine that was not there at first; a line that is given back comes again."""
    left, taken = LinesLeft(chains_of(*beginnings), range(len(beginnings)), engines), list[int]()
    for engine in [*asking, *"x" * len(beginnings) * 2]:
        line = left.next(engine)
        assert (line is None) == (len(left) == 0)
        if line is None:
            continue
        assert left.take(engine) == line
        if line in again:
            again.remove(line)
            left.give_back(line)
        else:
            taken.append(line)
    assert sorted(taken) == list(range(len(beginnings)))


def test_common_beginnings_follow_each_other_on_one_engine() -> None:
    chains = chains_of(*("s" + name for name in "abcabcabc"))
    left = LinesLeft(chains, range(9), ["one"])
    names = [chains[left.take("one")] for _ in range(9) if left.next("one") is not None]
    assert all(len(set(names[begin : begin + 3])) == 1 for begin in (0, 3, 6))


def test_each_engine_has_a_part() -> None:
    chains, engines = chains_of(*("s" + name for name in "abcdabcdabcdabcd")), ["one", "two", "three", "four"]
    left = LinesLeft(chains, range(16), engines)
    parts = {
        engine: [chains[left.take(engine)] for _ in range(4) if left.next(engine) is not None] for engine in engines
    }
    assert all(len(set(part)) == 1 for part in parts.values())
    assert len({part[0] for part in parts.values()}) == 4


def test_an_engine_without_lines_takes_over_half_of_the_longest_part() -> None:
    chains = chains_of(*("s" + name for name in "abcd"))
    left = LinesLeft(chains, range(4), ["one"])
    assert left.next("two") in {2, 3}
    assert left.next("one") in {0, 1}
    assert len(left) == 4


def test_what_the_line_before_had_is_shared() -> None:
    chains = chains_of("sa", "sa", "sb", "")
    left = LinesLeft(chains, range(4), ["one"])
    shared = []
    while (line := left.next("one")) is not None:
        shared.append(left.shared_bytes("one", line))
        left.take("one")
    assert sorted(shared) == [0, 0, STEP_BYTES, 2 * STEP_BYTES]
