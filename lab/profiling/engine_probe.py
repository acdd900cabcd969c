"""Asks a live engine for its identity and limits, and times the tokens of calls.

The engine needs only OpenAI's routes; `GET /cache_state` is used if there is one. Every failure is a `ValueError` that
says what the engine did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from plait.backends.errors import PlaitError
from plait.backends.http.client import HttpClient
from plait.backends.protocol.cache_state import IterationState, KvState, QueueState
from plait.backends.protocol.dialects import RANK_HEADER
from plait.lab.profiling.profile_plan import Limits
from plait.lab.profiling.tier_loads import Loaded
from plait.lab.profiling.timed_stream import TimedStream, read_stream

FALLBACK_CONTEXT_TOKENS = 4096
"""The assumed context length if the engine reports neither its context nor its KV cache."""

WINDING_DOWN_S = 1.0
"""How long an engine may still count calls of the profiler that have ended or were cancelled."""


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _LowerTier(msgspec.Struct):
    tier: str
    loaded_tokens: int = 0
    loading_s: float = 0.0


class _CacheState(msgspec.Struct):
    """The parts of a `CacheState` that a profile needs, so that reports of other versions can be read."""

    engine: str
    block_tokens: int
    kv: KvState
    kind: str = ""
    queue: QueueState = QueueState()
    iteration: IterationState = IterationState()
    tiers: list[_LowerTier] = []


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any] | str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The engine's name, the profiled model, and their limits."""

    engine: str
    model: str
    limits: Limits


DecodedT = TypeVar("DecodedT")


class EngineProbe:
    """Probes the engine at `url`. Leaving the context closes the connections. The default model is the first served."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._client = HttpClient(self._url)
        bearer = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = [(name.encode(), value.encode()) for name, value in bearer.items()]
        self._headers += [(b"content-type", b"application/json"), (RANK_HEADER, b"0")]  # the rank that reports
        self._http = httpx.AsyncClient(base_url=self._url, headers=bearer, timeout=10.0, trust_env=False)
        self._model = model or ""
        self._reports = True
        self.clock: Callable[[], float] = time.perf_counter

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
        await self._client.aclose()

    async def identify(self) -> EngineIdentity:
        """Ask for the engine's identity, and set the model that `complete` sends."""
        models = await self._get("/v1/models")
        if models is None:
            raise ValueError(f"engine {self._url} has no /v1/models: --engine takes the URL without /v1")
        served = _decode(models, _ModelList, f"engine {self._url}/v1/models").data
        named = [model for model in served if model.id == (self._model or model.id)]
        if not named:
            raise ValueError(f"engine {self._url} does not serve {self._model or 'any model'}; {_names(served)}")
        model = named[0]
        self._model = model.id
        state = await self._cache_state()
        if state is None:
            limits = Limits(model.max_model_len or FALLBACK_CONTEXT_TOKENS)
            return EngineIdentity(f"{model.owned_by or 'unnamed engine'} at {self._url}", model.id, limits)
        kv_tokens = state.kv.tokens(state.kv.total_blocks, state.block_tokens, model.max_model_len or 0)
        limits = Limits(model.max_model_len or kv_tokens, state.iteration.budget_tokens or None, kv_tokens)
        return EngineIdentity(f"{state.kind or model.owned_by or 'engine'} {state.engine}", model.id, limits)

    async def check_idle(self) -> None:
        """Raises ValueError if the engine has calls of others. No effect if the engine reports no counts."""
        for _ in range(20):
            state = await self._cache_state()
            if state is None or not (calls := state.queue.running + state.queue.waiting):
                return
            await asyncio.sleep(WINDING_DOWN_S / 20)
        raise ValueError(
            f"engine {self._url} is busy with {calls} calls that are not ours; stop its load and try again"
        )

    async def loaded(self) -> dict[str, Loaded]:
        """The loads from each lower tier since the engine's start; empty if the engine reports none."""
        state = await self._cache_state()
        return {tier.tier: Loaded(tier.loaded_tokens, tier.loading_s) for tier in state.tiers} if state else {}

    async def complete(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        """Send prompts of token ids at the same time. Each generates `output_tokens`, and the tokens are timed."""
        bodies = [msgspec.json.encode(self._body(prompt, output_tokens)) for prompt in prompts]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._stream(body)) for body in bodies]
        except* (ValueError, PlaitError) as errors:
            raise ValueError(f"engine {self._url}: {errors.exceptions[0]}") from errors
        return [task.result() for task in tasks]

    def _body(self, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    async def _stream(self, body: bytes) -> TimedStream:
        sent_s = self.clock()
        response = await self._client.request("POST", "/v1/completions", self._headers, body)
        if response.status != 200:
            does = "refuses prompts of token ids" if response.status in {400, 404, 422, 501} else "fails"
            message = _message(await response.read())
            raise ValueError(f"it {does} on /v1/completions with status {response.status}: {message}")
        return await read_stream(response, sent_s, self.clock)

    async def _cache_state(self) -> _CacheState | None:
        """The engine's report; None if there is no such route."""
        if not self._reports:
            return None
        body = await self._get("/cache_state")
        self._reports = body is not None
        return None if body is None else _decode(body, _CacheState, f"engine {self._url}/cache_state")

    async def _get(self, path: str) -> bytes | None:
        """The body; None if there is no such route."""
        try:
            response = await self._http.get(path)
        except httpx.HTTPError as error:
            raise ValueError(f"engine {self._url} does not answer: {str(error) or type(error).__name__}") from error
        if response.status_code in {404, 405}:
            return None
        if response.status_code != 200:
            raise ValueError(f"engine {self._url}{path} answers {response.status_code}: {_message(response.content)}")
        return response.content


def _message(body: bytes) -> str:
    """The message of an error body in any of the usual shapes."""
    try:
        decoded = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode(errors="replace") or "no reason given"
    inner = decoded.error.get("message") if isinstance(decoded.error, dict) else decoded.error
    return str(inner or decoded.message or body[:200].decode(errors="replace"))


def _names(models: Sequence[_Model]) -> str:
    return f"it serves {', '.join(model.id for model in models)}" if models else "it serves none"


def _decode(body: bytes, kind: type[DecodedT], place: str) -> DecodedT:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{place} is not understood: {error}") from error
