"""Plait's routes in vLLM's API server, as ASGI middleware for `--middleware`.

`GET /cache_state`, `POST /call_objectives` and `GET /plait/tokenizer`. If the engine has an API key, all need it. With
several data-parallel ranks, all requests come through `NamedRanks`.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from plait.backends.adapter.engine_tokenizer import EngineTokenizer, read_tokenizer
from plait.backends.adapter.named_ranks import NamedRanks, named_rank
from plait.backends.adapter.required_names import UnsupportedEngineError, load
from plait.backends.adapter.routes import (
    ANSWER_DEADLINE_S,
    CACHE_STATE,
    App,
    Change,
    Receive,
    ReportQuery,
    Scope,
    Send,
    answer_cache_state,
    answer_call_objectives,
    answer_tokenizer,
)
from plait.backends.errors import AuthenticationError, EngineError, EngineTimeoutError, UnsupportedError
from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from plait.backends.protocol.tokenizer_files import PATH as TOKENIZER
from plait.backends.protocol.tokenizer_fingerprint import Messages
from plait.backends.vllm.cache_state import wrap
from plait.backends.vllm.compatibility import RANKS
from plait.backends.vllm.launch import SCHEDULER
from plait.backends.vllm.plugin import CHANGE_METHOD, METHOD
from plait.backends.vllm.ranks import call_rank, rank_count, to_named_rank


class CacheStateMiddleware:
    """Answers the three routes and passes every other request on."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._serve: App = self._served
        self._tokenizer = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request. The first is the lifespan's, at the server's start: then the engine is looked at."""
        if not self._tokenizer:
            version, state = str(load("vllm.__version__") or ""), scope["app"].state
            self._tokenizer = read_tokenizer(lambda: served_tokenizer(state), version)
            if rank_count(state) > 1:
                self._serve = NamedRanks(self._served, lambda: rank_count(state))
                wrap(state.engine_client, "add_request", to_named_rank)
        await self._serve(scope, receive, send)

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else None
        if path == CACHE_STATE:
            await answer_cache_state(scope, send, _report, self._tokenizer, rank_count(scope["app"].state))
        elif path == CALL_OBJECTIVES:
            await answer_call_objectives(scope, receive, send, _access)
        elif path == TOKENIZER:
            await answer_tokenizer(scope, send, _tokenizer, self._tokenizer)
        else:
            await self._app(scope, receive, send)


async def _report(scope: Scope, query: ReportQuery) -> bytes:
    """The report of a rank's engine core. If nothing changes during the wait, ask again without waiting."""
    core, asked = _allowed_core(scope), (METHOD, query.since, query.epoch, query.gateway)
    if query.wait_s > 0 and query.since is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(query.wait_s):
                return bytes(await call_rank(core, query.rank, *asked, True))
    return bytes(await _answered(core, query.rank, *asked, False))


def _access(scope: Scope) -> Change:
    """Check a request, and return the function that sends changed objectives to the engine core of its rank."""
    core = _allowed_core(scope)

    async def change(body: bytes) -> int:
        return int(await _answered(core, named_rank() or 0, CHANGE_METHOD, body.decode()))

    return change


async def _answered(core: Any, rank: int, method: str, *arguments: Any) -> Any:
    """The answer of a rank's engine core, which comes between two iterations."""
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await call_rank(core, rank, method, *arguments)
    except TimeoutError as error:
        raise EngineTimeoutError(f"the engine core did not answer within {ANSWER_DEADLINE_S:g} s") from error


def _tokenizer(scope: Scope) -> EngineTokenizer | None:
    """The server's tokenizer. Raises `AuthenticationError`, and the errors of `served_tokenizer`."""
    return served_tokenizer(_allowed(scope))


def _allowed_core(scope: Scope) -> Any:
    """The client of the engine cores. Raises `PlaitError` for a request without the key, and the errors of `_core`."""
    return _core(_allowed(scope).engine_client)


def _allowed(scope: Scope) -> Any:
    """The application's state. Raises `AuthenticationError` for a request without the key."""
    state = scope["app"].state
    _authenticate(dict(scope["headers"]).get(b"authorization", b""), _keys(state))
    return state


def _core(engine_client: Any) -> Any:
    """The API server's client of the engine cores, if Plait's scheduler runs there."""
    scheduler = engine_client.vllm_config.scheduler_config.scheduler_cls
    if scheduler != SCHEDULER:
        raise UnsupportedError(
            f"Plait's scheduler does not run in this engine; start it with --scheduler-cls {SCHEDULER}"
        )
    if engine_client.errored:
        raise EngineError("the engine core has died; restart the engine", code="engine_dead")
    core = engine_client.engine_core
    lacks = RANKS.missing_in(core) if engine_client.vllm_config.parallel_config.data_parallel_size > 1 else []
    if lacks:
        raise UnsupportedError(f"Plait cannot tell this vLLM's data-parallel ranks; it lacks: {', '.join(lacks)}")
    return core


def _keys(state: Any) -> list[str]:
    """The engine's API keys, from where vLLM takes them."""
    keys = getattr(getattr(state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in ([keys] if isinstance(keys, str) else keys) if key]


def _authenticate(authorization: bytes, keys: list[str]) -> None:
    scheme, _, token = authorization.partition(b" ")
    valid = [hmac.compare_digest(token, key.encode()) for key in keys]
    if keys and not (scheme.lower() == b"bearer" and any(valid)):
        raise AuthenticationError("This engine needs its API key: send 'Authorization: Bearer KEY'.")


def served_tokenizer(state: Any) -> EngineTokenizer | None:
    """The tokenizer in the state of vLLM's application; None with `--skip-tokenizer-init`.

    Raises UnsupportedEngineError or AttributeError if this vLLM has it elsewhere.
    """
    config = state.engine_client.vllm_config.model_config
    tokenizer, chats = state.engine_client.renderer.tokenizer, state.online_renderer
    resolve = load("vllm.renderers.hf.resolve_chat_template")
    if resolve is None:
        raise UnsupportedEngineError("this vLLM lacks vllm.renderers.hf.resolve_chat_template")
    if tokenizer is None:
        return None
    given, defaults = chats.chat_template, dict(chats.default_chat_template_kwargs or {})
    own = _own_renderer(state.engine_client.renderer, config)

    def render(messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> object:
        if own is not None:
            return f"vLLM's own {own}"  # which no gateway renders
        template = resolve(tokenizer, chat_template=given, tools=tools, model_config=config)
        if template is None:
            return None
        options = {**defaults, **variables, "tokenize": False, "add_generation_prompt": True}
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, **options)

    text = given if isinstance(given, str) else None
    drops = bool(getattr(getattr(state, "args", None), "exclude_tools_when_tool_choice_none", False))
    return EngineTokenizer(str(config.tokenizer), tokenizer, render, text, defaults, drops_tools=drops)


def _own_renderer(renderer: Any, config: Any) -> str | None:
    """The name of vLLM's own renderer of chats, if this model's chats do not go through a chat template."""
    by_template = load("vllm.renderers.hf.HfRenderer")
    if by_template is not None and not isinstance(renderer, by_template):
        return type(renderer).__name__
    model_type = getattr(getattr(config, "hf_config", None), "model_type", None)
    return "harmony" if model_type == "gpt_oss" else None
