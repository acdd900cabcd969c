"""What is reported as cached is what the engine's own cache finds, whatever happened to it."""

from __future__ import annotations

import pytest

from e2e.real_schedulers.built_engine import Build
from e2e.real_schedulers.following import Follower, follow_a_workload


@pytest.mark.parametrize("seed", range(4))
def test_reports_equal_the_cache_through_any_workload(build: Build, seed: int) -> None:
    follow_a_workload(build(), seed)


def test_an_emptied_cache_is_reported_empty(build: Build) -> None:
    engine = build()
    follower = Follower(engine)
    for _ in range(2):
        engine.add([position % 997 for position in range(300)], 3)
        engine.run()
        follower.check()
        assert len(follower.known) == 4
        assert engine.empty_cache()
        follower.check()
        assert not follower.known


def test_salted_calls_have_chains_of_their_own(build: Build) -> None:
    engine = build()
    follower = Follower(engine)
    same = [position % 997 for position in range(200)]
    for salt in (None, "tenant-a", "tenant-b"):
        engine.add(same, 2, salt=salt)
        engine.run()
        follower.check()
    assert len(follower.known) == 9
    assert len([block for block, parent in follower.known.items() if parent is None]) == 3
