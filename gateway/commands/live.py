"""`plait live`: watch a gateway in the terminal. Where there is no terminal, lines of text."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from plait.gateway.commands.live_screen import cached_share, events, percent, seconds

MOST_LINES: Final = 4
"""Calls in one event that get a line each. More get one line together."""

TakeEvent = Callable[[str, dict[str, Any]], None]
"""Takes an event (`fleet`, `calls`, or `lost` when the stream has ended) and its data."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="the gateway (default: %(default)s)")
    parser.add_argument("--key", default=os.environ.get("PLAIT_ADMIN_KEY"), help="default: PLAIT_ADMIN_KEY")
    parser.add_argument("--plain", action="store_true", help="lines of text in a terminal too")


def run(arguments: argparse.Namespace) -> None:
    """Watch until stopped. Raises ValueError if the gateway refuses."""
    if not arguments.key:
        raise ValueError("give the gateway's admin key: --key, or PLAIT_ADMIN_KEY")
    follow(arguments.url, arguments.key, threading.Event(), plain=arguments.plain or not has_screen())


def has_screen() -> bool:
    """Whether stdout is a terminal that can show a screen."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def follow(url: str, key: str, stop: threading.Event, *, plain: bool, title: str = "", hint: str = "") -> None:
    """Show what a gateway does until `stop` is set. Raises ValueError if it refuses.

    On a screen `title` stands at the top, and `hint` in the place of calls until there are some.
    """
    if plain:
        _until(stop, url, key, PlainLines().take)
        return
    from plait.gateway.commands.live_screen import LiveScreen  # noqa: PLC0415 - rich, which only this needs

    with LiveScreen(title or url, hint or " none so far") as screen:
        _until(stop, url, key, screen.take)


def _until(stop: threading.Event, url: str, key: str, take: TakeEvent) -> None:
    """Hand over events in a thread, so that signals reach this one. Nothing is handed over once it returns."""
    refusals, lock, is_over = list[ValueError](), threading.Lock(), threading.Event()

    def read() -> None:
        try:
            for name, data in events(url, key, is_over):
                with lock:
                    if is_over.is_set():
                        return
                    take(name, data)
        except ValueError as error:
            refusals.append(error)
            stop.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        stop.wait()
    finally:
        is_over.set()
        with lock:
            pass
    if refusals:
        raise refusals[0]


class PlainLines:
    """A line for each call that has ended; a line a second for all of them while there are many."""

    def __init__(self) -> None:
        self._fleet: dict[str, Any] = {}
        self._summed_at = 0.0

    def take(self, name: str, data: dict[str, Any]) -> None:
        """Print what an event says."""
        if name == "fleet":
            self._fleet = data
        elif name == "calls":
            self._print(data)

    def _print(self, data: dict[str, Any]) -> None:
        ended = [call for call in data["calls"] if call.get("state") == "ended"]
        if len(ended) + data["left_out"] <= MOST_LINES:
            for call in ended:
                print(_line(call), flush=True)
        elif self._fleet["at"] - self._summed_at >= 0.9:
            self._summed_at = self._fleet["at"]
            print(_sum(self._fleet), flush=True)


def _line(call: dict[str, Any]) -> str:
    where = f"{call.get('engine', '-')} ({call.get('reason', '-')})"
    return (
        f"{where:<24} {call['prompt_tokens']:>6} prompt tokens, {percent(cached_share(call)):>6} cached, "
        f"TTFT {seconds(call.get('ttft_s'))}, E2E {seconds(call.get('e2e_s'))}, {call['outcome']} {call['status']}"
    )


def _sum(fleet: dict[str, Any]) -> str:
    loads = " ".join(str(engine["running_calls"] + engine["waiting_calls"]) for engine in fleet["engines"])
    waiting = sum(model["waiting_calls"] for model in fleet["models"])
    return (
        f"{fleet['calls_per_s']:.1f} calls/s, hit rate {percent(fleet['hit_rate'])}, "
        f"median TTFT {seconds(fleet['ttft_s'])}, calls on engines {loads}, {waiting} wait"
    )
