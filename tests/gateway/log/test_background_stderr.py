import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress

import pytest
import structlog
from prometheus_client import CollectorRegistry

from plait.gateway.log import events
from plait.gateway.log.events import (
    BackgroundStderr,
    LineBuffer,
    LineWriter,
    LogCollector,
    configure_logging,
    wait_until_written,
)
from tests.gateway.exposed import samples

MAX_LINES = 16


class Pipe:
    """A pipe in the place of a process's stderr. The test is its reader."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.reading, self.writing = os.pipe()
        self.writer = LineWriter(self.writing, LineBuffer(max_lines=MAX_LINES))
        self.stream = BackgroundStderr(self.writer, self.writing, encoding)
        self.writer.start()

    def close(self) -> None:
        """The reader goes, which also ends a write that waits for it."""
        os.close(self.reading)
        self.writer._waits_until_s = None  # a test may have waited for as long as a process does
        assert self.writer.wait_until_written()
        os.close(self.writing)

    def fill(self) -> None:
        """The reader has not read for long."""
        os.set_blocking(self.writing, False)
        with suppress(BlockingIOError):
            while os.write(self.writing, b"x" * 4096):
                pass
        os.set_blocking(self.writing, True)

    def read(self) -> str:
        """What comes until nothing is left to come."""
        assert self.writer.wait_until_written()
        return os.read(self.reading, 1 << 16).decode()

    def read_until(self, last: str) -> str:
        """What comes up to this text."""
        read = b""
        while last.encode() not in read:
            read += os.read(self.reading, 1 << 16)
        return read.decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(events, "LAST_S", 60.0)  # a busy machine fails no test
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)


def dropped() -> dict[str, float]:
    """What the metric shows but for zeros."""
    registry = CollectorRegistry()
    registry.register(LogCollector())
    found = samples(registry).items()
    return {name.removeprefix("plait_log_lines_dropped_total"): lines for name, lines in found if lines}


@pytest.mark.parametrize("form", ["json", "console"])
def test_lines_of_all_loggers_come_in_their_order(pipe: Pipe, form: str) -> None:
    with redirect_stderr(pipe.stream):
        configure_logging("info", form)
        structlog.get_logger().info("first", engine="engine-1")
        logging.getLogger("library").warning("second")
        sys.stderr.write("thi")
        sys.stderr.write("rd\n")
        structlog.get_logger().error("fourth")
        lines = pipe.read().splitlines()
        assert dropped() == {}
    assert [word in line for word, line in zip(["first", "second", "third", "fourth"], lines, strict=True)] == [
        True
    ] * 4


def test_a_stream_of_another_encoding_gets_what_it_has() -> None:
    pipe = Pipe("ascii")
    with redirect_stderr(pipe.stream):
        configure_logging("info", "console")
        structlog.get_logger().info("\u00fc \ud800")
    assert "\\xfc \\ud800" in pipe.read()
    pipe.close()


def test_the_stream_is_what_it_stands_for(pipe: Pipe) -> None:
    assert pipe.stream.fileno() == pipe.writing
    assert not pipe.stream.isatty()
    assert pipe.stream.writable()


def test_nothing_waits_for_a_reader_who_does_not_read(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe.fill()
    with redirect_stderr(pipe.stream):
        configure_logging("info", "json")
        for _ in range(MAX_LINES):
            structlog.get_logger().info("quiet")
        for _ in range(MAX_LINES):
            logging.getLogger("library").info("quiet")
        for number in range(4):
            structlog.get_logger().warning("loud", number=number)
        logging.getLogger("library").error("loud")
        sys.stderr.write("loud as well\n")
        assert set(dropped()) == {'{reason="full",severity="info"}'}
        with monkeypatch.context() as patch:
            patch.setattr(events, "LAST_S", 0.0)
            assert not wait_until_written()
            assert not wait_until_written(), "nor later"
    read = pipe.read_until("loud as well")
    assert [f'"number":{number}' in read for number in range(4)] == [True] * 4
    assert read.count('"level":"error"') == 1


@pytest.mark.parametrize("severity", ["info", "warning"])
def test_a_reader_who_has_gone_costs_lines_and_nothing_else(pipe: Pipe, severity: str) -> None:
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, pipe.reading)
    os.close(nowhere)
    with redirect_stderr(pipe.stream):
        configure_logging("info", "json")
        getattr(structlog.get_logger(), severity)("lost")
        assert wait_until_written()
        assert dropped() == {f'{{reason="EPIPE",severity="{severity}"}}': 1}


def full_disk(*states: str) -> Callable[[int, bytes], int]:
    """`os.write` of a disk that is full at times."""
    really, left = os.write, iter(states)

    def write(fd: int, data: bytes) -> int:
        match next(left):
            case "half":
                return really(fd, data[: len(data) // 2])
            case "full":
                raise OSError(28, "No space left on device")
            case _:
                return really(fd, data)

    return write


def test_what_a_full_disk_cut_off_does_not_spoil_the_next_line(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", full_disk("half", "full", "full", "ok"))
    with redirect_stderr(pipe.stream):
        for line in ("once\n", "two\n", "three\n"):
            sys.stderr.write(line)
            assert wait_until_written()
        assert dropped() == {'{reason="ENOSPC",severity="warning"}': 2}
    assert pipe.read() == "on\nthree\n"


def test_a_descriptor_that_does_not_block_is_tried_again(pipe: Pipe) -> None:
    pipe.fill()
    os.set_blocking(pipe.writing, False)
    pipe.stream.write("late\n")
    assert pipe.read_until("late").startswith("xxx")


def test_a_command_that_writes_to_stderr_itself_drops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    structlog.get_logger().info("at once")
    assert "at once" in capsys.readouterr().err
    assert wait_until_written()
    assert dropped() == {}


def test_a_process_without_a_stderr_may_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    configure_logging("info", "auto")
    structlog.get_logger().info("to nobody")
    logging.getLogger("library").info("to nobody")
