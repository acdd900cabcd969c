"""Turns a request into a call that can be placed: tokenized, hashed, checked against the model's context."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Final, Self

import msgspec

from plait.backends.errors import ContextLengthError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request
from plait.gateway.answers.completions import UNKNOWN, UsageBounds
from plait.gateway.asgi import Headers
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.outgoing import ForwardedBody, OutgoingBody
from plait.gateway.calls.routes import CallRoute, ForwardedRequest
from plait.gateway.calls.tokenization import CHARACTERS_PER_TOKEN, PromptReader, TokenizedPrompt, Tokenizing
from plait.gateway.calls.turns import TurnThreads
from plait.gateway.config.sections import ServerConfig
from plait.gateway.fleet.router import Router
from plait.policy.types import Call

TOKENIZER_THREADS = 3
"""Two for one tenant, as tokenizers release the interpreter's lock, and one that is left to the others."""

TEMPLATE_THREADS = 2
"""Of their own, because they only wait for the processes that render the templates of requests."""


SESSION_HEADERS: Final = frozenset((
    b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-id", b"x-opencode-session",
    b"x-session-affinity", b"conversation_id",
))  # fmt: skip
"""That name a session: of Claude Code, Codex (new and old), OpenCode, and what others have agreed on."""

_NAME: Final = itemgetter(0)

MAX_NAME_CHARACTERS: Final = 256
"""Longer ones are no names."""


class Incoming(msgspec.Struct, frozen=True):
    """A request as it came in. `tenant` is the owner of its API key. The call's times count from `arrived_s`."""

    path: str
    headers: Headers
    body: bytes
    request_id: str
    arrived_s: float
    tenant: str


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads requests for one fleet. With `isolate_tenants`, tenants do not share cached prefixes.

    Long prompts are tokenized on `threads`, those whose chat template another process renders on `template_threads`.
    """

    router: Router
    prompts: PromptReader
    isolate_tenants: bool = False
    threads: TurnThreads = field(default_factory=lambda: TurnThreads(TOKENIZER_THREADS, "tokenize"))
    template_threads: TurnThreads = field(default_factory=lambda: TurnThreads(TEMPLATE_THREADS, "render"))

    @classmethod
    def of(cls, router: Router, prompts: PromptReader, config: ServerConfig) -> Self:
        """As the gateway's configuration says."""
        threads = TurnThreads(TOKENIZER_THREADS, "tokenize", max_bytes=config.max_waiting_prompt_bytes)
        return cls(router, prompts, config.isolate_tenants, threads)

    def begin(
        self, incoming: Incoming, request: ChatRequest | CompletionRequest, annotations: Annotations
    ) -> Delivery | Coroutine[Any, Any, Delivery]:
        """The call, if its prompt is short or mostly known; else what to await for it, once its prompt had its turns.

        It has the objectives in its annotations, and is ready to be delivered. Raises `CallerError` for a call that no
        engine can take, `NoEngineError` while no engine of the model is up.
        """
        models, asked = self.router.models, request.model
        model = asked if asked in models.direct else models.check(asked)
        if asked != model:
            request = msgspec.structs.replace(request, model=model)
        salt = self._cache_salt(request, incoming.tenant) if self.isolate_tenants else request.cache_salt
        context_tokens = models.contexts.get(model)
        prompt = self.prompts.begin(request, salt, context_tokens, len(incoming.body))
        if isinstance(prompt, TokenizedPrompt):
            return self._delivery(
                incoming, request, annotations, prompt, salt=salt, context_tokens=context_tokens, renames=asked != model
            )
        make = partial(
            self._delivery,
            incoming,
            request,
            annotations,
            salt=salt,
            context_tokens=context_tokens,
            renames=asked != model,
        )
        return _later(make, self._in_turns(incoming, request, salt, context_tokens, prompt))

    async def read(
        self, incoming: Incoming, request: ChatRequest | CompletionRequest, annotations: Annotations
    ) -> Delivery:
        """The call of `begin`."""
        begun = self.begin(incoming, request, annotations)
        return begun if isinstance(begun, Delivery) else await begun

    def _delivery(
        self,
        incoming: Incoming,
        request: ChatRequest | CompletionRequest,
        annotations: Annotations,
        prompt: TokenizedPrompt,
        *,
        salt: str | None,
        context_tokens: int | None,
        renames: bool,
    ) -> Delivery:
        """The call of a prompt. The router is told of one with one answer, if the engine computes these tokens.

        With `renames`, the client has asked for the model by another name.
        """
        limit, prompts = request.output_limit, len(prompt.prompts) or 1
        choices = 1 if request.n is None else request.choices
        bounds = UNKNOWN
        if context_tokens is not None:
            if prompt.exact and prompt.tokens + (limit or 1) > context_tokens:
                _check_context(request, prompt.tokens, limit or 1, context_tokens)
            each = context_tokens if limit is None else min(context_tokens, limit)
            bounds = UsageBounds(context_tokens * prompts, each * prompts * choices)
        is_told = prompt.exact and len(prompt.prompts) == choices == 1 and request.truncate_prompt_tokens is None
        if is_told and self.router.answers.answered.prompts:
            self.router.answers.arrived(prompt.prompts[0], prompt.block_hashes, prompt.root, prompt.turn_ends)
        call = Call(
            incoming.request_id,
            request.model,
            prompt.tokens,
            self.router.block_tokens,
            prompt.block_hashes,
            slo=annotations.slo,
            objective=annotations.objective,
            priority=annotations.priority,
            output_limit=limit,
            streamed=bool(request.stream),
            prompt_hash=prompt.whole_hash if is_told else None,
            session=annotations.session or known_session(incoming.headers, request),
        )
        takes_ids = prompt.exact and not (isinstance(request, CompletionRequest) and request.echo)
        ids = prompt.prompts if takes_ids else None
        return Delivery(
            call,
            incoming.path,
            incoming.headers,
            OutgoingBody(incoming.body, request, ids, salt, renames, self.router.gateway_id),
            incoming.arrived_s,
            annotations.session,
            tenant=incoming.tenant,
            choices=prompts * choices,
            bounds=bounds,
            turn_of=call.session,
        )

    async def forwarded(
        self,
        incoming: Incoming,
        request: ForwardedRequest,
        route: CallRoute,
        session: str | None,
        chat: ChatRequest | None = None,
    ) -> Delivery:
        """A call that an engine gets as it came. `chat` is what the engine makes of it; None if that is not known.

        Without it, the call is placed by load, and its tokens are guessed. Raises as `read` does.
        """
        model = self.router.models.check(request.model)
        if chat is None:
            guessed = len(incoming.body) // CHARACTERS_PER_TOKEN if route.computes else 0
            prompt = TokenizedPrompt(guessed, array("Q"), exact=False, prompts=())
        else:
            salt = self._cache_salt(request, incoming.tenant)
            chat = msgspec.structs.replace(chat, model=model)
            prompt = await self._tokenized(incoming, chat, salt, self.router.models.contexts.get(model))
        call = Call(
            incoming.request_id,
            model,
            prompt.tokens,
            self.router.block_tokens,
            prompt.block_hashes,
            output_limit=1 if chat is None else chat.output_limit,
            streamed=bool(request.stream),
            session=session or known_session(incoming.headers, request),
        )
        renamed = None if model == request.model else model
        salt = self._cache_salt(request, incoming.tenant) if route.computes and self.isolate_tenants else None
        body = ForwardedBody(incoming.body, renamed, request.plait is not None, salt)
        return Delivery(
            call, incoming.path, incoming.headers, body, incoming.arrived_s, session,
            tenant=incoming.tenant, form=route.form, route=route.path,
            turn_of=call.session,
        )  # fmt: skip

    async def count(self, incoming: Incoming, request: ChatRequest) -> int:
        """The tokens of a chat's prompt. Raises as `read` does."""
        model = self.router.models.check(request.model)
        salt = self._cache_salt(request, incoming.tenant)
        chat, context_tokens = msgspec.structs.replace(request, model=model), self.router.models.contexts.get(model)
        return (await self._tokenized(incoming, chat, salt, context_tokens)).tokens

    def check_sizes(self, model: str, sizes: Iterable[int], field: str) -> None:
        """Raises `CallerError` if prompts, not put together yet, have more bytes of text than the model can take."""
        served = self.router.models.check(model)
        context_tokens = self.router.models.contexts.get(served)
        for size_bytes in sizes:
            self.prompts.check_size(served, size_bytes, context_tokens, field)

    async def _tokenized(
        self, incoming: Incoming, request: ChatRequest, salt: str | None, context_tokens: int | None
    ) -> TokenizedPrompt:
        prompt = self.prompts.begin(request, salt, context_tokens, len(incoming.body))
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        return await self._in_turns(incoming, request, salt, context_tokens, prompt)

    def _in_turns(
        self,
        incoming: Incoming,
        request: ChatRequest | CompletionRequest,
        salt: str | None,
        context_tokens: int | None,
        begun: Tokenizing | None,
    ) -> Awaitable[TokenizedPrompt]:
        """A prompt that `PromptReader.begin` has left, in turns with those of other tenants."""
        threads = self.template_threads if begun is None else self.threads
        steps = begun or self.prompts.steps(request, salt, context_tokens)
        return threads.run(incoming.tenant, steps, len(incoming.body))

    def _cache_salt(self, request: Request, tenant: str) -> str | None:
        """The call's cache salt: the tenant if tenants are isolated, then the client's own salt."""
        if not self.isolate_tenants:
            return request.cache_salt
        return f"{tenant}:{request.cache_salt}" if request.cache_salt else tenant


async def _later(make: Callable[[TokenizedPrompt], Delivery], prompt: Awaitable[TokenizedPrompt]) -> Delivery:
    return make(await prompt)


def known_session(headers: Headers, request: Request) -> str:
    """The session that a client names without knowing Plait; empty if the request does not say.

    Coding agents and SDKs send a header or a field that stays the same for a conversation. Its turns are one session:
    they take turns with other sessions while calls wait, and a prompt whose tokens are not known (one with images) goes
    where the turn before it ran. Nothing else depends on it, so a wrong guess costs little. A header counts before a
    field, a user comes last.
    """
    if not SESSION_HEADERS.isdisjoint(map(_NAME, headers)):
        for name, value in headers:
            if name in SESSION_HEADERS and 0 < len(value) <= MAX_NAME_CHARACTERS:
                return value.decode("latin-1")
    for given in (request.prompt_cache_key, request.safety_identifier, request.user):
        if isinstance(given, str) and 0 < len(given) <= MAX_NAME_CHARACTERS:
            return given
    return ""


def _check_context(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, output_tokens: int, context_tokens: int
) -> None:
    """Raises `ContextLengthError` for a request with one prompt. Of several, each may fit."""
    if request.single_prompt:
        raise ContextLengthError(
            f"The model '{request.model}' has a context of {context_tokens} tokens; the request needs "
            f"{prompt_tokens + output_tokens}: {prompt_tokens} of prompt and {output_tokens} of output. Shorten one "
            "of them.",
            param=request.prompt_field,
        )
