"""Whatever is planned, every call ends with the tokens that the model says."""

from __future__ import annotations

import pytest

from e2e.real_schedulers.built_engine import Build
from e2e.real_schedulers.plans import Chaos
from e2e.real_schedulers.workloads import answers_so_far, one_a_step, shared_prefixes
from plait.policy.scheduling.local_scheduler import SCHEDULERS


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_ends_every_call_with_its_output(build: Build, policy: str, seed: int) -> None:
    stock = build(plait=None)
    shared_prefixes(stock, seed, most=500, arrivals=(0, 0, 1, 2, 5))
    tokens = dict(stock.tokens)
    planned = build(plait={"scheduler": policy})
    shared_prefixes(planned, seed, most=500, arrivals=(0, 0, 1, 2, 5))
    assert planned.tokens == tokens == answers_so_far(planned)


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("seed", range(2))
def test_aborted_calls_leave_nothing_behind(build: Build, policy: str, seed: int) -> None:
    """Some wait, some are prefilled and some decode."""
    engine = build(plait={"scheduler": policy})
    shared_prefixes(engine, seed, most=400, arrivals=(1,), aborted=0.4)
    assert engine.tokens == answers_so_far(engine)
    queue = engine.report(None, None).queue
    assert (queue.waiting, queue.running) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_breaks_the_engine_or_changes_a_token(build: Build, seed: int) -> None:
    engine = build(Chaos(seed))
    answers = one_a_step(engine, seed)
    assert engine.tokens == answers
    assert engine.driver.preemptions
    total, free, cached = engine.pages()
    assert free + cached == total
