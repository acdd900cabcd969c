"""A tenant's own calls keep their order, and the claims turn red without what keeps it."""

from __future__ import annotations

import pytest

from benchmarks import own_order
from benchmarks.filling.systems import ADMISSION
from benchmarks.own_order import Figures, Labels, Task, run
from plait.gateway.admission.lines import Lines
from plait.policy.order import Rank
from plait.policy.scheduling import in_order


def of(labels: Labels, *, beside: bool = False) -> Figures:
    return run(Task(ADMISSION, 1, labels, beside))


def test_the_claims_hold_for_a_seed() -> None:
    found = {task: run(task) for task in own_order.tasks_of([1], quick=True) if (task.labels or task.system)}
    assert [claim for claim in own_order.claims(found) if not claim.holds] == []


def test_objectives_change_nothing_where_engines_do_not_rank_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    labelled = of("objectives").small_mean_s
    monkeypatch.setattr(in_order, "rank_of", lambda _slo, _objective: Rank.PLAIN)
    assert of("objectives").small_mean_s > own_order.LABELLED * labelled


def test_a_bystander_holds_chats_up_where_small_calls_do_not_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lines, "_small_first", lambda _self, _line, _tenant, _now_s: None)
    assert of("plain", beside=True).small_mean_s > own_order.BESIDE * of("plain").small_mean_s
