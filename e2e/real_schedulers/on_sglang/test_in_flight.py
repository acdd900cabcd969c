"""What SGLang computes while a plan is made, also where it does not overlap two prefills in a row."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.real_schedulers.on_sglang.fixtures import Build
from e2e.real_schedulers.plans import Watching, watched
from e2e.real_schedulers.workloads import prompt


@pytest.mark.parametrize("build", [True], ids=["overlap"], indirect=True)
def test_prefills_in_a_row_are_in_flight_one_after_the_other(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang can wait for the first before it launches the second, but only once the second is planned."""

    def seen() -> list[Any]:
        policy = Watching()
        engine = watched(build, policy)
        engine.add(prompt(2 * engine.batch_tokens + 10, 1), 3, name="a")
        for _ in range(5):
            engine.step()
        return policy.seen

    overlapped = seen()
    monkeypatch.setenv("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", "1")
    assert seen() == overlapped
    assert [None if one is None else one[1] for one in overlapped] == [None, 0.0, 1.0, 2.0, 3.0]
