"""`plait top`: shows each second what `plait status` shows, and the caches, prefixes and calls of `/admin/live`."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any, Final

from rich.live import Live

from plait.gateway.commands import add_address
from plait.gateway.commands.asked_gateway import AskedGateway, NoAnswerError
from plait.gateway.commands.screen import Screen, console

EACH_S: Final = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser, "url")


def run(arguments: argparse.Namespace) -> None:
    """Draw the screen until stopped. Raises ValueError without a terminal, and if the gateway refuses."""
    gateway = AskedGateway(arguments.url, arguments.key)
    if not has_screen():
        raise ValueError("top needs a terminal: `plait status` prints the same once")
    follow(gateway, threading.Event(), Screen(gateway.url))


def has_screen() -> bool:
    """Whether stdout is a terminal that can show a screen."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def follow(gateway: AskedGateway, stop: threading.Event, screen: Screen) -> None:
    """Draw a gateway's state until `stop` is set, and then restore the terminal.

    Raises ValueError if the gateway refuses.
    """
    news, is_over = SimpleQueue[tuple[str, dict[str, Any]]](), threading.Event()

    def read() -> None:
        for event in gateway.events(is_over):
            news.put(event)

    threading.Thread(target=read, daemon=True).start()  # reading blocks; this thread draws and gets signals
    with Live(screen, console=console(), screen=True, auto_refresh=False, transient=True) as live:
        try:
            live.refresh()
            while not stop.is_set():
                while not news.empty():
                    screen.take(*news.get())
                try:
                    screen.take("status", gateway.ask("/admin/status"))
                except NoAnswerError:
                    screen.take("lost", {})
                live.refresh()
                stop.wait(EACH_S)
        finally:
            is_over.set()
