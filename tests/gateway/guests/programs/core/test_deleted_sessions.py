"""Deleted sessions against a list of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import SessionEndedError
from plait.gateway.guests.programs.core.sessions import DeletedSessions
from tests.invariants import check

LIMIT = 3


def is_refused(deleted: DeletedSessions, tenant: str, session_id: str, now_s: float) -> bool:
    try:
        deleted.check(tenant, session_id, now_s)
    except SessionEndedError:
        return True
    return False


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from("stuvw"), st.integers(1, 9))))
def test_an_id_is_refused_until_its_time_or_until_others_outlive_it(steps: list[tuple[int, str, str, int]]) -> None:
    deleted, until_s = DeletedSessions(LIMIT), dict[tuple[str, str], float]()
    now_s = 0.0
    for wait_s, tenant, session_id, ttl_s in steps:
        now_s += wait_s
        if is_refused(deleted, tenant, session_id, now_s):
            deleted.expire(now_s)
        else:
            deleted.add(tenant, session_id, now_s, now_s + ttl_s)
            until_s[tenant, session_id] = now_s + ttl_s
        until_s = {key: end_s for key, end_s in until_s.items() if end_s > now_s}
        mine = sorted((end_s, name) for (owner, name), end_s in until_s.items() if owner == tenant)
        for _, name in mine[: max(0, len(mine) - LIMIT)]:
            del until_s[tenant, name]
        refused = {(owner, name) for owner in "ab" for name in "stuvw" if is_refused(deleted, owner, name, now_s)}
        assert refused == until_s.keys()
        check(deleted)
    deleted.expire(now_s + 100)
    assert len(deleted) == 0
