"""What the API server asks a scheduler travels in a request's id, and names the data-parallel rank that is meant."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from plait.backends.protocol.cache_state import CacheState
from plait.backends.sglang.channel import (
    STATE_KEY,
    ChangeObjectives,
    ReportSince,
    SchedulerQuery,
    id_of,
    parse_queries,
)
from tests.backends.sglang.fake_scheduler import Rank, Setup


@pytest.mark.parametrize(
    "query", [ReportSince(), ReportSince(7, "e", rank=3), ChangeObjectives('[{"plait_handle":"ü"}]', rank=1)]
)
def test_queries_are_read_as_they_were_written(query: SchedulerQuery) -> None:
    assert parse_queries(id_of([query, ReportSince(5)])) == [query, ReportSince(5)]


@pytest.mark.parametrize("request_id", [None, "", "d4d4b93c98f54781803442d458fec68e"])
def test_any_other_id_is_the_engines(request_id: str | None) -> None:
    assert parse_queries(request_id) is None


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """The schedulers of a server with two data-parallel ranks."""
    module = ModuleType("sglang.srt.managers.io_struct")
    vars(module)["GetInternalStateReqOutput"] = SimpleNamespace
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return [Rank(Setup(), time.monotonic, rank=rank) for rank in range(2)]


def answers(ranks: list[Rank], query: SchedulerQuery) -> list[Any]:
    asked = SimpleNamespace(rid=id_of([query]))
    return [answer for rank in ranks for answer in rank.get_internal_state(asked).internal_state[STATE_KEY]]


@pytest.mark.parametrize("rank", range(2))
def test_only_the_rank_that_is_meant_reports(ranks: list[Rank], rank: int) -> None:
    found = answers(ranks, ReportSince(rank=rank))
    assert found[1 - rank] is None
    state = msgspec.msgpack.decode(found[rank], type=CacheState)
    assert state.epoch == ranks[rank].plait.epoch


@pytest.mark.parametrize("rank", range(2))
def test_objectives_change_in_the_rank_that_is_meant(ranks: list[Rank], rank: int) -> None:
    found = answers(ranks, ChangeObjectives('[{"plait_handle":"h"}]', rank))
    assert (found[rank], found[1 - rank]) == (0, None)
