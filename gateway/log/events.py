"""The log: events as lines on stderr, from the loggers of Plait and of its libraries. And what it lost.

A thread writes stderr in the background of a server. Whoever reads it may stop to read, or may have gone: no call waits
for that, and no end of the process waits for long.
"""

from __future__ import annotations

import atexit
import errno
import io
import json
import logging
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from queue import SimpleQueue
from select import PIPE_BUF
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec
import structlog
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from structlog.typing import EventDict, WrappedLogger

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_LINES = 20_000

MAX_BYTES = 8 * 2**20
"""Twice what a busy gateway logs in half a minute: some 10,000 lines of calls."""

COMMON_SHARE = 0.5
"""Of the queue may be filled by common lines. The rest is for urgent ones."""

FULL = "full"
"""Why a line was dropped that found no room."""

PAUSE_S = 0.02
"""Between two rounds of writing, once they follow each other so closely. A first line is written at once; under load,
lines go out together: a thread that wakes up for each line takes more CPU time than the line.
"""

LAST_S = 1.0
"""What the end of the process waits for the last lines to be written."""

Line = tuple[bool, bytes]
"""Whether it is urgent, and its text, which may have several lines, such as a traceback."""


class LineBuffer:
    """A queue of lines, for several threads. What finds no room is dropped, and counted by urgency and reason."""

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self.dropped: Counter[tuple[bool, str]] = Counter()
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._lines: deque[Line] = deque()
        self._size_bytes = 0
        self._wakes: SimpleQueue[None] = SimpleQueue()  # may be put to in a finalizer
        self._is_awaited = False
        # A finalizer that logs may run wherever memory is allocated, also in here.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._lines)

    def put(self, line: bytes, *, urgent: bool) -> None:
        share = 1.0 if urgent else COMMON_SHARE
        with self._lock:
            size_bytes = self._size_bytes + len(line)
            if len(self._lines) >= share * self._max_lines or size_bytes > share * self._max_bytes:
                self.dropped[urgent, FULL] += 1
                return
            self._size_bytes = size_bytes
            self._lines.append((urgent, line))
        if self._is_awaited:
            self._is_awaited = False
            self._wakes.put(None)

    def wait(self) -> None:
        """Wait until a line is there, or was. One thread may wait."""
        self._is_awaited = True
        if not self:
            self._wakes.get()
        self._is_awaited = False

    def take(self, most_bytes: int) -> list[Line]:
        """The oldest lines, together at most `most_bytes` long, but at least one. Nothing if none is there."""
        taken: list[Line] = []
        with self._lock:
            while self._lines and (not taken or most_bytes >= len(self._lines[0][1])):
                taken.append(self._lines.popleft())
                most_bytes -= len(taken[-1][1])
                self._size_bytes -= len(taken[-1][1])
        return taken


class LineWriter:
    """Writes `lines` to a file descriptor, from a thread of its own. What cannot be written is dropped and counted."""

    def __init__(self, fd: int, lines: LineBuffer) -> None:
        self.lines = lines
        self._fd = fd
        self._is_writing = False
        self._is_torn = False
        self._waits_until_s: float | None = None
        self._thread = Thread(target=self._run, name="log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_written(self) -> bool:
        """Wait until no line is left, which is True, but for `LAST_S` at most. If called again, not for longer."""
        now_s = time.monotonic()
        until_s = self._waits_until_s = self._waits_until_s or now_s + LAST_S
        while (self.lines or self._is_writing) and self._thread.is_alive():
            if now_s >= until_s:
                return False
            time.sleep(0.002)
            now_s = time.monotonic()
        self._waits_until_s = None
        return not self.lines

    def _run(self) -> None:
        last_s = 0.0
        while True:
            self.lines.wait()
            written = self._write_all()
            now_s = time.monotonic()
            if written > 1 or now_s - last_s < PAUSE_S:
                time.sleep(PAUSE_S)
            last_s = now_s

    def _write_all(self) -> int:
        """Write until no line is left; returns how many there were."""
        written = 0
        self._is_writing = True
        while taken := self.lines.take(PIPE_BUF):  # others who write to the same pipe do not come in between
            written += len(taken)
            try:
                self._write(b"".join(line for _, line in taken))
            except OSError as error:
                reason = errno.errorcode.get(error.errno or 0, "unknown")
                self.lines.dropped.update((urgent, reason) for urgent, _ in taken)
        self._is_writing = False
        return written

    def _write(self, data: bytes) -> None:
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # whoever shares the descriptor may have made it so
                time.sleep(PAUSE_S)
            else:
                self._is_torn = bool(rest)


class _Unbuffered(io.RawIOBase):
    """What is below `BackgroundStderr`: the descriptor's properties, and a way to the writer's queue."""

    def __init__(self, writer: LineWriter, fd: int) -> None:
        self._writer = writer
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        """What is not of the log, such as a traceback of the interpreter, counts as urgent."""
        written = bytes(data)
        self._writer.lines.put(written, urgent=True)
        return len(written)


class BackgroundStderr(io.TextIOWrapper):
    """Stands for `sys.stderr`. Nothing that is written to it waits."""

    def __init__(self, writer: LineWriter, fd: int, encoding: str) -> None:
        raw = cast("BinaryIO", _Unbuffered(writer, fd))
        super().__init__(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)
        self.writer = writer


def write_stderr_in_background() -> None:
    """From now on a thread writes what goes to `sys.stderr`. The end of the process waits for it, but not for long."""
    if sys.stderr is None:  # the process was started without one
        fd, encoding = os.open(os.devnull, os.O_WRONLY), "utf-8"
    else:
        fd, encoding = sys.stderr.fileno(), sys.stderr.encoding
    writer = LineWriter(fd, LineBuffer())
    writer.start()
    sys.stderr = BackgroundStderr(writer, fd, encoding)
    atexit.register(_close)


def wait_until_written() -> bool:
    """Whether all that went to stderr is written. This waits for it, but for `LAST_S` at most."""
    return not isinstance(sys.stderr, BackgroundStderr) or sys.stderr.writer.wait_until_written()


def dropped_lines() -> Mapping[tuple[bool, str], int]:
    """The lines that were dropped, by whether they were urgent, and by the reason."""
    return sys.stderr.writer.lines.dropped if isinstance(sys.stderr, BackgroundStderr) else Counter()


def _close() -> None:
    """What the interpreter says at its very end goes to stderr itself, if that was read so far."""
    if wait_until_written() and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Loggers with their own handlers. Their events go through Plait's handlers instead.
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
# At info the first two write a line for each request to an engine, and the last one warns of each malformed form.
_CHATTY = {"httpx": logging.WARNING, "httpcore": logging.WARNING, "python_multipart": logging.ERROR}
_HANDLER_NAME = "plait"
_threshold = {"level": logging.INFO}
_of_all_lines: dict[str, str] = {}
"""Fields of each line: the worker, where there are several."""

_encoder = msgspec.json.Encoder(enc_hook=repr)
NOT_ENCODED = (TypeError, ValueError, RecursionError)
"""The encoder raises them, for invalid Unicode for example."""

_OfAnyLevel: Any = structlog.make_filtering_bound_logger(logging.DEBUG)  # the level can change later


def configure_logging(level: str, format: str, *, worker: str | None = None) -> None:  # noqa: A002 - a key's name
    """Send events of at least `level` (debug, info, warning, error) to stderr, including those of standard `logging`.

    `format`: `json` is one object a line, `console` is for people, `auto` is console when stderr is a terminal. Each
    line names the `worker`, if there is one. Start uvicorn with `log_config=None`, or it installs its own handlers
    again. The function may be called again; loggers that are already in use keep their format.
    """
    console = format == "console" or (format == "auto" and _is_terminal())
    _threshold["level"] = _LEVELS[level]
    _of_all_lines.clear()
    _of_all_lines.update({} if worker is None else {"worker": worker})
    to_line: Callable[[WrappedLogger, str, EventDict], str | bytes] = _console_line() if console else _json_line
    structlog.configure(
        processors=[_drop_below_threshold, to_line],
        wrapper_class=_Logger,
        logger_factory=_Lines,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, to_line, _as_text],
    )
    _route_standard_logging(formatter, _LEVELS[level])


def change_level(level: str) -> None:
    """Send events of at least `level` from now on, from loggers that are in use too."""
    _threshold["level"] = _LEVELS[level]
    _set_standard_levels(_LEVELS[level])


class _Logger(_OfAnyLevel):  # type: ignore[misc]
    """A logger that makes an info's line itself, as there is one for each call: the way through structlog takes as long
    as to encode the fields.
    """

    def info(self, event: str, *args: object, **fields: object) -> None:
        if _threshold["level"] > logging.INFO:
            return
        said: Any = {**self._context, **fields, "event": event % args if args else event}
        try:
            self._logger.info(self._processors[-1](self._logger, "info", said))
        except structlog.DropEvent:  # of a test that captures events
            return


def _drop_below_threshold(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if _LEVELS.get(method, logging.CRITICAL) < _threshold["level"]:
        raise structlog.DropEvent
    return event


def _console_line() -> Callable[[WrappedLogger, str, EventDict], str]:
    plain = structlog.dev.plain_traceback  # looks the same whether or not rich is installed
    renderer = structlog.dev.ConsoleRenderer(colors=_is_terminal(), exception_formatter=plain)

    def line(logger: WrappedLogger, method: str, event: EventDict) -> str:
        """Without the fields that are None, a line can be read."""
        event = _with_context(logger, method, event)
        event["timestamp"] = _plain(event["timestamp"])
        return renderer(logger, method, {key: value for key, value in event.items() if value is not None})

    return line


def _json_line(logger: WrappedLogger, method: str, event: EventDict) -> bytes:
    event = _with_context(logger, method, event)
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    try:
        return _encoder.encode(event)
    except NOT_ENCODED:  # what cannot be encoded is written as its `repr`: a line must not fail its caller
        return json.dumps({key: _plain(value) for key, value in event.items()}).encode()


def _with_context(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """The event with what each line has. As a processor for each step it would take half as long again."""
    event = structlog.contextvars.merge_contextvars(logger, method, event)
    event = structlog.processors.add_log_level(logger, method, event)
    event.update(_of_all_lines)
    event["timestamp"] = datetime.now(UTC)
    return event


def _as_text(_logger: WrappedLogger, _method: str, line: Any) -> str:
    return line.decode() if isinstance(line, bytes) else str(line)


def _plain(value: object) -> str | int | float | None:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value if isinstance(value, str | int | float | None) else repr(value)


class _Stderr:
    """Writes lines of one urgency to the current `sys.stderr`: a cached logger outlives a redirection of the stream."""

    def __init__(self, *, urgent: bool) -> None:
        self._urgent = urgent

    def write(self, text: str) -> None:
        stream = sys.stderr
        if isinstance(stream, BackgroundStderr):
            stream.writer.lines.put(text.encode(stream.encoding, "backslashreplace"), urgent=self._urgent)
        elif stream is not None:
            stream.write(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            sys.stderr.flush()

    def write_line(self, line: str | bytes) -> None:
        """Write a line without its end. Bytes are UTF-8."""
        stream = sys.stderr
        if isinstance(line, bytes) and isinstance(stream, BackgroundStderr):
            stream.writer.lines.put(line + b"\n", urgent=self._urgent)
        else:
            self.write(f"{line.decode() if isinstance(line, bytes) else line}\n")
            self.flush()


_COMMON, _URGENT = _Stderr(urgent=False), _Stderr(urgent=True)


class _Lines:
    """What structlog's loggers write to: it has a method for each level."""

    def __init__(self, *_names: object) -> None:
        self.debug = self.info = self.msg = _COMMON.write_line
        self.warning = self.warn = self.error = self.err = self.exception = _URGENT.write_line
        self.critical = self.fatal = self.failure = _URGENT.write_line


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _route_standard_logging(formatter: logging.Formatter, level: int) -> None:
    root = logging.getLogger()
    for former in [known for known in root.handlers if known.get_name() == _HANDLER_NAME]:
        root.removeHandler(former)
    handler = _Handler(_COMMON)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(formatter)
    root.addHandler(handler)
    _set_standard_levels(level)
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class _Handler(logging.StreamHandler[_Stderr]):
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = _COMMON if record.levelno < logging.WARNING else _URGENT
        super().emit(record)


def _set_standard_levels(level: int) -> None:
    logging.getLogger().setLevel(level)
    for name, least in _CHATTY.items():
        logging.getLogger(name).setLevel(max(level, least))


class LogCollector(Collector):
    """The number of lines that the log has dropped, by reason: its queue was full, or a write failed."""

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "plait_log_lines_dropped", "Lines of the log that were dropped", labels=["severity", "reason"]
        )
        found = {(False, FULL): 0, (True, FULL): 0, **dropped_lines()}
        for (urgent, reason), lines in found.items():
            family.add_metric(["warning" if urgent else "info", reason], lines)
        yield family
