"""CPU time of a question on a document that the gateway knows: `python -m benchmarks tokenization`.

A prompt reader takes chats as the gateway does: it renders the chat template, encodes the text and hashes the tree
blocks. In each round, 50 questions on one document of 24,000 tokens come under a new cache salt, so that nothing is
known of the first. The last is compared with the same chat without a cache, which is encoded whole. Both must have the
same ids and hashes. Short chats are measured with and without a cache in turn.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tokenizers import Tokenizer as RawTokenizer

from benchmarks.plain.rows import ROWS, TEMPLATES, text
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from benchmarks.train_tokenizer import corpus, save
from plait.backends.protocol.openai import ChatRequest
from plait.backends.tokenization.chat_messages import template_messages, template_tools
from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER
from plait.backends.tokenization.checked_encoder import PROVING_PROMPTS
from plait.backends.tokenization.file_tokenizer import FileTokenizer, HuggingFaceTokenizer
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.calls.call_reader import PromptReader, TokenizedPrompt
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.config.server import ServerConfig
from plait.lab.simulation.claim import Claim
from plait.policy.prefix.block_hash import chain, root_hash
from tests.gateway.calls.tokenizing import read

DOCUMENT_TOKENS: Final = 24_000
QUESTIONS: Final = 50
BLOCK_TOKENS: Final = 64
TARGET_SHARE: Final = 0.02
SHORT_CHATS: Final = 200
"""Per round and kind: one alone is too short to be timed."""
NEW_CHARACTERS: Final = (150, 2_000, 4_000)
MODEL: Final = "m"
SHORT: Final = ChatRequest(
    model=MODEL, messages=[{"role": "user", "content": "Which river does the capital lie on, and why?"}]
)

CHATS: Final = {
    "first": "first question on the document",
    "last": f"question {QUESTIONS}",
    "whole": f"question {QUESTIONS} without a cache",
    "short": "short chat",
    "short whole": "short chat without a cache",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of CPU time of one chat, over the rounds."""

    chat: str
    tokens: int
    median_ms: float
    max_ms: float


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if the claim fails."""
    parser = timed_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 50 questions (default: %(default)s)")
    parser.add_argument("--tokenizer", default="embedded", metavar="FOLDER", help="default: %(default)s")
    arguments = parser.parse_args()
    steps = [*encoding(arguments.tokenizer, arguments.rounds), *rendering(arguments.rounds)]
    costs = measure(arguments.rounds)
    lines = [f"{step.name:<52}{step.before_us:>9.1f} us, now {step.now_us:>7.1f} us" for step in steps]
    lines += [
        f"{cost.chat:<42}{cost.tokens:>7} tokens: median {cost.median_ms:8.4f} ms, max {cost.max_ms:8.4f} ms"
        for cost in costs.values()
    ]
    claim = Claim(
        f"CPU time of question {QUESTIONS} on a document of {DOCUMENT_TOKENS} tokens, as a share of the whole "
        "tokenization or of the first question, whichever takes less",
        costs["last"].median_ms / min(costs["whole"].median_ms, costs["first"].median_ms),
        most=TARGET_SHARE,
    )
    results = [*({"name": name, **asdict(cost)} for name, cost in costs.items()), *map(asdict, steps)]
    return finish("tokenization", Report(lines=lines, claims=[claim], results=results, is_timed=True), arguments)


@dataclass(frozen=True, slots=True)
class Step:
    """Microseconds of CPU time of a step, the minimum of the rounds: by the library, and as the gateway does it."""

    name: str
    before_us: float
    now_us: float


def encoding(specification: str, rounds: int) -> list[Step]:
    """The cost of new text by `tokenizers`, and by an encoder that has proved itself."""
    tokenizer = load_tokenizer(specification)
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.encoder.equal = PROVING_PROMPTS
    steps = []
    for characters in NEW_CHARACTERS:
        new = [[text(f"{characters} {turn} {number}", characters) for number in range(20)] for turn in range(rounds)]
        now_us = least_us(new, lambda prompt: tokenizer.encode_array(prompt, add_special_tokens=False))
        before_us = least_us(new, lambda prompt: tokenizer.encode(prompt, add_special_tokens=False))
        steps.append(Step(f"ids of {characters} new characters, {tokenizer.name[-20:]}", before_us, now_us))
    return steps


def rendering(rounds: int) -> Iterator[Step]:
    """The cost of rendering a plain chat, and one of 17 messages with 8 tools."""
    for name, template in TEMPLATES.items():
        with TemporaryDirectory() as folder:
            save(RawTokenizer.from_file(str(EMBEDDED_FOLDER / "tokenizer.json")), Path(folder))
            (Path(folder) / "chat_template.jinja").write_text(template)
            tokenizer = HuggingFaceTokenizer(name, Path(folder))
        for row in (row for row in ROWS if row.name in {"A", "T"}):
            bodies = [[row.body(20 * turn + number) for number in range(20)] for turn in range(rounds)]

            def by_transformers(body: dict[str, Any], template: str = template, way: Any = tokenizer) -> str:
                messages, tools = template_messages(body["messages"], template), template_tools(body.get("tools"))
                options = {"tools": tools, "chat_template": template, "add_generation_prompt": True}
                return str(way._by_transformers(messages, **options))  # noqa: SLF001 - what it was rendered by

            def now(body: dict[str, Any], way: HuggingFaceTokenizer = tokenizer) -> str:
                return way.render_chat(body["messages"], tools=body.get("tools"))

            assert by_transformers(bodies[0][0]) == now(bodies[0][0])
            yield Step(f"rendering, {name}: {row.what}", least_us(bodies, by_transformers), least_us(bodies, now))


def least_us(rounds: Sequence[Sequence[Any]], work: Callable[[Any], object]) -> float:
    """The microseconds of CPU time of one piece of work, in the round that took least."""
    times_s = []
    for pieces in rounds:
        began_s = time.process_time()
        for piece in pieces:
            work(piece)
        times_s.append((time.process_time() - began_s) / len(pieces))
    return 1e6 * min(times_s)


def measure(rounds: int) -> dict[str, Cost]:
    """The cost of each kind of chat."""
    tokenizer = load_tokenizer("embedded")
    book = document(tokenizer)
    keeping, forgetting = reader(ServerConfig().token_cache_bytes), reader(0)
    times_ms: dict[str, list[float]] = {}
    for number in range(rounds):
        salt = f"round {number}"
        questions = [question(book, each) for each in range(QUESTIONS)]
        gc.collect()
        gc.disable()
        taken = [timed(keeping, [each], salt) for each in questions]
        whole = timed(forgetting, questions[-1:], salt)
        check(tokenizer, taken[-1][1], questions[-1], salt)
        of_round = {"first": taken[0], "last": taken[-1], "whole": whole}
        for name, prompts in (("short", keeping), ("short whole", forgetting))[:: 1 if number % 2 else -1]:
            of_round[name] = timed(prompts, [SHORT] * SHORT_CHATS, salt)
        gc.enable()
        for name, (time_ms, _) in of_round.items():
            times_ms.setdefault(name, []).append(time_ms)
    return {
        name: Cost(CHATS[name], of_round[name][1].tokens, statistics.median(times), max(times))
        for name, times in times_ms.items()
    }


def reader(cache_bytes: int) -> PromptReader:
    """A reader of prompts for the embedded engine's tokenizer."""
    server = ServerConfig(token_cache_bytes=cache_bytes)
    return PromptReader(Config(server=server, models=(ModelConfig(name=MODEL, tokenizer="embedded"),)), BLOCK_TOKENS)


def document(tokenizer: Tokenizer) -> str:
    """Prose and code of DOCUMENT_TOKENS tokens, give or take a few."""
    texts, tokens = [], 0
    for chapter in corpus():
        texts.append(f"{chapter}\n\n")
        tokens += len(tokenizer.encode(texts[-1]))
        if tokens > DOCUMENT_TOKENS:
            break
    whole = "".join(texts)
    return whole[: len(whole) * DOCUMENT_TOKENS // tokens]


def question(book: str, number: int) -> ChatRequest:
    """A chat with the document and a question."""
    content = f"{book}\n\nQuestion {number}: which of these would you use for {number + 3} files, and why?"
    return ChatRequest(model=MODEL, messages=[{"role": "user", "content": content}])


def timed(prompts: PromptReader, requests: list[ChatRequest], salt: str) -> tuple[float, TokenizedPrompt]:
    """The milliseconds of CPU time of a request, and the last prompt."""
    began_s = time.process_time()
    for request in requests:
        prompt = read(prompts, request, salt)
    spent_s = time.process_time() - began_s
    return 1e3 * spent_s / len(requests), prompt


def check(tokenizer: Tokenizer, prompt: TokenizedPrompt, request: ChatRequest, salt: str) -> None:
    """The ids and hashes are those of the whole, which does without a prompt reader."""
    ids = tokenizer.encode_chat(request.messages)
    assert list(prompt.prompts[0]) == ids
    assert prompt.block_hashes == chain(ids, BLOCK_TOKENS, root_hash(MODEL, salt))


if __name__ == "__main__":
    sys.exit(main())
