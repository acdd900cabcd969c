"""Completions on the embedded engine: checks and tokenizes a request, generates, and answers in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from os import urandom
from typing import Any

import msgspec

from plait.backends.errors import CallerError, ContextLengthError, ModelNotFoundError
from plait.backends.protocol.call_annotations import UNANNOTATED, EngineAnnotations
from plait.backends.protocol.openai import ANY_MODEL, ChatRequest, CompletionRequest, Request
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.lab.embedded.clock import EngineClock
from plait.lab.embedded.engine import Engine
from plait.lab.embedded.example_json import called_tool, example_arguments
from plait.lab.embedded.generation import EmulatedToken, Generation, Piece, TextSource
from plait.lab.embedded.prompts import chat_tokens
from plait.lab.embedded.responses import ChatFormat, Format, Json, ResponseUsage, TextFormat
from plait.policy.prefix.block_hash import root_hash
from plait.policy.types import Slo

NATURAL_OUTPUT_TOKENS = (64, 256)
"""Without `ignore_eos`, a completion ends by itself within these bounds, around the means of public chat traces."""
SHORT_PROMPT_TOKENS = 64
"""A prompt with fewer tokens counts as a greeting or a short question."""
SHORT_OUTPUT_TOKENS = (16, 40)
"""The bounds for a short prompt without a limit: at the demo's 20 ms a token, less than a second."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that an engine emulates, and the most tokens of prompt and output together.

    With `varies`, a request without a seed gets a different text each time.
    """

    name: str
    tokenizer: Tokenizer
    max_context_tokens: int
    varies: bool = False

    def check(self, name: str) -> None:
        """Raise ModelNotFoundError unless a request means this model. A request may leave the name out."""
        if name not in {self.name, ANY_MODEL, ""}:
            raise ModelNotFoundError(f"The model `{name}` does not exist.", param="model")

    def check_context(self, prompt_tokens: int, output_tokens: int, param: str) -> None:
        """Raise ContextLengthError, with vLLM's message, if the tokens exceed the context."""
        if prompt_tokens + output_tokens > self.max_context_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_context_tokens} tokens. However, you requested "
                f"{prompt_tokens + output_tokens} tokens ({prompt_tokens} in the messages, {output_tokens} in the "
                "completion). Please reduce the length of the messages or completion.",
                param=param,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                context_tokens=self.max_context_tokens,
            )


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request runs, its id, and the gateway's annotations."""

    model: ServedModel
    engine: Engine
    clock: EngineClock
    request_id: str
    annotations: EngineAnnotations = UNANNOTATED


def in_emulated_time(annotations: EngineAnnotations, time_scale: float) -> EngineAnnotations:
    """Convert annotations from real to emulated time. `time_scale` emulated seconds pass in a real second."""
    slo = annotations.slo
    if slo is not None:
        ttft_s, tpot_s, jct_s = (None if real_s is None else real_s * time_scale for real_s in slo[:3])
        slo = Slo(ttft_s, tpot_s, jct_s, slo.is_deduced)
    return replace(annotations, age_s=annotations.age_s * time_scale, slo=slo)


class Completion:
    """The choices of one request. All run in the engine from the start, as in vLLM."""

    def __init__(self, request: Request, form: Format) -> None:
        self.stream = bool(request.stream)
        self._include_usage = request.wants_usage_event
        options = request.stream_options
        self._counts = request.wants_usage_event and bool(options and options.continuous_usage_stats)
        self._format = form
        self._generations: list[Generation] = []
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

    def generate(self, engine: Engine, clock: EngineClock, call_id: str, prompt: Sequence[int], **output: Any) -> None:
        """Add a choice. `output` are the remaining arguments of `Generation`."""
        index = len(self._generations)

        def on_piece(piece: Piece) -> None:
            self._pieces.put_nowait((index, piece))

        self._generations.append(Generation(engine, clock, call_id, prompt, on_piece=on_piece, **output))

    async def whole(self) -> Json:
        """The response object once every choice has ended."""
        choices: list[list[Piece]] = [[] for _ in self._generations]
        async for index, piece in self._until_ended():
            choices[index].append(piece)
        return self._format.whole(choices, self._usage())

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events as tokens come. Each choice begins with its opening. A requested usage event is last."""
        opened: set[int] = set()
        tokens = 0
        async for index, piece in self._until_ended():
            opening = None if index in opened else self._format.opening(index)
            opened.add(index)
            if opening is not None:
                yield _event(opening | self._running(tokens))
            tokens += len(piece.tokens)
            yield _event(self._format.delta(index, piece) | self._running(tokens))
        if self._include_usage:
            yield _event(self._format.usage(self._usage()))
        yield b"data: [DONE]\n\n"

    def _running(self, tokens: int) -> Json:
        """The usage in an event after so many tokens, if it was asked for."""
        if not self._counts:
            return {}
        usage = self._usage()
        usage.completion_tokens = tokens
        return {"usage": usage.json()}

    def abort(self) -> None:
        for generation in self._generations:
            generation.abort()

    async def _until_ended(self) -> AsyncIterator[tuple[int, Piece]]:
        unfinished = len(self._generations)
        while unfinished:
            index, piece = await self._pieces.get()
            unfinished -= piece.finish_reason is not None
            yield index, piece

    def _usage(self) -> ResponseUsage:
        """The usage. A prompt with several choices counts once, with the cached tokens of its first choice."""
        usage = ResponseUsage()
        prompts: set[str] = set()
        for call in (generation.call for generation in self._generations):
            usage.completion_tokens += call.sent_tokens
            if call.call_id not in prompts:
                prompts.add(call.call_id)
                usage.prompt_tokens += call.prompt_tokens
                usage.cached_tokens += call.cached_tokens or 0
        return usage


def complete_chat(request: ChatRequest, target: Target, text: str | None = None) -> Completion:
    """Start a chat completion, of `text` if it is given. Raises `CallerError` before anything runs."""
    target.model.check(request.model)
    prompt = chat_tokens(request, target.model.tokenizer)
    tool = called_tool(request)
    form = ChatFormat(
        target.request_id,
        target.model.name,
        tool=None if tool is None else tool["function"]["name"],
        logprobs=bool(request.logprobs),
    )
    completion = Completion(request, form)
    _generate(completion, request, target, [prompt], text if tool is None else example_arguments(tool))
    return completion


def complete_text(request: CompletionRequest, target: Target, text: str | None = None) -> Completion:
    """Start a text completion, of `text` if it is given. Raises `CallerError` before anything runs."""
    target.model.check(request.model)
    tokenizer = target.model.tokenizer
    encode = partial(tokenizer.encode, add_special_tokens=request.add_special_tokens)
    prompts = [prompt if isinstance(prompt, list) else encode(prompt) for prompt in request.prompts()]
    echo = None
    if request.echo:
        echo = [tokenizer.decode(prompt) for prompt in prompts for _ in range(request.choices)]
    form = TextFormat(target.request_id, target.model.name, echo=echo, logprobs=request.logprobs is not None)
    completion = Completion(request, form)
    _generate(completion, request, target, prompts, text)
    return completion


def _generate(
    completion: Completion,
    request: Request,
    target: Target,
    prompts: Sequence[Sequence[int]],
    text: str | None = None,
) -> None:
    limits = [_output_limit(request, target, len(prompt)) for prompt in prompts]
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    root = root_hash(target.model.name, request.cache_salt or "")
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        for index in range(request.choices):
            source, natural = _output(target.model, prompt, request, index, text)
            completion.generate(
                target.engine,
                target.clock,
                f"{target.request_id}-{number}",
                prompt,
                source=source,
                natural_tokens=natural,
                limit=limit,
                stop=[string for string in stop if string],
                root=root,
                annotations=target.annotations,
            )


def _output(
    model: ServedModel, prompt: Sequence[int], request: Request, index: int, text: str | None
) -> tuple[Any, int | None]:
    """The tokens, and how many: those of `text` if given, else prose that depends on prompt, seed and choice."""
    tokenizer = model.tokenizer
    if text is not None:
        pieces = [EmulatedToken(token, tokenizer.decode([token])) for token in tokenizer.encode(text)]
        return iter(pieces), len(pieces)
    given = urandom(8) if model.varies and request.seed is None else request.seed
    digest = sha256(repr((list(prompt[-256:]), len(prompt), given, index)).encode()).digest()
    seed = int.from_bytes(digest[:8], "big")
    short = request.output_limit is None and len(prompt) < SHORT_PROMPT_TOKENS
    low, high = SHORT_OUTPUT_TOKENS if short else NATURAL_OUTPUT_TOKENS
    source = TextSource(tokenizer, seed, behind_word=_ends_in_word(tokenizer, prompt, request))
    return source, None if request.ignore_eos else low + seed % (high - low)


def _ends_in_word(tokenizer: Tokenizer, prompt: Sequence[int], request: Request) -> bool:
    """Whether the answer continues a text that ends in a word. Models then begin with a space."""
    if isinstance(request, ChatRequest) and not request.continue_final_message:
        return False
    return not tokenizer.decode(prompt[-1:])[-1:].isspace()


def _output_limit(request: Request, target: Target, prompt_tokens: int) -> int:
    """The most tokens of a completion. Raises `CallerError` for an empty prompt and for one that is too long."""
    param = request.prompt_field
    if prompt_tokens < 1:
        raise CallerError("The prompt is empty; it must have at least one token.", param=param)
    room = target.model.max_context_tokens - prompt_tokens
    asked = request.output_limit or 0
    target.model.check_context(prompt_tokens, max(1, asked), param)
    limit = asked or room
    assert target.engine.fits(prompt_tokens, limit), "the context is at most the KV cache"
    return limit


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
