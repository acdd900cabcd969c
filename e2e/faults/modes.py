"""Every way in which an engine misbehaves here, as data.

`MODES` has the modes by name. `HEALTHY` is the name of none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from e2e.faults import reports
from e2e.faults.actions import Action, Altered, AtAccept, Ending, Models, Raw, Report, response
from e2e.faults.completions import event

HEALTHY: Final = "healthy"
INTERNAL_URL: Final = "http://10.9.8.7:8000/internal"
"""Stands in the pages that no client may see."""
REFUSAL: Final = b"You are wrong."
"""The message of an engine that refuses a request as the caller's fault."""


class Kinds(StrEnum):
    """Some of the calls: whole answers, streams, both or none."""

    WHOLE = "whole"
    STREAMED = "streamed"
    BOTH = "both"
    NONE = "none"

    def has(self, *, streamed: bool) -> bool:
        """Whether such a call is one of them."""
        return self is Kinds.BOTH or self is (Kinds.STREAMED if streamed else Kinds.WHOLE)


@dataclass(frozen=True)
class Mode:
    """One way.

    `what` happens. It happens to calls of the kind `of`; the others get good answers. Calls of the kind `succeeds` can
    still succeed, here or elsewhere. `health` is what the gateway is to make of the engine; `status` the one that a
    client gets who is at fault. `hangs` says that time must pass until it shows. The engine `asks_key`: the gateway has
    one for it. `heavy` modes move so much that few calls are enough.
    """

    name: str
    what: str
    action: Action
    of: Kinds = Kinds.BOTH
    succeeds: Kinds = Kinds.BOTH
    health: Literal["ejected", "none"] = "ejected"
    scope: Literal["calls", "probes", "all"] = "calls"
    status: int | None = None
    hangs: bool = False
    asks_key: bool = False
    heavy: bool = False

    @property
    def is_quick(self) -> bool:
        """Whether it shows at once, and on a call by itself, not on the connection."""
        return isinstance(self.action, Raw | Altered) and not self.hangs and not self.heavy


_MEBIBYTE: Final = 2**20
_OPENAI: Final = b'{"error": {"message": "It is not well.", "type": "server_error", "param": null, "code": null}}'
_VLLM: Final = b'{"object": "error", "message": "It is not well.", "type": "InternalServerError", "code": 500}'
_FASTAPI: Final = b'{"detail": "It is not well."}'
_HTML: Final = b"<html><body><h1>Bad</h1>upstream %b said no</body></html>" % INTERNAL_URL.encode()
_LONG: Final = b'{"error": {"message": "%b"}}' % (b"long " * (_MEBIBYTE // 5))
_EVENTS_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_JSON_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n"
_RETRY: Final = (b"retry-after", b"1")


def _statuses() -> Iterator[Mode]:
    bodies = {"json": _OPENAI, "vllm": _VLLM, "fastapi": _FASTAPI, "html": _HTML, "empty": b"", "long": _LONG}
    chosen: dict[int, tuple[str, ...]] = {500: tuple(bodies), 503: ("json", "html", "empty"), 502: ("html", "long")}
    chosen |= {429: ("json", "html"), 504: ("html",), 529: ("json",), 408: ("json",)}
    chosen |= {401: ("json", "html"), 403: ("json", "empty")}
    for status, names in chosen.items():
        for name in names:
            media = b"text/html" if name == "html" else b"application/json"
            action = Raw(response(status, bodies[name], media=media))
            what = f"answers {status}, its body {name}"
            yield Mode(f"status_{status}_{name}", what, action, asks_key=status in {401, 403})
    for status in (429, 503):
        what, action = f"answers {status} and asks for a second's peace", Raw(response(status, _OPENAI, _RETRY))
        yield Mode(f"status_{status}_retry_after", what, action)
    there = (b"location", INTERNAL_URL.encode())
    yield Mode("redirect", "answers 302 with an internal address", Raw(response(302, _HTML, there, media=b"text/html")))


def _callers_faults() -> Iterator[Mode]:
    openai, vllm, fastapi = (
        body.replace(b"It is not well.", REFUSAL).replace(b"500", b"400") for body in (_OPENAI, _VLLM, _FASTAPI)
    )
    shapes = {400: {"openai": openai, "vllm": vllm}, 404: {"openai": openai}, 413: {"vllm": vllm}}
    shapes |= {422: {"fastapi": fastapi}, 501: {"openai": openai}}
    for status, bodies in shapes.items():
        for name, body in bodies.items():
            what, action = f"refuses the request with {status} in the shape of {name}", Raw(response(status, body))
            yield Mode(f"refuses_{status}_{name}", what, action, succeeds=Kinds.NONE, health="none", status=status)


def _connections() -> Iterator[Mode]:
    half_head = b"HTTP/1.1 200 OK\r\ncontent-ty"
    reset, close = Ending.RESET, Ending.CLOSE
    yield Mode("accept_close", "closes every connection at once", AtAccept(close), scope="all")
    yield Mode("accept_reset", "resets every connection at once", AtAccept(reset), scope="all")
    yield Mode("request_close", "reads the request and closes", Raw(ending=close))
    yield Mode("request_reset", "reads the request and resets", Raw(ending=reset))
    yield Mode("head_reset", "resets in the middle of the head", Raw(half_head, reset))
    yield Mode("head_close", "closes in the middle of the head", Raw(half_head, close))
    yield Mode("after_head_close", "closes behind the head", Raw(_JSON_HEAD, close), of=Kinds.WHOLE)
    yield Mode("body_close", "closes in the middle of the body", Altered(sends=5, ending=close), of=Kinds.WHOLE)
    yield Mode("body_reset", "resets in the middle of the body", Altered(sends=5, ending=reset), of=Kinds.WHOLE)
    yield Mode("length_too_long", "names too long a body", Altered(length_off=64, ending=close), of=Kinds.WHOLE)
    yield Mode("length_too_short", "names too short a body", Altered(length_off=-24), of=Kinds.WHOLE)
    yield Mode("length_not_a_number", "names a length that is no number", Raw(_JSON_HEAD.replace(b"400", b"4OO")))
    yield Mode("chunks_garbled", "sends a chunk without a length", Raw(_EVENTS_HEAD + b"zz\r\nnot a chunk\r\n", close))
    yield Mode("not_http", "does not speak HTTP", Raw(b"220 smtp.example ESMTP ready\r\n", close))
    yield Mode("tls_alert", "answers with a TLS alert", Raw(b"\x15\x03\x01\x00\x02\x02\x46", close))
    many = b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1000) for n in range(100))
    yield Mode("head_long", "sends a head of 100 kB", Raw(many + _JSON_HEAD.partition(b"\r\n")[2], close))


def _hangs() -> Iterator[Mode]:
    hang = Ending.HANG
    head = _JSON_HEAD
    yield Mode("hang_backlog", "accepts no connection", AtAccept(full_backlog=True), scope="all", hangs=True)
    yield Mode("hang_accept", "accepts connections and reads nothing", AtAccept(hang), scope="all", hangs=True)
    yield Mode("hang_request", "reads the request and is silent", Raw(ending=hang), hangs=True)
    yield Mode("hang_head_whole", "is silent behind the head", Raw(head, hang), of=Kinds.WHOLE, hangs=True)
    yield Mode("hang_head_stream", "is silent behind the head", Raw(_EVENTS_HEAD, hang), of=Kinds.STREAMED, hangs=True)
    cut = Altered(sends=2, ending=hang)
    yield Mode("hang_stream", "is silent amid a stream", cut, of=Kinds.STREAMED, succeeds=Kinds.NONE, hangs=True)
    yield Mode("hang_body", "is silent amid a body", cut, of=Kinds.WHOLE, hangs=True)
    yield Mode("drip_head", "sends the head byte by byte, one a second", Raw(head, hang, byte_s=1), hangs=True)


def _wrong_answers() -> Iterator[Mode]:
    whole = Kinds.WHOLE
    page = response(200, _HTML, media=b"text/html")
    yield Mode("html", "answers 200 with a page", Raw(page))
    yield Mode("html_as_json", "answers 200 with a page that it calls JSON", Raw(response(200, _HTML)))
    yield Mode("json_cut", "answers 200 with half of its JSON", Raw(response(200, b'{"choices": [{"text": "so')))
    yield Mode("json_deep", "nests its JSON 100,000 deep", Raw(response(200, b"[" * 100_000 + b"]" * 100_000)))
    yield Mode("empty_object", "answers 200 with {}", Raw(response(200, b"{}")))
    yield Mode("empty_body", "answers 200 with nothing", Raw(response(200, b"")))
    yield Mode("no_choices", "answers without choices", Altered(choices=[]), of=whole)
    unfinished: dict[str, Any] = {"of": whole, "succeeds": Kinds.STREAMED, "health": "none"}  # what came passes
    yield Mode("finish_null", "answers without a finish reason", Altered(finish_reason=None), **unfinished)
    yield Mode("finish_abort", "gives the call up: finish reason abort", Altered(finish_reason="abort"), of=whole)
    failed = b'{"error": {"message": "CUDA is gone.", "code": 500}}'
    yield Mode("error_as_200", "answers 200 with an error of its own", Raw(response(200, failed)))


def _wrong_streams() -> Iterator[Mode]:
    def stream(name: str, what: str, action: Action, **fields: Any) -> Mode:
        return Mode(f"stream_{name}", what, action, of=Kinds.STREAMED, **{"succeeds": Kinds.NONE, **fields})

    own, callers = ({"error": {"message": "Something broke.", "code": code}} for code in (500, 400))
    cut = b'data: {"choices": [{"te\n\n'
    whole = {"succeeds": Kinds.STREAMED, "health": "none"}
    yield stream("no_done", "ends a stream without [DONE]", Altered(done=False), **whole)
    yield stream("no_finish", "ends a stream without a finish reason", Altered(ends=False))
    yield stream("finish_null", "has null for the finish reason", Altered(finish_reason=None))
    yield stream("finish_abort", "gives the call up: finish reason abort", Altered(finish_reason="abort"))
    yield stream("empty", "ends a stream behind the head", Altered(sends=0), succeeds=Kinds.STREAMED)
    yield stream("head_close", "closes behind the head", Raw(_EVENTS_HEAD, Ending.CLOSE), succeeds=Kinds.STREAMED)
    yield stream("close", "closes amid a stream", Altered(sends=2, ending=Ending.CLOSE))
    yield stream("reset", "resets amid a stream", Altered(sends=2, ending=Ending.RESET))
    yield stream("error_first", "begins with its error", Altered(first=event(own), sends=0), succeeds=Kinds.STREAMED)
    yield stream("error_amid", "breaks off with its error", Altered(middle=event(own), sends=2))
    yield stream(
        "callers_error", "ends with the caller's error", Altered(middle=event(callers), sends=2), health="none"
    )
    endless = Altered(middle=b'data: {"choices": [{"text": "', filler_times=20, sends=2, ending=Ending.CLOSE)
    yield stream("endless_event", "sends an event of 20 MB without an end", endless, heavy=True)
    invalid = b'data: {"choices": [{"index": 0, "text": "\xff\xfe\xc0", "delta": {"content": "\xff"}}]}\n\n'
    yield stream("not_utf8", "sends an event that is not UTF-8", Altered(middle=invalid), health="none")
    yield stream("nul", "sends an event with NUL bytes", Altered(middle=invalid.replace(b"\xff", b"\0")), health="none")
    yield stream("json_cut", "sends an event with half of its JSON", Altered(middle=cut), health="none")


def _wrong_usage() -> Iterator[Mode]:
    usages: dict[str, Any] = {
        "huge": {"prompt_tokens": 9, "completion_tokens": 1e14, "total_tokens": 1e14},
        "huge_integer": {"prompt_tokens": 10**14, "completion_tokens": 10**14},
        "negative": {"prompt_tokens": -9, "completion_tokens": -8, "total_tokens": -17},
        "texts": {"prompt_tokens": "nine", "completion_tokens": "8"},
        "nulls": {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None},
        "cached": {"prompt_tokens": 9, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 10**9}},
        "details": {"prompt_tokens": 9, "completion_tokens": 8, "prompt_tokens_details": [7]},
        "list": [9, 8, 17],
        "text": "9 and 8",
        "null": None,
    }
    for name, usage in usages.items():
        yield Mode(f"usage_{name}", f"reports as its usage {msgspec.json.encode(usage).decode()}",
                   Altered(usage=usage), health="none")  # fmt: skip


def _wrong_headers() -> Iterator[Mode]:
    ours = tuple((name, b"forged") for name in (b"plait-engine", b"plait-placement", b"x-request-id"))
    sets: dict[str, tuple[tuple[bytes, bytes], ...]] = {
        "ours": ours,
        "cookie": ((b"set-cookie", b"who=engine"), (b"server", b"internal/1.0")),
        "hop": ((b"connection", b"close, x-internal"), (b"x-internal", INTERNAL_URL.encode()), (b"keep-alive", b"9")),
    }
    for name, headers in sets.items():
        yield Mode(f"headers_{name}", f"sends headers that are not its own: {name}", Altered(headers), health="none")


def _wrong_reports() -> Iterator[Mode]:
    builds = (
        reports.duplicate_runs, reports.two_parents, reports.cyclic_runs, reports.own_child, reports.huge_cursor,
        reports.negative_cursor, reports.wrong_granularity, reports.zero_blocks, reports.absurd_kv,
        reports.wrong_types, reports.removes_unknown, reports.random_bytes, reports.many_hashes,
    )  # fmt: skip
    for build in builds:
        what = f"reports its cache like this: {build.__doc__}"
        name = f"report_{build.__name__}"
        yield Mode(name, what, Report(build), health="none", scope="probes", heavy=build is reports.many_hashes)
    ways = {"500": Raw(response(500, _HTML)), "close": Raw(ending=Ending.CLOSE), "hang": Raw(ending=Ending.HANG)}
    for name, raw in ways.items():
        what = f"answers to /cache_state: {name}"
        yield Mode(f"report_{name}", what, Report(raw=raw), health="none", scope="probes", hangs=name == "hang")
    page = Models(Raw(response(200, _HTML, media=b"text/html")))
    yield Mode("models_html", "answers to /v1/models with a page", page, scope="probes")
    yield Mode("models_500", "answers to /v1/models with 500", Models(Raw(response(500, _OPENAI))), scope="probes")


MODES: Final[dict[str, Mode]] = {
    mode.name: mode
    for modes in (
        _statuses, _callers_faults, _connections, _hangs, _wrong_answers, _wrong_streams, _wrong_usage, _wrong_headers,
        _wrong_reports,
    )
    for mode in modes()
}  # fmt: skip
