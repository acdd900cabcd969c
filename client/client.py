"""The client of a gateway, which opens sessions."""

from __future__ import annotations

import inspect
import re
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx

from plait.client.connection import Connection, Endings
from plait.client.flow import Retries
from plait.client.native_steps import NativeRunner
from plait.client.objectives import Wanted
from plait.client.results import variables_in, with_values
from plait.client.session import Session
from plait.client.transport import AsyncTransport, BlockingTransport, Endpoint
from plait.client.variable import DEFAULT_TIMEOUT_S

DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"


class Client:
    """A gateway's address and API key, and connections to it. Use one client for a whole program.

    `base_url` is the same as for the OpenAI SDK, with `/v1` at its end. `model` is the default model of semantic
    functions. `timeout_s` bounds each request, not counting the time that a `get` waits for its value. A request is
    retried at most `max_retries` times: if it could not be sent, if its answer was lost, or after a 502, 503, 504, or a
    429 with `retry-after`. `tls` is passed to httpx as `verify`.

    Close it with `close`, or with `aclose` after asynchronous use. A `with` or `async with` block closes it too. Use it
    asynchronously in one event loop only.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 2,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}; expected http://HOST:PORT/v1")
        if api_key is not None and not re.fullmatch("[!-~]+", api_key):
            raise ValueError("api_key is (hidden); expected printable ASCII without spaces")
        # Both transports share one TLS context, since loading the system's certificates is slow.
        endpoint = Endpoint(base_url, api_key, timeout_s, httpx.create_ssl_context() if tls is True else tls)
        blocking, asynchronous = BlockingTransport(endpoint), AsyncTransport(endpoint)
        endings = Endings(blocking, asynchronous)
        natives = NativeRunner(blocking, asynchronous)
        self._connection = Connection(blocking, asynchronous, endings, natives, Retries(max_retries), model)

    def session(self, session_id: str | None = None, *, ttl_s: float | None = None) -> Session:
        """A session, to be entered with `with` or `async with`.

        Other clients that know the session's id can take part. The session ends after `ttl_s` seconds without activity.
        """
        return Session(self._connection, session_id, ttl_s)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        objective: Wanted = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> Any:
        """Call a function in a session of its own, as one request, and return its result with the variables' values.

        `function` is a semantic function or calls some; plain texts as arguments need no `on(session)`. The result has
        variables, alone or in lists, tuples and dictionaries. The session ends in the background.
        """
        with self.brief_session() as session, session.current():
            result = function(*args, **kwargs)
            session.run(*variables_in(result), objective=objective, timeout_s=timeout_s)
            return with_values(result)

    async def arun(
        self,
        function: Callable[..., Any],
        *args: Any,
        objective: Wanted = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> Any:
        """`run` in an event loop. The function may be a coroutine function."""
        async with self.brief_session() as session:
            with session.current():
                result = function(*args, **kwargs)
                if inspect.isawaitable(result):
                    result = await result
            await session.arun(*variables_in(result), objective=objective, timeout_s=timeout_s)
            return with_values(result)

    def brief_session(self) -> Session:
        """A session whose block does not wait for the session's end, which is sent in the background."""
        return Session(self._connection, None, None, is_brief=True)

    def close(self) -> None:
        """Close the connections of a blocking program. Waits for native functions that run."""
        self._connection.endings.close()
        self._connection.natives.close()
        self._connection.blocking.close()

    async def aclose(self) -> None:
        await self._connection.endings.aclose()
        self._connection.natives.close()
        self._connection.blocking.close()
        await self._connection.asynchronous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()
