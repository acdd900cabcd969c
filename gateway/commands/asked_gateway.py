"""A client of a gateway's admin API, for the commands."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import httpx
import msgspec

Json = dict[str, Any]

AGAIN_S: Final = 1.0
"""The pause between the end of an event stream and the next try to open it."""

SILENCE_S: Final = 15.0
"""A stream without an event for this long counts as ended. The gateway sends events twice a second."""

WAIT_S: Final = 10.0
"""The timeout of other requests."""


class NoAnswerError(ValueError):
    """No answer, an answer with a 5xx, or an answer that is not of a gateway."""


class AskedGateway:
    """The gateway at `url`. `key` is the bearer token. Raises ValueError without a key, and if `url` is not HTTP."""

    def __init__(self, url: str, key: str | None) -> None:
        if not key:
            raise ValueError("give the gateway's admin key: --key, or PLAIT_ADMIN_KEY")
        if not re.fullmatch("[!-~]+", key):
            raise ValueError("--key or PLAIT_ADMIN_KEY = (hidden): expected printable ASCII without spaces")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url} is no address of a gateway: it begins with http:// or https://")
        self.url = url.rstrip("/")
        trusted = ssl.create_default_context()
        headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(headers=headers, timeout=WAIT_S, trust_env=False, verify=trusted)

    def ask(self, path: str, method: str = "GET", body: object = None) -> Json:
        """The JSON of the answer, made printable. Raises `NoAnswerError`, and ValueError if the gateway refuses."""
        try:
            answer = self._client.request(method, self.url + path, json=body)
            found = msgspec.json.decode(answer.content, type=Json)
            if answer.is_success:
                shown: Json = printable(found)
                return shown
            message = found["error"]["message"]
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, LookupError, TypeError) as error:
            raise NoAnswerError(f"{self.url} does not answer as a gateway does: {error}") from error
        kind = NoAnswerError if answer.is_server_error else ValueError
        raise kind(f"{self.url}: {message}")

    def events(self, is_over: threading.Event) -> Iterator[tuple[str, Json]]:
        """The events of `/admin/live` as (name, data). Reconnects until `is_over` is set.

        Two more events tell of the connection: `refused`, with the body of an error, and `lost`, at the end of each
        stream.
        """
        while not is_over.is_set():
            with (
                suppress(httpx.HTTPError, msgspec.DecodeError),
                self._client.stream("GET", f"{self.url}/admin/live", timeout=SILENCE_S) as answer,
            ):
                if answer.is_success:
                    yield from _parsed(answer.iter_lines())
                else:
                    yield "refused", msgspec.json.decode(answer.read(), type=Json)
            yield "lost", {}
            is_over.wait(AGAIN_S)


def _parsed(lines: Iterator[str]) -> Iterator[tuple[str, Json]]:
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, printable(msgspec.json.decode(value))


def printable(value: Any) -> Any:
    """JSON without unprintable characters: a terminal would obey an escape sequence in a name."""
    if isinstance(value, str):
        return value if value.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in value)
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    return [printable(one) for one in value] if isinstance(value, list) else value
