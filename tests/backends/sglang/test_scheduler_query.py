"""What the API server asks a scheduler travels in a request's id."""

from __future__ import annotations

import pytest

from plait.backends.sglang.channel import (
    ChangeObjectives,
    ReportSince,
    SchedulerQuery,
    parse_query,
    query_id,
)


@pytest.mark.parametrize("query", [ReportSince(), ReportSince(7, "e"), ChangeObjectives('[{"plait_handle":"ü"}]')])
def test_a_query_is_read_as_it_was_written(query: SchedulerQuery) -> None:
    assert parse_query(query_id(query)) == query


@pytest.mark.parametrize("request_id", [None, "", "d4d4b93c98f54781803442d458fec68e"])
def test_any_other_id_is_the_engines(request_id: str | None) -> None:
    assert parse_query(request_id) is None
