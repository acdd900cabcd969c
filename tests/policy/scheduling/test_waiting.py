"""Candidates of waiting calls, made when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from plait.policy.scheduling.batching import Candidate
from plait.policy.scheduling.waiting import Upcoming
from tests.policy.scheduling.fake_engine import prompt


def test_a_candidate_is_made_once_when_it_is_first_read() -> None:
    made: list[Candidate] = []

    def make() -> Iterator[Candidate]:
        for number in range(5):
            made.append(Candidate(prompt(f"c{number}", 10), 10, 0, True))
            yield made[-1]

    upcoming = Upcoming(make())
    assert list(islice(upcoming, 2)) == made
    assert len(made) == 2
    ahead, behind = iter(upcoming), iter(upcoming)
    assert [next(ahead) for _ in range(4)] == made
    assert [next(behind) for _ in range(5)] == made
    assert list(ahead) == made[4:]
    assert list(upcoming) == made
    assert len(made) == 5
