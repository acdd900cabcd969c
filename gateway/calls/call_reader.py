"""Turns a request into a call that can be placed: tokenized, hashed, checked against the model's context.

A `PromptReader` computes the token ids that an engine would compute, and their chained hashes of tree blocks. A
`CallReader` makes the call.
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
from plait.gateway.calls.annotations import Annotations, known_session
from plait.gateway.calls.call import Asked
from plait.gateway.calls.context_limits import refuse_bytes, refuse_estimate, refuse_tokens
from plait.gateway.calls.model_tokenizers import ModelTokenizers
from plait.gateway.calls.multipart_body import Form, MultipartBody
from plait.gateway.calls.outgoing import FIELDS, ForwardedBody, OutgoingBody
from plait.gateway.calls.routes import CallRoute, ForwardedRequest
from plait.gateway.config.sections import Config
from plait.gateway.config.server import ServerConfig
from plait.gateway.fleet.router import Router
from plait.gateway.intake.turns import TurnThreads
from plait.policy.prefix.block_hash import extend_chain, root_hash
from plait.policy.types import CHARACTERS_PER_TOKEN, Call

OFF_LOOP_BYTES: Final = 16 * 1024
"""Longer texts are worked on in threads, unless most of a prompt may be known or its tokenizer is quick."""

MOSTLY_KNOWN_BYTES, MOSTLY_KNOWN_MESSAGES = 128 * 1024, 64
"""Of a body whose prompt is rendered and looked up at once, in some 0.2 ms, in case little of it is new."""

TOKENIZER_THREADS = 3
"""Two for one tenant, as tokenizers release the interpreter's lock, and one that is left to the others."""

TEMPLATE_THREADS = 2
"""Of their own, because they only wait for the processes that render the templates of requests."""


class Incoming(msgspec.Struct, frozen=True):
    """A request as it came in. `tenant` is the owner of its API key. The call's times count from `arrived_s`."""

    path: str
    headers: Headers
    body: bytes
    request_id: str
    arrived_s: float
    tenant: str


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A request's prompts as token ids. `tokens` is their total, `block_hashes` are those of the first prompt.

    `exact` is True if the engine's tokenizer gives the same ids. `root` is the hash before the first block, and
    `whole_hash` stands for all tokens of the first prompt. One of `turn_ends` ends each answer in a chat; None: an
    answer may end anywhere.
    """

    tokens: int
    block_hashes: array[int]
    exact: bool
    prompts: Sequence[Sequence[int]]
    root: int = 0
    whole_hash: int = 0
    turn_ends: frozenset[int] | None = None


Tokenizing = Generator[int, None, TokenizedPrompt]
"""A prompt that is tokenized in turns. Before each it yields how many characters of a prompt are not encoded yet."""


class PromptReader:
    """Tokenizes prompts with the tokenizers of their models; safe to call from several threads.

    If the configuration trusts them, the chat templates of requests are rendered in processes, one for each model.
    `base` is the base model of a LoRA adapter, which has its tokenizer.
    """

    def __init__(self, config: Config, block_tokens: int, base: Callable[[str], str] = str) -> None:
        self.tokenizers = ModelTokenizers(config, block_tokens, base)
        self._takes_templates = config.server.trust_request_chat_template

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Raises `CallerError` for a chat template of the request's own, unless they are trusted."""
        if not self._takes_templates and isinstance(request, ChatRequest) and request.chat_template is not None:
            raise CallerError(
                "'chat_template' is not taken from requests here. Leave it out: the model has its own, and "
                "'chat_template_kwargs' sets its options. An operator can allow it with "
                "'trust_request_chat_template = true' under [server].",
                param="chat_template",
            )

    def check_size(self, model: str, size_bytes: int, context_tokens: int | None, field: str) -> None:
        """Raises `ContextLengthError` if the text of a prompt cannot fit by its bytes. `field` is the prompt's."""
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
        """The prompt of a body of that size, if it is short or mostly known; else the `steps` that are left of it.

        None if the first of them waits for another process, which renders the chat template. Raises as `steps` does.
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
        if context_tokens is not None and 4 * len(text) > context_tokens:  # a token has a byte or more
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
        """Tokenize a request's prompts in turns. `context_tokens` is the model's context, None if it is not known.

        A single short prompt has no turn of its own. Raises `CallerError` for messages that the chat template refuses,
        and before it tokenizes a prompt whose bytes cannot fit. A prompt with content that is not text is served, but
        has no tokens here.
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
        if isinstance(given[0], list):  # a million ids may have come, of which nothing is hashed yet
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
        """Raises as `check_size` for a text whose bytes cannot fit. They are counted if they may not."""
        longest = tokenizer.longest_token_bytes
        if context_tokens is not None and longest is not None and len(text) * 4 > context_tokens * longest:
            size = len(text.encode(errors="replace"))
            self.check_size(request.model, size, context_tokens, request.prompt_field)

    def _given(
        self, request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, salt: str, form: ChatForm
    ) -> Sequence[str | list[int]]:
        """The prompts as texts or, as a client may send them, as token ids.

        None for what is no text, nor for a chat that a template refuses which is only a guess: its engine judges it.
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
    """Whether a long body is worth a look before it takes turns: rendering many messages alone takes long."""
    is_short_chat = not isinstance(request, ChatRequest) or len(request.messages) <= MOSTLY_KNOWN_MESSAGES
    return is_short_chat and size_bytes <= MOSTLY_KNOWN_BYTES


def _begun(steps: Tokenizing, left: int) -> TokenizedPrompt | Tokenizing:
    """The prompt, if no more than those characters of it are new; else the steps that are left."""
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
    """Reads requests for one fleet. With `isolate_tenants`, tenants do not share cached prefixes.

    Long prompts are tokenized on `threads`, those whose chat template another process renders on `template_threads`.
    If not `tells_router`, the router learns nothing of the prompts: the calls are not meant to be sent.
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
        """The call, if its prompt is short or mostly known; else what to await for it, once its prompt had its turns.

        It has the objectives in its annotations, and is ready to be delivered. Raises `CallerError` for a call that no
        engine can take, `NoEngineError` while no engine of the model is up.
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
        """The call of a prompt. The router is told of one with one answer, if the engine computes these tokens.

        With `renames`, the client has asked for the model by another name. `fields` are those of a chat's body.
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
        call = Call(
            incoming.request_id, request.model, prompt.tokens, self.router.block_tokens, prompt.block_hashes,
            slo=annotations.slo, objective=annotations.objective, priority=annotations.priority, output_limit=limit,
            streamed=bool(request.stream), prompt_hash=prompt.whole_hash if is_told else None,
            session=annotations.session or known_session(incoming.headers, request), has_grammar=request.has_grammar,
            arrived_s=incoming.arrived_s, choices=prompts * choices,
        )  # fmt: skip
        takes_ids = is_exact and not (isinstance(request, CompletionRequest) and request.echo)
        ids = prompt.prompts if takes_ids else None
        body = OutgoingBody(
            incoming.body, request, ids, salt, renames, self.router.gateway_id, rendered.is_plain, rendered.form, fields
        )  # fmt: skip
        return Asked(
            call, incoming.path, incoming.headers, body, annotations.session,
            tenant=incoming.tenant, choices=prompts * choices, bounds=bounds, wants_receipt=annotations.receipt,
            turn_of=call.session,
        )  # fmt: skip

    async def forwarded(
        self,
        incoming: Incoming,
        request: ForwardedRequest,
        route: CallRoute,
        annotations: Annotations,
        *,
        chat: ChatRequest | None = None,
        form: Form | None = None,
    ) -> Asked:
        """A call that an engine gets as it came. `chat` is what the engine makes of it; None if that is not known.

        Without it, the call is placed by load, and its tokens are guessed. A `form` takes the place of the body. Raises
        as `read` does.
        """
        model = self.router.models.check(request.model)
        if chat is None:
            prompt = TokenizedPrompt(_guessed_tokens(incoming, route, form), array("Q"), exact=False, prompts=())
        else:
            salt = self._cache_salt(request, incoming.tenant)
            chat = msgspec.structs.replace(chat, model=model)
            prompt = await self._tokenized(incoming, chat, salt, self.router.models.contexts.get(model))
        call = Call(
            incoming.request_id, model, prompt.tokens, self.router.block_tokens, prompt.block_hashes,
            slo=annotations.slo, objective=annotations.objective, priority=annotations.priority,
            output_limit=_limit(request, chat), streamed=bool(request.stream) and route.form.has_events,
            has_grammar=chat is not None and chat.has_grammar, arrived_s=incoming.arrived_s,
            session=annotations.session or known_session(incoming.headers, request),
        )  # fmt: skip
        renamed = None if model == request.model else model
        salt = self._cache_salt(request, incoming.tenant) if route.computes and self.isolate_tenants else None
        annotated = annotations != Annotations(session=annotations.session, receipt=annotations.receipt)
        body = ForwardedBody(incoming.body, renamed, request.plait is not None, salt, annotated)
        return Asked(
            call, incoming.path, incoming.headers, body if form is None else MultipartBody(form, renamed),
            annotations.session, tenant=incoming.tenant, form=route.form, route=route.path,
            wants_receipt=annotations.receipt, turn_of=call.session,
        )  # fmt: skip

    async def count(self, incoming: Incoming, request: ChatRequest) -> int:
        """The tokens of a chat's prompt, guessed if they cannot be counted. Raises as `read` does."""
        model = self.router.models.check(request.model)
        salt = self._cache_salt(request, incoming.tenant)
        chat, context_tokens = msgspec.structs.replace(request, model=model), self.router.models.contexts.get(model)
        counted = (await self._tokenized(incoming, chat, salt, context_tokens)).tokens
        return counted or len(incoming.body) // CHARACTERS_PER_TOKEN

    def check_sizes(self, model: str, sizes: Iterable[int], field: str) -> None:
        """Raises `CallerError` if prompts, not put together yet, have more bytes of text than the model can take."""
        served = self.router.models.check(model)
        context_tokens = self.router.models.contexts.get(served)
        for size_bytes in sizes:
            self.prompts.check_size(served, size_bytes, context_tokens, field)

    def _as_rendered(
        self, request: ChatRequest, given: Mapping[str, msgspec.Raw] | None
    ) -> tuple[ChatRequest, RenderedFields]:
        """A chat with the tools and variables that engines give to the template, and what is known of its prompt."""
        rendered = rendered_fields(request, given, self.router.models.renderers.get(request.model, AS_VLLM))
        tools, variables = rendered.tools, rendered.template_kwargs
        if tools is not request.tools or variables is not request.chat_template_kwargs:
            request = msgspec.structs.replace(request, tools=tools, chat_template_kwargs=variables)
        return request, rendered

    async def _tokenized(
        self, incoming: Incoming, request: ChatRequest, salt: str | None, context_tokens: int | None
    ) -> TokenizedPrompt:
        """The prompt of a chat that an engine makes of another API's request."""
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
        """A prompt that `PromptReader.begin` has left, in turns with those of other tenants."""
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


def _guessed_tokens(incoming: Incoming, route: CallRoute, form: Form | None) -> int:
    if form is not None:
        return form.guessed_tokens
    return len(incoming.body) // CHARACTERS_PER_TOKEN if route.computes else 0


def _limit(request: ForwardedRequest, chat: ChatRequest | None) -> int | None:
    """The most tokens that a forwarded call generates; None if it has no limit, or is a stream of unknown form.

    Any other call of unknown form counts as one token: an embedding or a score has none.
    """
    if chat is not None:
        return chat.output_limit
    return None if request.stream else 1
