"""What is timed: the plan, without torch."""

from __future__ import annotations

from benchmarks.timing.work import SHAPES, Group, Work, planned


def test_every_iteration_is_planned_once() -> None:
    works = list(planned())
    assert len(works) == len(set(works)) > 100
    assert {len(work.groups) for work in works} == {1, 2}


def test_bytes_of_a_token_in_the_kv_cache() -> None:
    assert SHAPES["llama-8b"].kv_token_bytes == 32 * 2 * 8 * 128 * 2 == 131_072


def test_what_a_group_takes_in_the_kv_cache() -> None:
    work = Work("chunk and decodes", (Group(1, 512, 8192), Group(16, 1, 1024)))
    assert [group.tokens for group in work.groups] == [512, 16]
    assert work.slots == 8704 + 16 * 1025
