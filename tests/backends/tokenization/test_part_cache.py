"""Parts are found behind the part that they follow, and only while there is room."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.tokenization.prompt_encoder import Part, PartCache

IDS, HASHES = array("I", [1, 2]), array("Q", [3])
SIZE = PartCache(10**6).put(("scope", "a"), IDS, HASHES).size_bytes


def put(cache: PartCache, *texts: str, scope: str = "scope") -> list[Part]:
    """Put a prompt of these parts. Returns them."""
    path: list[Part] = []
    for text in texts:
        path.append(cache.put((path[-1].number if path else scope, text), IDS, HASHES))
    return path


def read(cache: PartCache, *texts: str, scope: str = "scope") -> int:
    """How many parts of a prompt are known."""
    before: str | int = scope
    for known, text in enumerate(texts):
        part = cache.get((before, text))
        if part is None:
            return known
        before = part.number
    return len(texts)


def test_a_part_is_known_behind_the_same_parts_only() -> None:
    cache = PartCache(10**6)
    put(cache, "a", "b", "c")
    put(cache, "b", "c")
    assert read(cache, "a", "b", "c") == 3
    assert read(cache, "a", "c") == 1
    assert read(cache, "b", "c", "c") == 2
    assert read(cache, "a", scope="another") == 0


def test_a_part_that_is_put_twice_stays_as_it_is() -> None:
    cache = PartCache(10**6)
    path = put(cache, "a", "b")
    assert put(cache, "a", "b") == path
    assert cache.held_bytes == 2 * SIZE


def test_a_prompt_is_evicted_from_its_end() -> None:
    cache = PartCache(4 * SIZE)
    first = put(cache, "a", "b")
    cache.used(first)
    cache.used(put(cache, "c", "d"))
    cache.used(first[:1])
    put(cache, "e")
    assert (read(cache, "a", "b"), read(cache, "c", "d"), read(cache, "e")) == (1, 2, 1)


def test_nothing_is_found_behind_a_part_that_was_evicted_and_put_again() -> None:
    cache = PartCache(2 * SIZE)
    put(cache, "a", "b")
    put(cache, "c")  # evicts a
    put(cache, "a")  # evicts b
    assert read(cache, "a", "b") == 1


def test_a_prompt_that_would_take_much_of_the_memory_is_not_kept() -> None:
    assert PartCache(1600).takes("a" * 100)
    assert not PartCache(1600).takes("a" * 101)
    assert not PartCache(0).takes("a")


@given(st.lists(st.text("ab", min_size=1, max_size=9) | st.just("used"), max_size=60), st.integers(0, 12))
def test_memory_is_bounded_and_counted(prompts: list[str], parts: int) -> None:
    cache = PartCache(parts * SIZE)
    paths: list[list[Part]] = [[]]
    for prompt in prompts:
        if prompt == "used":
            cache.used(paths[len(prompts) % len(paths)])
        else:
            paths.append(put(cache, *prompt))
        kept: list[Part] = list(cache._parts.values())
        assert cache.held_bytes == sum(part.size_bytes for part in kept) <= parts * SIZE
        assert len({part.number for part in kept}) == len(kept)
