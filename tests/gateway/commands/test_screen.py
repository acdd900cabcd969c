"""The screen that `plait status` and `plait top` draw, by the events that it took."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from plait.gateway.commands.screen import (
    COLOURS,
    MOST_CALLS,
    MOST_ENGINES,
    MOST_ROWS,
    Screen,
    ago,
    cached_share,
    percent,
    seconds,
)


def status(**more: Any) -> dict[str, Any]:
    return {
        "problems": [], "engines": [row("one"), row("two")],
        "models": [{"name": "m", "waiting_calls": 7, "held_sessions": 2}], "tenants": [tenant(1)], **more,
    }  # fmt: skip


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": "up", "cause": "", "since": 1.0, "calls": 3, **more}


def tenant(number: int) -> dict[str, Any]:
    return {
        "name": f"tenant-{number}", "waiting_calls": number, "answered_calls": 1, "failed_calls": 0,
        "prompt_tokens": 1_234_567, "output_tokens": 98, "weight": 4.0,
    }  # fmt: skip


def problem(number: int) -> dict[str, Any]:
    return {"code": "engine_out", "about": f"e{number}", "since": 1.0, "sentence": f"e{number} [is out].", "part": "p"}


def engine(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "health": "up", "draining": False, "stalled": False, "knowledge": "exact", "queued_calls": 0,
        "waiting_calls": 0, "running_calls": 3, "outstanding_tokens": 1234, "kv_tokens": 100_000,
        "kv_used_tokens": 50_000, "cached_tokens": 40_000, **more,
    }  # fmt: skip


def fleet(at: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "at": at, "calls_per_s": 12.3, "output_tokens_per_s": 99.0, "hit_rate": 0.875, "ttft_s": 0.056,
        "engine_count": 2, "engines": [engine("one"), engine("two", kv_tokens=None, kv_used_tokens=None)],
        "models": [{"model": "m", "waiting_calls": 7, "expected_s": 1.0, "live_sessions": 0, "held_sessions": 2}],
        "prefixes": [{"id": "abc123", "tokens": 25_000, "uses": 40.0, "engines": {"one": 1.0, "two": 0.5}}],
        **more,
    }  # fmt: skip


def call(number: int, **more: Any) -> dict[str, Any]:
    return {
        "number": number, "at": 1.0, "model": "m", "tenant": "", "prompt_tokens": 4_000, "state": "ended",
        "engine": "one", "reason": "exploit", "cached_tokens": 3_000, "ttft_s": 0.05, "e2e_s": 1.5, "status": 200,
        "outcome": "ok", "prefix": "abc123", **more,
    }  # fmt: skip


def drawn(screen: Screen, height: int | None = None, width: int = 150) -> str:
    """The screen of a terminal that is so high; None: printed once."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, markup=False)
    console._is_alt_screen = height is not None
    console.print(screen)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def watched() -> Screen:
    screen = Screen("TITLE", "HINT")
    screen.take("status", status())
    screen.take("fleet", fleet())
    return screen


def test_the_screen_has_all_parts() -> None:
    shown = Screen("TITLE", "HINT")
    assert "waiting for the gateway" in drawn(shown, 40)
    shown.take("status", status())
    assert "Calls" not in drawn(shown, 40)
    shown.take("fleet", fleet())
    assert "HINT" in drawn(shown, 40)
    shown.take("calls", {"calls": [call(1), call(2, outcome="failed", status=502)], "left_out": 0})
    text = drawn(shown, 40)
    parts = ("TITLE", "12.3 calls/s", "87.5%", "56 ms", "7 calls wait", "abc123", "25,000", "50.0%", "tenant-1")
    assert all(part in text for part in (*parts, "exploit", "75.0%", "ok 200", "failed 502", "nothing is wrong"))
    assert "HINT" not in text
    assert "no connection" not in text
    shown.take("lost", {})
    assert "no connection" in drawn(shown, 40)


def test_a_call_that_waited_says_what_for() -> None:
    shown = watched()
    shown.take("calls", {"calls": [call(1), call(2, waited_s=19.4, waited_for="gateway")], "left_out": 0})
    assert "19.40 s gateway" in drawn(shown)


def test_calls_of_agents_have_their_names() -> None:
    shown = watched()
    shown.take("calls", {"calls": [call(1)], "left_out": 0})
    assert "agent" not in drawn(shown)
    told = {"agent": "0b4e1a4e-6f5b-4e0e-9d0a-111111111111/researcher", "parent_agent": "lead"}
    shown.take("calls", {"calls": [call(2, **told)], "left_out": 0})
    heads, *rows = drawn(shown, width=200).split("outcome")[1].splitlines()
    assert heads.split() == ["agent", "parent"]
    assert [row.split()[-2:] for row in rows] == [["-111111111111/researcher", "lead"], ["-", "-"]]


def test_problems_come_first_and_brackets_stay() -> None:
    shown = watched()
    shown.take("status", status(problems=[problem(number) for number in range(9)]))
    text = drawn(shown, 40)
    assert text.index("e0 [is out].") < text.index("Engines")
    assert f"Problems, {MOST_ROWS} of 9" in text
    assert "e8 [is out]." not in text
    assert "e8 [is out]." in drawn(shown)


def test_engines_that_are_out_come_first() -> None:
    shown = watched()
    out = row("last", state="ejected", cause="hang")
    shown.take("status", status(engines=[*(row(f"e{number}") for number in range(63)), out]))
    text = drawn(shown, 40)
    assert f"Engines, {MOST_ENGINES} of 64" in text
    assert text.index("ejected hang") < text.index("e0")
    assert "e62" in drawn(shown)


@pytest.mark.parametrize(("ranks", "shown"), [(4, 4), (64, 0)])
def test_ranks_come_below_a_row_of_their_sums(ranks: int, shown: int) -> None:
    """Many ranks are left out where the screen has little room. Their address is in the state of the worst."""
    watching, names = Screen("TITLE"), [f"big@{rank}" for rank in range(ranks)]
    out = row(names[0], state="down", cause="lost")
    watching.take("status", status(engines=[row("one"), *map(row, names[1:]), out]))
    assert sum(line.startswith("   big@") for line in drawn(watching).splitlines()) == ranks, "plait status has all"
    watching.take("fleet", fleet(engines=[engine("one"), *map(engine, names)]))
    lines = drawn(watching, 60).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith(" engine ")) + 1
    assert lines[first].split()[:4] == ["big,", f"{ranks}", "ranks", "down"]
    assert f" {3 * ranks} " in lines[first], "its calls"
    assert f" {ranks * 40_000:,}" in lines[first], "its cached tokens"
    assert all(line.startswith("   big@") for line in lines[first + 1 : first + 1 + shown])
    assert lines[first + 1 + shown].split()[0] == "one"


def test_tenants_that_wait_come_first_with_their_tokens_and_weights() -> None:
    shown = watched()
    shown.take("status", status(tenants=[tenant(0) | {"answered_calls": 9}, *map(tenant, range(9))]))
    lines = drawn(shown, 60).splitlines()
    first = next(place for place, line in enumerate(lines) if f"Tenants, since the start, {MOST_ROWS} of 10" in line)
    assert lines[first + 2].split() == ["tenant-8", "8", "1", "0", "1,234,567", "98", "4"]
    shown.take("status", status(tenants=[tenant(0), tenant(0) | {"name": "busy", "failed_calls": 1}]))
    assert "tenant-0" not in drawn(shown, 60).partition("busy")[0]


def test_a_narrow_terminal_cuts_tables_at_their_right_and_wraps_sentences() -> None:
    shown = watched()
    shown.take("status", status(problems=[problem(1) | {"sentence": "e1 takes no calls: it is ejected (hang)."}]))
    lines = drawn(shown, 40, width=70).splitlines()
    assert max(map(len, lines)) <= 70
    assert next(line for line in lines if line.startswith(" one ")).split()[:2] == ["one", "up"]
    text = " ".join(" ".join(lines).split())
    assert all(word in text for word in ("e1 takes no calls:", "ejected", "(hang)."))


def test_a_gateway_that_shows_no_calls_says_why() -> None:
    shown = watched()
    for name, data in (("refused", {"error": {"message": "8 clients watch already."}}), ("lost", {})):
        shown.take(name, data)
    shown.take("status", status())
    text = drawn(shown, 40)
    assert "Calls are not shown: 8 clients watch already." in text
    assert ("12.3 calls/s" in text, " up " in text) == (False, True)
    shown.take("fleet", fleet())
    assert "Calls are not shown" not in drawn(shown, 40)


def test_the_use_of_a_cache_whose_size_nobody_told_is_not_known() -> None:
    told, unknown = (line for line in drawn(watched()).splitlines() if " up " in line)
    assert ("%" in told, "not known" in unknown) == (True, True)


@pytest.mark.parametrize("height", [20, 24, 40, 80])
def test_the_screen_fits_and_remembers_so_much(height: int) -> None:
    shown = watched()
    shown.take("status", status(tenants=[tenant(number) for number in range(40)]))
    for number in range(3 * MOST_CALLS):
        shown.take("calls", {"calls": [call(number, state="running"), call(number)], "left_out": 0})
    assert len(shown._ended) == MOST_CALLS
    assert not shown._running
    assert len(drawn(shown, height).splitlines()) <= height


def test_a_prefix_keeps_its_colour() -> None:
    shown = watched()
    for ids in (["a", "b", "c"], ["c", "b"], ["d", "c", "b"]):
        shown.take("fleet", fleet(prefixes=[{"id": i, "tokens": 1, "uses": 2.0, "engines": {}} for i in ids]))
        assert shown._style("c") == COLOURS[2]
    assert shown._style("d") == COLOURS[0]
    assert shown._style("a") == shown._style(None) == "dim"


def test_a_stream_that_begins_anew_begins_its_calls_anew() -> None:
    shown = watched()
    shown.take("calls", {"calls": [call(1)], "left_out": 0})
    shown.take("lost", {})
    assert not shown._ended


def test_figures_are_written_for_people() -> None:
    assert [seconds(value) for value in (None, 0.0421, 1.5)] == ["-", "42 ms", "1.50 s"]
    assert (ago(0.0), ago(1.0)[-2:]) == ("-", " h")
    assert [percent(value) for value in (None, 0.5)] == ["-", "50.0%"]
    assert cached_share({"prompt_tokens": 0, "cached_tokens": 5}) == 1.0
    assert cached_share({"prompt_tokens": 10}) is None
