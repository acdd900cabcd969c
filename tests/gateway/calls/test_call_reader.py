"""What a request says of its call, on its way to placement."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from plait.backends.errors import ContextLengthError
from plait.backends.protocol.openai import ChatRequest, parse_request
from plait.backends.tokenization.checked_encoder import PROVING_PROMPTS, CheckedEncoder
from plait.backends.tokenization.file_tokenizer import FileTokenizer
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import SHORT_CHARACTERS
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.call_reader import MOSTLY_KNOWN_MESSAGES, OFF_LOOP_BYTES, CallReader, Incoming, PromptReader
from plait.gateway.calls.routes import CHAT_PATH, ForwardedRequest
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.intake.agents import NOBODY, Agent
from plait.gateway.intake.turns import TurnThreads
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import ESTIMATE_MARGIN, Call
from tests.call_routes import ROUTES

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


class Chat:
    """A chat with an engine that does not report its cache."""

    def __init__(self, tokenizer: str = "embedded") -> None:
        self.router = Router()
        self.router.add_engine("a", COSTS)
        self.router.health.answered("a", {"m": None})
        self.router.no_reports("a")
        config = Config(models=(ModelConfig(name="m", tokenizer=tokenizer),))
        self.reader = CallReader(self.router, PromptReader(config, self.router.block_tokens))
        self.messages: list[dict[str, str]] = []

    @property
    def encoder(self) -> CheckedEncoder:
        """The tokenizer's, which all tests of a process share."""
        tokenizer = self.reader.prompts.tokenizers.encoder("m").tokenizer
        assert isinstance(tokenizer, FileTokenizer)
        return tokenizer.encoder

    async def ask(self, text: str, **fields: Any) -> Call:
        self.messages.append({"role": "user", "content": text})
        body = json.dumps({"model": "m", "messages": self.messages, **fields}).encode()
        incoming = Incoming(CHAT_PATH, [], body, "c", 0.0, "t")
        request = parse_request(body, ChatRequest)
        return (await self.reader.read(incoming, request, Annotations())).call

    def answer(self, call: Call, text: str, reasoning: str = "") -> None:
        """The engine answers, after some reasoning that clients do not send back."""
        booking = self.router.book(call, self.router.select(call, 0.0), 0.0)
        output_tokens = len(load_tokenizer("embedded").encode(f"{reasoning}{text}<|im_end|>"))
        self.router.settle(booking, CallUsage(call.prompt_tokens, output_tokens), 1.0)
        self.messages.append({"role": "assistant", "content": text})

    def cached_tokens(self, call: Call) -> int:
        return self.router.select(call, 2.0).cached_tokens


LONG_ANSWER = " ".join(f"Then comes step number {number}." for number in range(40))


async def test_the_next_turn_of_a_chat_finds_the_answer() -> None:
    chat = Chat()
    first = await chat.ask("How is that done?")
    chat.answer(first, LONG_ANSWER)
    second = await chat.ask("And then?")
    assert second.prompt_tokens - 128 < chat.cached_tokens(second) < second.prompt_tokens


async def test_an_answer_that_comes_back_without_its_reasoning_is_not_found() -> None:
    chat = Chat()
    first = await chat.ask("How is that done?")
    chat.answer(first, LONG_ANSWER, reasoning="They want to know how that is done. I shall list the steps.\n\n")
    assert chat.cached_tokens(await chat.ask("And then?")) == 0


async def test_a_call_with_several_answers_is_not_continued() -> None:
    assert (await Chat().ask("How?", n=2)).prompt_hash is None
    assert (await Chat().ask("How?", truncate_prompt_tokens=100)).prompt_hash is None
    assert (await Chat().ask("How?")).prompt_hash is not None


def test_a_short_call_is_read_at_once_and_a_long_one_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat()
    monkeypatch.setattr(chat.encoder, "equal", 0)
    for text, is_short in (("How?", True), ("word " * 1_000, True), (LONG_ANSWER * 20, False)):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
        assert (len(body) <= OFF_LOOP_BYTES) == is_short
        begun = chat.reader.begin(
            Incoming(CHAT_PATH, [], body, "c", 0.0, "t"), parse_request(body, ChatRequest), Annotations()
        )
        assert isinstance(begun, Asked) == is_short
        if not isinstance(begun, Asked):
            begun = asyncio.run(_finished(begun))
        assert begun.call.prompt_tokens == len(
            load_tokenizer("embedded").encode_chat([{"role": "user", "content": text}])
        )


def test_twice_as_much_is_short_once_the_native_encoder_has_proved_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, text = Chat(), LONG_ANSWER * 20
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    assert SHORT_CHARACTERS < len(text) < 2 * SHORT_CHARACTERS
    incoming, request = Incoming(CHAT_PATH, [], body, "c", 0.0, "t"), parse_request(body, ChatRequest)
    monkeypatch.setattr(chat.encoder, "equal", PROVING_PROMPTS)
    assert isinstance(chat.reader.begin(incoming, request, Annotations()), Asked) == chat.encoder.is_native


async def _finished(begun: Awaitable[Asked]) -> Asked:
    return await begun


class Counted(ThreadPoolExecutor):
    """Threads that count what they are given."""

    turns = 0

    def submit(self, *arguments: Any, **options: Any) -> Any:
        self.turns += 1
        return super().submit(*arguments, **options)


async def test_a_long_prompt_is_tokenized_at_once_if_little_of_it_is_new() -> None:
    chat, counted = Chat(), Counted(1)
    threads = TurnThreads(1, "tokenize", counted)
    chat.reader = CallReader(chat.router, chat.reader.prompts, threads=threads)
    long = "".join(f"Line {number} of a long document. " for number in range(1_500))
    first = await chat.ask(long)
    assert counted.turns > 0, "all of it was new"
    counted.turns = 0
    second = await chat.ask("And then?")
    assert counted.turns == 0
    assert second.prompt_tokens > first.prompt_tokens
    await chat.ask(long[::-1])
    assert counted.turns > 0, "much of it was new"


async def test_a_chat_of_many_messages_is_rendered_in_a_thread() -> None:
    chat, counted = Chat(), Counted(1)
    chat.reader = CallReader(chat.router, chat.reader.prompts, threads=TurnThreads(1, "tokenize", counted))
    chat.messages = [{"role": "user", "content": "word " * 100} for _ in range(MOSTLY_KNOWN_MESSAGES)]
    for _ in range(2):
        counted.turns = 0
        await chat.ask("And then?")
        assert counted.turns > 0


@pytest.mark.parametrize(("kind", "is_refused"), [("ollama", True), ("llamacpp", False), (None, False)])
async def test_an_estimated_prompt_is_refused_before_an_engine_that_would_cut_it(
    kind: str | None, is_refused: bool
) -> None:
    """Others refuse it themselves, by exact tokens."""
    fits, chat = Chat(tokenizer="estimated"), Chat(tokenizer="estimated")
    for one in fits, chat:
        one.router.recognised("a", kind)
        one.router.health.answered("a", {"m": 256})
    assert 256 < (await fits.ask("word " * 270)).prompt_tokens < ESTIMATE_MARGIN * 256, "it may fit"
    if not is_refused:
        assert (await chat.ask("word " * 400)).prompt_tokens > ESTIMATE_MARGIN * 256
        return
    with pytest.raises(ContextLengthError, match="would cut the prompt without a word") as caught:
        await chat.ask("word " * 400)
    assert (caught.value.context_tokens, caught.value.param) == (256, "messages")
    chat.router.recognised("a", None)
    await chat.ask("word " * 400)


@pytest.mark.parametrize(("kind", "has_room"), [("ollama", True), ("llamacpp", True), ("vllm", False), (None, False)])
async def test_an_output_limit_needs_room_only_where_the_engine_says_so(kind: str | None, has_room: bool) -> None:
    chat = Chat()
    chat.router.recognised("a", kind)
    chat.router.health.answered("a", {"m": 256})
    if has_room:
        assert (await chat.ask("How?", max_tokens=256)).output_limit == 256
    else:
        with pytest.raises(ContextLengthError):
            await chat.ask("How?", max_tokens=256)
    with pytest.raises(ContextLengthError):
        await chat.ask("How? " * 200)


@pytest.mark.parametrize("session", ["own", None])
async def test_a_session_of_the_client_goes_before_those_of_its_software(session: str | None) -> None:
    headers = [(b"x-session-id", b"child"), (b"x-parent-session-id", b"run")]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "user": "u"}).encode()
    incoming = Incoming(CHAT_PATH, headers, body, "c", 0.0, "t")
    annotations = Annotations(session=session)
    reader = Chat().reader
    read = await reader.read(incoming, parse_request(body, ChatRequest), annotations)
    sent = await reader.forwarded(incoming, parse_request(body, ForwardedRequest), ROUTES[CHAT_PATH], annotations)
    for asked in (read, sent):
        assert (asked.turn_of, asked.call.session) == (session or "child",) * 2
        assert asked.agent == (NOBODY if session else Agent("child", "run", "run"))
