"""The log's events: each is a line on stderr, from the loggers of Plait and of its libraries. And what it lost."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from structlog.typing import EventDict, Processor, WrappedLogger

from plait.gateway.log.background_stderr import FULL, BackgroundStderr, dropped_lines

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FORMATS = ("auto", "console", "json")
# Loggers with their own handlers. Their events go through Plait's handlers instead.
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
# At info these write a line for each request to an engine.
_CHATTY = ("httpx", "httpcore")
_HANDLER_NAME = "plait"
_threshold = {"level": logging.INFO}
_of_all_lines: dict[str, str] = {}
"""Fields of each line: the worker, where there are several."""

_encoder = msgspec.json.Encoder(enc_hook=repr)
_OfAnyLevel: Any = structlog.make_filtering_bound_logger(logging.DEBUG)  # the level can change later


def configure_logging(level: str, format: str, *, worker: str | None = None) -> None:  # noqa: A002 - a key's name
    """Send events of at least `level` (debug, info, warning, error) to stderr, including those of standard `logging`.

    `format`: `json` is one object a line, `console` is for people, `auto` is console when stderr is a terminal. Each
    line names the `worker`, if there is one. Raises `ValueError` for other levels and formats. Start uvicorn with
    `log_config=None`, or it installs its own handlers again.
    It may be called again; loggers that are already in use keep their format.
    """
    if level not in _LEVELS or format not in _FORMATS:
        raise ValueError(
            f"log level {level!r} and format {format!r}: expected one of {', '.join(_LEVELS)} "
            f"and one of {', '.join(_FORMATS)}"
        )
    console = format == "console" or (format == "auto" and _is_terminal())
    _threshold["level"] = _LEVELS[level]
    _of_all_lines.clear()
    _of_all_lines.update({} if worker is None else {"worker": worker})
    shared: list[Processor] = [
        _name_worker,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True) if console else _stamp,
    ]
    exceptions = [_drop_nothing_said] if console else [structlog.processors.format_exc_info]
    to_text = _console_renderer() if console else _render_json_text
    structlog.configure(
        processors=[_drop_below_threshold, *shared, *exceptions, to_text] if console else [_json_line],
        wrapper_class=_Logger,
        logger_factory=_Lines,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *exceptions, to_text],
    )
    _route_standard_logging(formatter, _LEVELS[level])


def change_level(level: str) -> None:
    """Send events of at least `level` from now on, from loggers that are in use too."""
    _threshold["level"] = _LEVELS[level]
    _set_standard_levels(_LEVELS[level])


class _Logger(_OfAnyLevel):  # type: ignore[misc]
    """A logger that does not even begin an info below the level: there is one for each call.

    Nor does it pass the fields on as arguments, which takes as long as to encode them.
    """

    def info(self, event: str, *args: object, **fields: object) -> None:
        if _threshold["level"] > logging.INFO:
            return
        try:
            written, more = self._process_event("info", event % args if args else event, fields)
        except structlog.DropEvent:
            return
        self._logger.info(*written, **more)


def _drop_below_threshold(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if _LEVELS.get(method, logging.CRITICAL) < _threshold["level"]:
        raise structlog.DropEvent
    return event


def _name_worker(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event.update(_of_all_lines)
    return event


def _drop_nothing_said(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Without the fields that are None, a line can be read."""
    return {key: value for key, value in event.items() if value is not None}


def _stamp(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event["timestamp"] = datetime.now(UTC)  # msgspec writes it as ISO 8601, in a third of the time
    return event


class _Stderr:
    """Writes lines of one urgency to the current `sys.stderr`: a cached logger outlives a redirection of the stream."""

    def __init__(self, *, urgent: bool) -> None:
        self._urgent = urgent

    def write(self, text: str) -> None:
        """Write whole lines."""
        stream = sys.stderr
        if isinstance(stream, BackgroundStderr):
            stream.writer.put(text.encode(stream.encoding, "backslashreplace"), urgent=self._urgent)
        elif stream is not None:
            stream.write(text)

    def flush(self) -> None:
        """Of a stream."""
        if sys.stderr is not None:
            sys.stderr.flush()

    def write_line(self, line: str | bytes) -> None:
        """Write a line without its end. Bytes are UTF-8."""
        stream = sys.stderr
        if isinstance(line, bytes) and isinstance(stream, BackgroundStderr):
            stream.writer.put(line + b"\n", urgent=self._urgent)
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


def _console_renderer() -> Processor:
    plain = structlog.dev.plain_traceback  # looks the same whether or not rich is installed
    return structlog.dev.ConsoleRenderer(colors=_is_terminal(), exception_formatter=plain)


def _json_line(logger: WrappedLogger, method: str, event: EventDict) -> bytes:
    """The whole way of an event to its line. As a processor for each step it would take half as long again."""
    if _LEVELS.get(method, logging.CRITICAL) < _threshold["level"]:
        raise structlog.DropEvent
    event = structlog.contextvars.merge_contextvars(logger, method, event)
    event = structlog.processors.add_log_level(logger, method, event)
    event.update(_of_all_lines)
    event["timestamp"] = datetime.now(UTC)
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    return _render_json(logger, method, event)


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    try:
        return _encoder.encode(event)
    except (TypeError, ValueError, RecursionError):  # invalid Unicode, for example: a log line must not fail its caller
        return json.dumps({key: _plain(value) for key, value in event.items()}).encode()


def _render_json_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return _render_json(logger, method, event).decode()


def _plain(value: object) -> str | int | float | None:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value if isinstance(value, str | int | float | None) else repr(value)


def _route_standard_logging(formatter: logging.Formatter, level: int) -> None:
    root = logging.getLogger()
    for former in [known for known in root.handlers if known.get_name() == _HANDLER_NAME]:
        root.removeHandler(former)
    for stream, takes in ((_COMMON, _is_common), (_URGENT, _is_urgent)):
        handler = logging.StreamHandler(stream)
        handler.set_name(_HANDLER_NAME)
        handler.setFormatter(formatter)
        handler.addFilter(takes)
        root.addHandler(handler)
    _set_standard_levels(level)
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _is_common(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


def _is_urgent(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def _set_standard_levels(level: int) -> None:
    logging.getLogger().setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class LogCollector(Collector):
    """The number of lines that the log has dropped, by reason: its queue was full, or a write failed."""

    def collect(self) -> Iterator[Metric]:
        """One counter."""
        family = CounterMetricFamily(
            "plait_log_lines_dropped", "Lines of the log that were dropped", labels=["severity", "reason"]
        )
        found = {(False, FULL): 0, (True, FULL): 0, **dropped_lines()}
        for (urgent, reason), lines in found.items():
            family.add_metric(["warning" if urgent else "info", reason], lines)
        yield family
