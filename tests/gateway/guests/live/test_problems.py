"""What is wrong: each problem is named in its time, once, and is over once it is mended; a healthy fleet has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from plait.gateway.guests.live.problems import (
    THRESHOLDS,
    EngineSigns,
    ModelSigns,
    Problem,
    Problems,
    Signs,
    TenantSigns,
)
from plait.gateway.guests.live.status import PART_OF_OTHERS
from tests.source_tree import ROOT

WELL = EngineSigns(
    takes_calls=True, draining=False, health="up", cause="", health_since=100.0, slowness=1.0, owed=3, silent_s=0.1,
    differs=None,
)  # fmt: skip
MIB = 2**20
WALL_S = 1e9

Change = Callable[[float], Mapping[str, Any]]
"""What is seen in a fleet that is well but for one thing, by the seconds since that began."""


def signs(now_s: float, **changes: Any) -> Signs:
    """A fleet under a steady load: 3,000 prompt tokens a second, of which 60 % are cached."""
    rate = max(0.0, now_s)
    model = ModelSigns(
        engines_up=2, waiting=2, wait_s=0.5, held_sessions=0, prompt_tokens=round(3000 * rate),
        cached_tokens=round(1800 * rate), slo_calls=round(rate), slo_missed=round(0.01 * rate),
    )  # fmt: skip
    model = model._replace(**changes.pop("model", {}))
    engine = WELL._replace(**changes.pop("engine", {}))
    red = changes.pop("red", {})
    answered = round(2 * rate)
    tenants = TenantSigns(
        {"blue": 1, "red": red.get("waiting", 1)}, {"blue": answered, "red": answered}, {"red": red.get("failed", 0)}
    )
    return Signs(now_s, WALL_S + now_s, {"a": WELL, "b": engine}, {"m": model}, tenants, **changes)


def constant(**changes: Any) -> Change:
    return lambda _since_s: changes


BEGAN_S = 400.0

WRONG: Mapping[str, tuple[str, Change]] = {
    "no_engine": ("m", constant(model={"engines_up": 0})),
    "engine_out": ("b", constant(engine={"takes_calls": False, "health": "ejected", "cause": "status_500"})),
    "engine_flaps": ("b", lambda at_s: {"engine": {"takes_calls": at_s % 10 < 5, "health": "ejected"}}),
    "engine_slow": ("b", constant(engine={"slowness": 1.8})),
    "engine_stuck": ("b", constant(engine={"silent_s": 12.0})),
    "engine_differs": ("b", constant(engine={"differs": "its tokenizer differs"})),
    "hit_rate_fallen": ("m", lambda at_s: {"model": {"cached_tokens": round(1800 * BEGAN_S + 300 * at_s)}}),
    "queue_long": ("m", constant(model={"wait_s": 45.0, "waiting": 90})),
    "tenant_floods": ("red", constant(red={"waiting": 40})),
    "slo_missed": ("m", lambda at_s: {"model": {"slo_missed": round(4 + 0.3 * at_s)}}),
    "sessions_held": ("m", constant(model={"held_sessions": 4})),
    "requests_break_engines": ("red", lambda at_s: {"red": {"failed": round(at_s)}}),
    "loop_late": ("", constant(loop_late=0.2)),
    "memory_grows": ("", lambda at_s: {"resident_bytes": 300 * MIB + round(5 * MIB * at_s)}),
    "log_dropped": ("", lambda at_s: {"log_dropped": round(at_s)}),
    "store_failing": ("", constant(store_problem="the disk is full")),
    "reload_refused": ("", constant(refused_reload=["c.toml: server.port = 0: at least 1"])),
    "peer_lost": ("http://b", constant(missed={"http://b": 1.0})),
    **{
        code: ("http://b", constant(odd_peers={"http://b": (code, "The gateway at http://b is odd.")}))
        for code in ("peer_stale", "clocks_differ", "peer_not_trusted")
    },
}


@pytest.mark.parametrize("code", WRONG)
def test_it_is_named_in_its_time_and_over_once_it_is_mended(code: str) -> None:
    about, change = WRONG[code]
    changes: list[tuple[str, str, bool]] = []

    def changed(problem: Problem, begins: bool) -> None:
        changes.append((problem.code, problem.about, begins))

    problems, named_s, over_s = Problems(changed), 0.0, 0.0
    for second in range(1300):
        wrong = BEGAN_S <= second < BEGAN_S + 200
        usual = {"resident_bytes": 300 * MIB} if code == "memory_grows" else {}
        found = problems.look(signs(second, **(change(second - BEGAN_S) if wrong else usual)))
        if any(one.code == code for one in found):
            assert second >= BEGAN_S
            named_s = named_s or second - BEGAN_S
            over_s = second - BEGAN_S - 200
    beside = {("engine_out", about)} if code == "engine_flaps" else set()
    assert {one[:2] for one in changes} == {(code, about), *beside}, "and nothing else"
    assert changes.count((code, about, True)) == 1
    assert changes.count((code, about, False)) == 1
    slow = {"hit_rate_fallen": 90, "memory_grows": 90, "sessions_held": 62}
    assert named_s <= slow.get(code, 30)
    flaps_s = 600.0 if code == "engine_flaps" else 0.0
    assert over_s <= 60 + flaps_s


def test_each_code_has_a_case_and_a_part() -> None:
    assert WRONG.keys() == THRESHOLDS.keys()


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_healthy_fleet_and_an_idle_one_have_no_problem(is_idle: bool) -> None:
    problems = Problems()
    for second in range(3000):
        assert problems.look(signs(0.0 if is_idle else second)._replace(now_s=float(second))) == ()


def test_who_calls_most_does_not_break_engines_if_all_fail_alike() -> None:
    problems = Problems()
    for second in range(600):
        answered, failed = {"big": 10 * second, "small": second // 5}, {"big": second // 2, "small": second // 50}
        assert not problems.look(signs(second)._replace(tenants=TenantSigns({}, answered, failed)))


def test_who_is_alone_does_not_flood() -> None:
    problems = Problems()
    for second in range(60):
        assert not problems.look(signs(second)._replace(tenants=TenantSigns({"only": 50}, {"only": 10 * second}, {})))


def test_an_engine_that_drains_or_was_never_tried_is_not_out() -> None:
    problems = Problems()
    for second in range(30):
        assert not problems.look(signs(second, engine={"takes_calls": False, "draining": True}))
        assert not problems.look(signs(second, engine={"takes_calls": False, "health": "untried"}))


def test_a_problem_says_since_when_and_where_to_read_on() -> None:
    problems, out = Problems(), {"takes_calls": False, "health": "ejected", "cause": "status_500"}
    for second in range(10):
        found = problems.look(signs(second, engine=out))
    assert found == (
        Problem("engine_out", "b", 100.0, "b takes no calls: it is ejected (status_500).", "an-engine-is-out"),
    )


def test_a_problem_gives_the_reason_of_what_went_wrong() -> None:
    problems = Problems()
    down = {"takes_calls": False, "health": "down", "cause": "unreachable"}
    refused = {"refused_reload": ["c.toml: one", "c.toml: two"]}
    for second in range(4):
        reason = "engine b cannot be reached: 10.0.0.7:80 refused the connection"
        found = problems.look(signs(second, engine=down | {"reason": reason}, **refused))
    assert {one.code: one.sentence for one in found} == {
        "engine_out": "b takes no calls: it is down (unreachable): engine b cannot be reached: 10.0.0.7:80 refused the "
        "connection.",
        "reload_refused": "A reload was refused, and what was before stays: c.toml: one; c.toml: two.",
    }


def test_each_part_is_a_heading_of_the_page() -> None:
    page = (ROOT / "docs" / "oncall.md").read_text(encoding="utf-8")
    headings = {line[3:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}
    assert {threshold.part for threshold in THRESHOLDS.values()} | {PART_OF_OTHERS} <= headings
    assert all(f"`{code}`" in page for code in THRESHOLDS)


def at_ranks(now_s: float, *out: str) -> Signs:
    """A fleet of an engine `a` and an address `b` of four ranks. Those `out` take no calls."""
    engines = dict.fromkeys(("a", *(f"b@{rank}" for rank in range(4))), WELL)
    lost = WELL._replace(takes_calls=False, health="down", cause="unreachable")
    return signs(now_s)._replace(engines=engines | dict.fromkeys(out, lost))


def test_what_is_wrong_with_each_rank_is_one_problem_of_their_address() -> None:
    problems, ranks = Problems(), [f"b@{rank}" for rank in range(4)]
    for second in range(4):
        found = problems.look(at_ranks(second, *ranks, "a"))
    assert [(one.code, one.about, one.sentence) for one in found] == [
        ("engine_out", "a", "a takes no calls: it is down (unreachable)."),
        ("engine_out", "b", "Each rank of b takes no calls: it is down (unreachable)."),
    ]


def test_a_rank_that_is_out_alone_has_a_problem_of_its_own() -> None:
    problems = Problems()
    for second in range(4):
        found = problems.look(at_ranks(second, "b@1", "b@2"))
    assert [one.about for one in found] == ["b@1", "b@2"]


def test_ranks_that_go_out_together_often_flap_together() -> None:
    problems, found = Problems(), set[tuple[str, str]]()
    for second in range(120):
        out = [f"b@{rank}" for rank in range(4)] if second % 20 < 5 else []
        found |= {(one.code, one.about) for one in problems.look(at_ranks(second, *out))}
    assert found == {("engine_out", "b"), ("engine_flaps", "b")}
