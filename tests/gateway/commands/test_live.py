"""What `plait live` shows of events."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from rich.console import Console

from plait.gateway.commands.live import MOST_LINES, PlainLines
from plait.gateway.commands.live_screen import (
    COLOURS,
    MOST_CALLS,
    LiveScreen,
    _parsed,
    cached_share,
    events,
    percent,
    seconds,
)


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


def drawn(screen: LiveScreen, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=150, height=height, force_terminal=False)
    screen._console = console
    console.print(screen)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def screen() -> LiveScreen:
    return LiveScreen("TITLE", "HINT", Console(file=io.StringIO(), width=150, height=40))


def test_the_screen_has_all_parts() -> None:
    shown = screen()
    assert "waiting for the gateway" in drawn(shown)
    shown.take("fleet", fleet())
    assert "HINT" in drawn(shown)
    shown.take("calls", {"calls": [call(1), call(2, outcome="failed", status=502)], "left_out": 0})
    text = drawn(shown)
    parts = ("TITLE", "12.3 calls/s", "87.5%", "56 ms", "7 calls wait", "2 sessions held", "abc123", "25,000", "50.0%")
    assert all(part in text for part in (*parts, "exploit", "75.0%", "ok 200", "failed 502"))
    assert "HINT" not in text
    assert "no connection" not in text
    shown.take("lost", {})
    assert "no connection" in drawn(shown)


def test_the_use_of_a_cache_whose_size_nobody_told_is_not_known() -> None:
    shown = screen()
    shown.take("fleet", fleet())
    told, unknown = (line for line in drawn(shown).splitlines() if " up " in line)
    assert ("%" in told, "%" in unknown) == (True, False)


@pytest.mark.parametrize("height", [20, 40, 80])
def test_the_screen_fits_and_remembers_so_much(height: int) -> None:
    shown = screen()
    shown.take("fleet", fleet())
    for number in range(3 * MOST_CALLS):
        shown.take("calls", {"calls": [call(number, state="running"), call(number)], "left_out": 0})
    assert len(shown._ended) == MOST_CALLS
    assert not shown._running
    assert len(drawn(shown, height).splitlines()) <= height


def test_a_prefix_keeps_its_colour() -> None:
    shown = screen()
    for ids in (["a", "b", "c"], ["c", "b"], ["d", "c", "b"]):
        shown.take("fleet", fleet(prefixes=[{"id": i, "tokens": 1, "uses": 2.0, "engines": {}} for i in ids]))
        assert shown._style("c") == COLOURS[2]
    assert shown._style("d") == COLOURS[0]
    assert shown._style("a") == shown._style(None) == "dim"


def test_a_stream_that_begins_anew_begins_its_calls_anew() -> None:
    shown = screen()
    shown.take("fleet", fleet())
    shown.take("calls", {"calls": [call(1)], "left_out": 0})
    shown.take("lost", {})
    assert not shown._ended


def test_few_calls_have_a_line_each_and_many_one_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines()
    lines.take("fleet", fleet(100.0))
    lines.take("calls", {"calls": [call(1), call(2, state="running")], "left_out": 0})
    (line,) = capsys.readouterr().out.splitlines()
    words = " ".join(line.split())
    assert words == "one (exploit) 4000 prompt tokens, 75.0% cached, TTFT 50 ms, E2E 1.50 s, ok 200"
    many = {"calls": [call(number) for number in range(MOST_LINES + 1)], "left_out": 3}
    for at in (100.5, 101.0, 101.5, 102.0):
        lines.take("fleet", fleet(at))
        lines.take("calls", many)
    assert (
        capsys.readouterr().out.splitlines()
        == ["12.3 calls/s, hit rate 87.5%, median TTFT 56 ms, calls on engines 3 3, 7 wait"] * 2
    )


def test_events_are_read_line_by_line() -> None:
    lines = iter(["event: fleet", 'data: {"at": 1}', "", ": a comment", "event: calls", "data: {}", ""])
    assert list(_parsed(lines)) == [("fleet", {"at": 1}), ("calls", {})]


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://127.0.0.1:1"])
def test_an_address_that_is_none_is_said(url: str) -> None:
    with pytest.raises(ValueError, match="no address of a gateway"):
        next(events(url, "key", threading.Event()))


def test_a_gateway_that_is_not_there_is_tried_again() -> None:
    is_over = threading.Event()
    found = events("http://127.0.0.1:9", "key", is_over)
    assert next(found) == ("lost", {})
    is_over.set()
    assert list(found) == []


def test_figures_are_written_for_people() -> None:
    assert [seconds(value) for value in (None, 0.0421, 1.5)] == ["-", "42 ms", "1.50 s"]
    assert [percent(value) for value in (None, 0.5)] == ["-", "50.0%"]
    assert cached_share({"prompt_tokens": 0, "cached_tokens": 5}) == 1.0
    assert cached_share({"prompt_tokens": 10}) is None
