import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from plait.gateway.log.events import change_level, configure_logging

Read = Callable[[], list[dict[str, Any]]]
TOUCHED = ["", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "httpx", "httpcore", "library"]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in TOUCHED]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Read:
    """Reads what has been logged so far as JSON lines, and checks that nothing went to stdout."""

    def read() -> list[dict[str, Any]]:
        captured = capsys.readouterr()
        assert captured.out == ""
        return [json.loads(line) for line in captured.err.splitlines()]

    return read


def test_an_event_is_an_object_with_level_and_utc_time(events: Read) -> None:
    configure_logging("info", "json")
    structlog.get_logger().info("engine_up", engine="engine-1", wait_s=0.5, port=8101, tags=("a", "b"))
    [event] = events()
    time = datetime.fromisoformat(event.pop("timestamp"))
    assert time.utcoffset() == UTC.utcoffset(None)
    assert event == {
        "event": "engine_up",
        "level": "info",
        "engine": "engine-1",
        "wait_s": 0.5,
        "port": 8101,
        "tags": ["a", "b"],
    }


def test_events_below_the_level_are_dropped(events: Read) -> None:
    configure_logging("warning", "json")
    log = structlog.get_logger()
    log.info("quiet")
    log.warning("loud")
    logging.getLogger("library").info("quiet")
    logging.getLogger("library").error("loud")
    assert [(event["level"], event["event"]) for event in events()] == [("warning", "loud"), ("error", "loud")]


def test_bound_context_and_context_variables_are_included(events: Read) -> None:
    configure_logging("debug", "json")
    structlog.contextvars.bind_contextvars(request_id="r-1")
    structlog.get_logger().bind(engine="e").debug("placed", reason="exploit")
    logging.getLogger("library").info("inside the request")
    first, second = events()
    assert (first["request_id"], first["engine"], first["reason"]) == ("r-1", "e", "exploit")
    assert second["request_id"] == "r-1"


def test_the_standard_librarys_events_have_the_same_form(events: Read) -> None:
    own = logging.StreamHandler()
    logging.getLogger("uvicorn").addHandler(own)
    logging.getLogger("uvicorn.access").propagate = False
    configure_logging("info", "json")
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 7, extra={"color_message": "colours"})
    logging.getLogger("uvicorn.access").info("GET /")
    started, access = events()
    started.pop("timestamp")
    assert started == {"event": "Started server process [7]", "level": "info", "logger": "uvicorn.error"}
    assert (access["event"], access["logger"]) == ("GET /", "uvicorn.access")


def test_requests_to_engines_are_not_logged_by_the_http_client(events: Read) -> None:
    configure_logging("info", "json")
    logging.getLogger("httpx").info("HTTP Request: POST http://engine/v1/chat/completions")
    assert events() == []


def test_an_exception_is_logged_with_its_traceback_on_one_line(events: Read) -> None:
    configure_logging("info", "json")
    empty: dict[str, str] = {}
    try:
        empty["absent"]
    except KeyError:
        structlog.get_logger().exception("failed")
        logging.getLogger("library").exception("failed too")
    for event in events():
        assert event["level"] == "error"
        assert event["exception"].startswith("Traceback (most recent call last)")
        assert event["exception"].endswith("KeyError: 'absent'")


def test_values_that_json_does_not_have_do_not_fail_the_caller(events: Read) -> None:
    configure_logging("info", "json")
    circle: list[object] = []
    circle.append(circle)
    structlog.get_logger().info("odd", surrogate="\ud800", thing=object, error=ValueError("x"))
    structlog.get_logger().info("circle", circle=circle)
    odd, circular = events()
    assert (odd["surrogate"], odd["thing"], odd["error"]) == ("\ud800", "<class 'object'>", "ValueError('x')")
    assert circular["circle"] == "[[...]]"


def test_console_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "console")
    structlog.get_logger().info("engine_up", engine="engine-1", session=None)
    logging.getLogger("library").warning("careful")
    first, second = capsys.readouterr().err.splitlines()
    assert "[info" in first
    assert "engine_up" in first
    assert "engine=engine-1" in first
    assert "None" not in first
    assert "[warning" in second
    assert "careful" in second


@pytest.mark.parametrize("terminal", [True, False])
def test_auto_is_for_people_only_on_a_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    configure_logging("info", "auto")
    structlog.get_logger().info("hello")
    assert capsys.readouterr().err.startswith("{") is not terminal


def test_configuring_again_replaces_the_former_set_up(events: Read) -> None:
    configure_logging("error", "console")
    configure_logging("info", "json")
    logging.getLogger("library").info("once")
    structlog.get_logger().info("once")
    assert [event["event"] for event in events()] == ["once", "once"]


def test_the_level_changes_for_loggers_in_use(events: Read) -> None:
    configure_logging("warning", "json")
    log = structlog.get_logger()
    log.info("quiet")
    change_level("info")
    log.info("loud")
    logging.getLogger("library").info("loud too")
    change_level("error")
    log.warning("quiet")
    logging.getLogger("library").warning("quiet")
    assert [event["event"] for event in events()] == ["loud", "loud too"]
