"""Makes a call of a request: tokenizes the prompt, hashes its tree blocks, and checks it against the model's context.

`PromptReader` computes the token ids that the engine would compute, and the chained hashes of their tree blocks. The
event loop tokenizes a short or mostly cached prompt. For any other, threads run a generator (`Tokenizing`) step by
step, so that tenants take turns (`gateway/intake/turns.py`). `CallReader` makes the `Asked`.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self

import msgspec

from plait.backends.errors import CallerError, UnsupportedError
from plait.backends.protocol.dialects import ChatForm
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request
from plait.backends.tokenization.offered_tokenizer import BoundedTemplates
from plait.backends.tokenization.prompt_encoder import PromptEncoder
from plait.backends.tokenization.rendered_fields import (
    AS_VLLM,
    INERT,
    UNCHANGED,
    RenderedFields,
    rendered_fields,
)
from plait.backends.tokenization.template_process import Job
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.answers.completions import UNKNOWN, UsageBounds
from plait.gateway.asgi import Headers
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.context_limits import refuse_bytes, refuse_estimate, refuse_tokens
from plait.gateway.calls.model_tokenizers import ModelTokenizers
from plait.gateway.calls.outgoing import FIELDS, ForwardedBody, OtherBody, OutgoingBody
from plait.gateway.calls.routes import CallRoute, ForwardedRequest
from plait.gateway.config.sections import Config
from plait.gateway.config.server import ServerConfig
from plait.gateway.fleet.router import Router
from plait.gateway.intake.agents import NOBODY, agent_of
from plait.gateway.intake.turns import TurnThreads
from plait.policy.prefix.block_hash import extend_chain, root_hash
from plait.policy.types import CHARACTERS_PER_TOKEN, Call

OFF_LOOP_BYTES: Final = 16 * 1024
"""Longer bodies are tokenized in threads, unless most of the prompt turns out to be cached (`MOSTLY_KNOWN_BYTES`)."""

MOSTLY_KNOWN_BYTES, MOSTLY_KNOWN_MESSAGES = 128 * 1024, 64
"""Up to this size, the event loop renders the prompt and looks it up in the cache of tokens, in some 0.2 ms."""

TOKENIZER_THREADS = 3
"""Tokenizers release the GIL. One tenant uses at most two of the threads, so that one is left for other tenants."""

TEMPLATE_THREADS = 2
"""Extra threads, because they only wait for the processes that render requests' own chat templates."""


class Incoming(msgspec.Struct, frozen=True):
    """The HTTP request. `tenant` is the owner of its API key. The call's times count from `arrived_s`."""

    path: str
    headers: Headers
    body: bytes
    request_id: str
    arrived_s: float
    tenant: str
    is_translated: bool = False
    """Whether the gateway has made the body from a request of another API."""
    key: str = ""
    """The id of its API key; empty: it needs none, or is not known any more."""
    is_line: bool = False
    """Whether it is a line of a batch."""
    is_late: bool = False
    """Whether the line runs as any call for throughput, because its batch would miss its window."""
    prefer: str | None = None
    """The engine that should get it."""


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A request's prompts as token ids."""

    tokens: int
    """The total of all prompts."""
    block_hashes: array[int]
    """The chained hashes of the first prompt's tree blocks."""
    exact: bool
    """Whether the engine's tokenizer gives the same ids."""
    prompts: Sequence[Sequence[int]]
    """The token ids of each prompt."""
    root: int = 0
    """The parent hash of the first prompt's first block."""
    whole_hash: int = 0
    """The hash of all tokens of the first prompt."""
    turn_ends: frozenset[int] | None = None
    """The token ids that can end an answer of a chat; None: an answer may end anywhere."""


Tokenizing = Generator[int, None, TokenizedPrompt]
"""Tokenizes a prompt in steps. Before each step, yields how many characters of a prompt are left to encode."""


class PromptReader:
    """Tokenizes prompts with the tokenizers of their models; thread-safe.

    With `trust_request_chat_template`, requests' own chat templates are rendered in processes, one for each model.
    `base` maps a LoRA adapter to its base model, whose tokenizer it has.
    """

    def __init__(self, config: Config, block_tokens: int, base: Callable[[str], str] = str) -> None:
        self.tokenizers = ModelTokenizers(config, block_tokens, base)
        self._takes_templates = config.server.trust_request_chat_template

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Raises `CallerError` for a request with a chat template, unless the configuration trusts such templates."""
        if not self._takes_templates and isinstance(request, ChatRequest) and request.chat_template is not None:
            raise CallerError(
                "'chat_template' is not taken from requests here. Leave it out: the model has its own, and "
                "'chat_template_kwargs' sets its options. An operator can allow it with "
                "'trust_request_chat_template = true' under [server].",
                param="chat_template",
            )

    def check_size(self, model: str, size_bytes: int, context_tokens: int | None, field: str) -> None:
        """Raises `ContextLengthError` if a prompt of this size cannot fit, whatever its tokens are.

        `field` is the request's field with the prompt.
        """
        tokenizer = self.tokenizers.encoder(model).tokenizer
        longest = tokenizer.longest_token_bytes
        if context_tokens is None or longest is None or not tokenizer.exact:
            return
        refuse_bytes(model, size_bytes, context_tokens, longest, field)

    def begin(
        self,
        request: ChatRequest | CompletionRequest,
        cache_salt: str | None,
        context_tokens: int | None,
        size_bytes: int,
        form: ChatForm = "vllm",
    ) -> TokenizedPrompt | Tokenizing | None:
        """The prompt, if it is short or mostly cached; else the `steps` that are left of it.

        None if no step has run, because the first one waits for a process that renders the chat template. `size_bytes`
        is the size of the body. Raises as `steps` does.
        """
        encoder = self.tokenizers.encoders.get(request.model) or self.tokenizers.encoder(request.model)
        tokenizer, salt = encoder.tokenizer, cache_salt or ""
        if isinstance(request, CompletionRequest):
            adds, turn_ends = request.add_special_tokens, None
        elif request.chat_template is None and not isinstance(tokenizer, BoundedTemplates):
            adds, turn_ends = False, tokenizer.special_ids
        else:
            self.check(request)
            return None
        if size_bytes > OFF_LOOP_BYTES and not _may_be_known(request, size_bytes):
            return self.steps(request, cache_salt, context_tokens, form)
        given = self._given(request, tokenizer, salt, form)
        text = given[0] if len(given) == 1 else None
        if not isinstance(text, str) or len(text) >= encoder.part_characters:
            return _begun(self._turns(request, given, encoder, salt, context_tokens), tokenizer.short_characters)
        # A character has at most 4 bytes, and a token at least one: a shorter text cannot be too long.
        if context_tokens is not None and 4 * len(text) > context_tokens:
            self._check_fits(request, text, tokenizer, context_tokens)
        ids = tokenizer.encode_array(text, add_special_tokens=adds)
        hashes, root = array("Q"), root_hash(request.model, salt)
        whole = extend_chain(hashes, ids, encoder.block_tokens, root)
        return TokenizedPrompt(len(ids), hashes, tokenizer.exact, (ids,), root, whole, turn_ends)

    def steps(
        self,
        request: ChatRequest | CompletionRequest,
        cache_salt: str | None,
        context_tokens: int | None = None,
        form: ChatForm = "vllm",
    ) -> Tokenizing:
        """Tokenize a request's prompts in steps. `context_tokens` is the model's context; None: unknown.

        Raises `CallerError` for messages that the chat template refuses, and before tokenizing for a prompt with more
        bytes than can fit. A prompt with content that is not text, such as images, gives no tokens.
        """
        encoder, salt = self.tokenizers.encoder(request.model), cache_salt or ""
        given = self._given(request, encoder.tokenizer, salt, form)
        return (yield from self._turns(request, given, encoder, salt, context_tokens))

    def _turns(
        self,
        request: ChatRequest | CompletionRequest,
        given: Sequence[str | list[int]],
        encoder: PromptEncoder,
        salt: str,
        context_tokens: int | None,
    ) -> Tokenizing:
        root, prompts, hashes = root_hash(request.model, salt), list[Sequence[int]](), array("Q")
        adds = isinstance(request, CompletionRequest) and request.add_special_tokens
        for prompt in given:
            if isinstance(prompt, list):
                prompts.append(prompt)
                continue
            self._check_fits(request, prompt, encoder.tokenizer, context_tokens)
            if len(prompt) < encoder.part_characters:
                if len(given) > 1:
                    yield len(prompt)
                prompts.append(encoder.tokenizer.encode_array(prompt, add_special_tokens=adds))
                continue
            scope = request.model, salt
            encoded = yield from encoder.steps(prompt, scope, root, add_special_tokens=adds)
            hashes = hashes if prompts else encoded.hashes
            prompts.append(encoded.ids)
        if not prompts:
            return TokenizedPrompt(0, array("Q"), exact=False, prompts=())
        if isinstance(given[0], list):  # the client may have sent a million ids: hashing them takes a step of its own
            yield 0
        whole, tokenizer = extend_chain(hashes, prompts[0], encoder.block_tokens, root), encoder.tokenizer
        turn_ends = tokenizer.special_ids if isinstance(request, ChatRequest) else None
        return TokenizedPrompt(sum(map(len, prompts)), hashes, tokenizer.exact, prompts, root, whole, turn_ends)

    def _check_fits(
        self,
        request: ChatRequest | CompletionRequest,
        text: str,
        tokenizer: Tokenizer,
        context_tokens: int | None,
    ) -> None:
        """Raises as `check_size` does. Counts the bytes of the text only if its characters may be too many."""
        longest = tokenizer.longest_token_bytes
        if context_tokens is not None and longest is not None and len(text) * 4 > context_tokens * longest:
            size = len(text.encode(errors="replace"))
            self.check_size(request.model, size, context_tokens, request.prompt_field)

    def _given(
        self, request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, salt: str, form: ChatForm
    ) -> Sequence[str | list[int]]:
        """The prompts as texts, or as token ids if the client has sent ids.

        Empty if a prompt is not text, or if a guessed chat template refuses the messages: the engine's own template may
        accept them.
        """
        if isinstance(request, CompletionRequest):
            return () if request.prompt is None else request.prompts()  # the prompt may be embeddings
        try:
            if request.chat_template is not None:
                self.check(request)
                return (self.tokenizers.worker(request.model).render(_job(request)),)
            text = tokenizer.render_chat(
                request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                form=form,
                salt=salt,
            )
        except UnsupportedError:
            return ()
        except CallerError:
            if request.chat_template is None and tokenizer.guesses_template:
                return ()
            raise
        return (text,)


def _may_be_known(request: ChatRequest | CompletionRequest, size_bytes: int) -> bool:
    """Whether to render a long body on the event loop, in case most of it is cached."""
    is_short_chat = not isinstance(request, ChatRequest) or len(request.messages) <= MOSTLY_KNOWN_MESSAGES
    return is_short_chat and size_bytes <= MOSTLY_KNOWN_BYTES


def _begun(steps: Tokenizing, left: int) -> TokenizedPrompt | Tokenizing:
    """The prompt, if at most `left` characters of it are not cached; else the steps that are left."""
    new = 0
    try:
        while new <= left:
            left -= new
            new = next(steps)
    except StopIteration as end:
        prompt: TokenizedPrompt = end.value
        return prompt
    return steps


def _job(request: ChatRequest) -> Job:
    return Job(
        request.messages,
        request.chat_template,
        request.tools,
        request.add_generation_prompt,
        request.continue_final_message,
        request.chat_template_kwargs,
    )


@dataclass(frozen=True, slots=True)
class CallReader:
    """Makes calls of requests. With `isolate_tenants`, tenants do not share cached prefixes.

    Long prompts are tokenized on `threads`, those whose chat template a process renders on `template_threads`. Without
    `tells_router`, the router does not record the prompts, because the calls are never sent (`plait explain`).
    """

    router: Router
    prompts: PromptReader
    isolate_tenants: bool = False
    threads: TurnThreads = field(default_factory=lambda: TurnThreads(TOKENIZER_THREADS, "tokenize"))
    template_threads: TurnThreads = field(default_factory=lambda: TurnThreads(TEMPLATE_THREADS, "render"))
    tells_router: bool = True

    @classmethod
    def of(cls, router: Router, prompts: PromptReader, config: ServerConfig) -> Self:
        threads = TurnThreads(TOKENIZER_THREADS, "tokenize", max_bytes=config.max_waiting_prompt_bytes)
        return cls(router, prompts, config.isolate_tenants, threads)

    def begin(
        self, incoming: Incoming, request: ChatRequest | CompletionRequest, annotations: Annotations
    ) -> Asked | Coroutine[Any, Any, Asked]:
        """The call, if its prompt is short or mostly cached; else a coroutine that tokenizes it in threads first.

        Raises `CallerError` for a call that no engine can take, `NoEngineError` while no engine of the model is up.
        """
        models, name = self.router.models, request.model
        model = name if name in models.direct else models.check(name)
        if name != model:
            request = msgspec.structs.replace(request, model=model)
        salt = self._cache_salt(request, incoming.tenant) if self.isolate_tenants else request.cache_salt
        context_tokens = models.contexts.get(model)
        read, rendered, fields = request, UNCHANGED, None
        if isinstance(request, ChatRequest):
            fields = FIELDS.decode(incoming.body)
            if not fields.keys() <= INERT or models.renderers.get(model, AS_VLLM) != AS_VLLM:
                read, rendered = self._as_rendered(request, fields)
        prompt = self.prompts.begin(read, salt, context_tokens, len(incoming.body), rendered.form)
        if isinstance(prompt, TokenizedPrompt):
            return self._asked(
                incoming, request, annotations, prompt, rendered=rendered, salt=salt, context_tokens=context_tokens,
                renames=name != model, fields=fields,
            )  # fmt: skip
        make = partial(
            self._asked,
            incoming,
            request,
            annotations,
            rendered=rendered,
            salt=salt,
            context_tokens=context_tokens,
            renames=name != model,
            fields=fields,
        )
        return _later(make, partial(self._in_turns, incoming, read, salt, context_tokens, prompt, form=rendered.form))

    async def read(
        self, incoming: Incoming, request: ChatRequest | CompletionRequest, annotations: Annotations
    ) -> Asked:
        begun = self.begin(incoming, request, annotations)
        return begun if isinstance(begun, Asked) else await begun

    def _asked(
        self, incoming: Incoming, request: ChatRequest | CompletionRequest, annotations: Annotations,
        prompt: TokenizedPrompt, *, rendered: RenderedFields, salt: str | None, context_tokens: int | None,
        renames: bool, fields: Mapping[str, msgspec.Raw] | None,
    ) -> Asked:  # fmt: skip
        """The call of a tokenized prompt.

        `renames`: the client named the model by an alias. `fields` are those of a chat's body.
        """
        limit, prompts = request.output_limit, len(prompt.prompts) or 1
        choices = 1 if request.n is None else request.choices
        bounds, is_exact = UNKNOWN, prompt.exact and rendered.is_exact
        if context_tokens is not None:
            output_tokens = 1 if request.model in self.router.models.filled else limit or 1
            if is_exact and prompt.tokens + output_tokens > context_tokens:
                refuse_tokens(request, prompt.tokens, output_tokens, context_tokens)
            elif not is_exact and request.model in self.router.models.truncated:
                refuse_estimate(request, prompt.tokens, context_tokens)
            each = context_tokens if limit is None else min(context_tokens, limit)
            bounds = UsageBounds(context_tokens * prompts, each * prompts * choices)
        is_told = is_exact and len(prompt.prompts) == choices == 1 and request.truncate_prompt_tokens is None
        if is_told and self.router.answers.answered.prompts and self.tells_router:
            self.router.answers.arrived(prompt.prompts[0], prompt.block_hashes, prompt.root, prompt.turn_ends)
        session, agent = (annotations.session, NOBODY) if annotations.session else agent_of(incoming.headers, request)
        call = Call(
            incoming.request_id, request.model, prompt.tokens, self.router.block_tokens, prompt.block_hashes,
            slo=annotations.slo, objective=annotations.objective, priority=annotations.priority, output_limit=limit,
            is_line=incoming.is_line and not incoming.is_late,
            streamed=bool(request.stream), prompt_hash=prompt.whole_hash if is_told else None,
            session=session, has_grammar=request.has_grammar, arrived_s=incoming.arrived_s, choices=prompts * choices,
            tokens=prompt.prompts[0] if is_told else (),
        )  # fmt: skip
        takes_ids = is_exact and not (isinstance(request, CompletionRequest) and request.echo)
        ids = prompt.prompts if takes_ids else None
        body = OutgoingBody(
            incoming.body, request, ids, salt, renames, self.router.gateway_id, rendered.is_plain, rendered.form,
            fields, incoming.is_translated,
        )  # fmt: skip
        return Asked(
            call, incoming.path, incoming.headers, body, annotations.session,
            tenant=incoming.tenant, choices=prompts * choices, bounds=bounds, wants_receipt=annotations.receipt,
            turn_of=session, agent=agent, wants_tier=request.service_tier is not None, key=incoming.key,
            is_line=incoming.is_line, prefer=incoming.prefer,
        )  # fmt: skip

    async def forwarded(
        self,
        incoming: Incoming,
        request: ForwardedRequest,
        route: CallRoute,
        annotations: Annotations,
        *,
        chat: ChatRequest | None = None,
        form: OtherBody | None = None,
    ) -> Asked:
        """A call whose body is forwarded. `chat` is the chat that the engine makes of the body; None: not known.

        Without `chat`, the call is placed by load and its tokens are guessed. `form` is the body of a request that is
        no JSON. Raises as `read` does.
        """
        model = self.router.models.check(request.model)
        if chat is None:
            prompt = TokenizedPrompt(_guessed_tokens(incoming, route, form), array("Q"), exact=False, prompts=())
        else:
            salt = self._cache_salt(request, incoming.tenant)
            chat = msgspec.structs.replace(chat, model=model)
            prompt = await self._tokenized(incoming, chat, salt, self.router.models.contexts.get(model))
        session, agent = (annotations.session, NOBODY) if annotations.session else agent_of(incoming.headers, request)
        call = Call(
            incoming.request_id, model, prompt.tokens, self.router.block_tokens, prompt.block_hashes,
            slo=annotations.slo, objective=annotations.objective, priority=annotations.priority,
            output_limit=_limit(request, chat), streamed=bool(request.stream) and route.form.has_events,
            has_grammar=chat is not None and chat.has_grammar, arrived_s=incoming.arrived_s,
            session=session, is_line=incoming.is_line and not incoming.is_late,
        )  # fmt: skip
        renamed = None if model == request.model else model
        salt = self._cache_salt(request, incoming.tenant) if route.computes and self.isolate_tenants else None
        annotated = annotations != Annotations(session=annotations.session, receipt=annotations.receipt)
        body = ForwardedBody(incoming.body, renamed, request.plait is not None, salt, annotated)
        return Asked(
            call, incoming.path, incoming.headers, body if form is None else form.renamed(renamed),
            annotations.session, tenant=incoming.tenant, form=route.form, route=route.path,
            wants_receipt=annotations.receipt, turn_of=session, agent=agent, key=incoming.key,
            is_line=incoming.is_line, prefer=incoming.prefer,
        )  # fmt: skip

    async def count(self, incoming: Incoming, request: ChatRequest) -> int:
        """The number of tokens of a chat's prompt, guessed if they cannot be counted. Raises as `read` does."""
        model = self.router.models.check(request.model)
        salt = self._cache_salt(request, incoming.tenant)
        chat, context_tokens = msgspec.structs.replace(request, model=model), self.router.models.contexts.get(model)
        counted = (await self._tokenized(incoming, chat, salt, context_tokens)).tokens
        return counted or len(incoming.body) // CHARACTERS_PER_TOKEN

    def check_sizes(self, model: str, sizes: Iterable[int], field: str) -> None:
        """Raises `CallerError` if a prompt of one of these `sizes` (bytes before rendering) cannot fit the context."""
        served = self.router.models.check(model)
        context_tokens = self.router.models.contexts.get(served)
        for size_bytes in sizes:
            self.prompts.check_size(served, size_bytes, context_tokens, field)

    def _as_rendered(
        self, request: ChatRequest, given: Mapping[str, msgspec.Raw] | None
    ) -> tuple[ChatRequest, RenderedFields]:
        """The chat with the tools and variables that engines give to the template, and whether these are exact."""
        rendered = rendered_fields(request, given, self.router.models.renderers.get(request.model, AS_VLLM))
        tools, variables = rendered.tools, rendered.template_kwargs
        if tools is not request.tools or variables is not request.chat_template_kwargs:
            request = msgspec.structs.replace(request, tools=tools, chat_template_kwargs=variables)
        return request, rendered

    async def _tokenized(
        self, incoming: Incoming, request: ChatRequest, salt: str | None, context_tokens: int | None
    ) -> TokenizedPrompt:
        """The prompt of a chat that another API's request is translated to."""
        read, rendered = self._as_rendered(request, None)
        prompt = self.prompts.begin(read, salt, context_tokens, len(incoming.body), rendered.form)
        if not isinstance(prompt, TokenizedPrompt):
            prompt = await self._in_turns(incoming, read, salt, context_tokens, prompt, form=rendered.form)
        return prompt

    def _in_turns(
        self,
        incoming: Incoming,
        request: ChatRequest | CompletionRequest,
        salt: str | None,
        context_tokens: int | None,
        begun: Tokenizing | None,
        *,
        form: ChatForm,
    ) -> Awaitable[TokenizedPrompt]:
        """Tokenize in threads what `PromptReader.begin` has left of a prompt. Tenants take turns."""
        threads = self.template_threads if begun is None else self.threads
        steps = begun or self.prompts.steps(request, salt, context_tokens, form)
        return threads.run(incoming.tenant, steps, len(incoming.body))

    def _cache_salt(self, request: Request, tenant: str) -> str | None:
        """The call's cache salt: the tenant if tenants are isolated, then the client's own salt."""
        if not self.isolate_tenants:
            return request.cache_salt
        return f"{tenant}:{request.cache_salt}" if request.cache_salt else tenant


async def _later(make: Callable[[TokenizedPrompt], Asked], prompt: Callable[[], Awaitable[TokenizedPrompt]]) -> Asked:
    return make(await prompt())


def _guessed_tokens(incoming: Incoming, route: CallRoute, form: OtherBody | None) -> int:
    if form is not None:
        return form.guessed_tokens
    return len(incoming.body) // CHARACTERS_PER_TOKEN if route.computes else 0


def _limit(request: ForwardedRequest, chat: ChatRequest | None) -> int | None:
    """The output limit of a forwarded call; None: no limit, or a stream whose form is unknown.

    Any other call without a `chat` counts as one token, because an embedding or a score generates none.
    """
    if chat is not None:
        return chat.output_limit
    return None if request.stream else 1
