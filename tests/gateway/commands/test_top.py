"""`plait top` in a terminal that is none, and until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from plait.gateway.cli import main
from plait.gateway.commands.asked_gateway import AskedGateway
from plait.gateway.commands.screen import Screen
from plait.gateway.commands.top import follow
from tests.gateway.commands.conftest import Answers
from tests.gateway.commands.test_status import status


class Watching(Screen):
    """Notes what it takes, and stops once it took so much."""

    def __init__(self, stop: threading.Event, events: int) -> None:
        super().__init__("TITLE")
        self.taken: list[str] = []
        self._stop = stop
        self._events = events

    def take(self, name: str, data: dict[str, object]) -> None:
        """Take an event."""
        super().take(name, data)
        self.taken.append(name)
        if len(self.taken) == self._events:
            self._stop.set()


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> AskedGateway:
    def events(_gateway: AskedGateway, is_over: threading.Event) -> Iterator[tuple[str, dict[str, object]]]:
        is_over.wait()
        yield "lost", {}

    monkeypatch.setattr(AskedGateway, "events", events)
    return AskedGateway("http://gateway", "k")


def test_it_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--key=k"]) == 2
    assert capsys.readouterr().err == "plait: top needs a terminal: `plait status` prints the same once\n"


def test_it_is_the_command_that_was_live(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", "http://gateway", "--key=k"]) == 2
    assert capsys.readouterr().err == "plait: `plait live` is `plait top` now\n"


def test_it_looks_until_it_is_stopped(answers: Answers, gateway: AskedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.gateway.commands.top.EACH_S", 0.01)
    answers.put("GET /admin/status", status())
    stop = threading.Event()
    screen = Watching(stop, events=3)
    follow(gateway, stop, screen)
    assert screen.taken == ["status"] * 3


def test_a_gateway_that_does_not_answer_is_asked_again(answers: Answers, gateway: AskedGateway) -> None:
    stop = threading.Event()
    screen = Watching(stop, events=1)
    follow(gateway, stop, screen)
    assert screen.taken == ["lost"]
    assert answers.asked


def test_a_gateway_that_refuses_is_an_error(answers: Answers, gateway: AskedGateway) -> None:
    answers.put("GET /admin/status", {"error": {"message": "Incorrect or missing API key."}}, 401)
    with pytest.raises(ValueError, match="Incorrect or missing API key"):
        follow(gateway, threading.Event(), Screen("TITLE"))
