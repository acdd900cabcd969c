"""CPU time of a question on a document that the gateway knows: `python -m benchmarks tokenization`.

A prompt reader takes chats as the gateway does: it renders the chat template, encodes the text and hashes the tree
blocks. In each round, 50 questions on one document of 24,000 tokens come under a new cache salt, so that nothing is
known of the first. The last is compared with the same chat without a cache, which is encoded whole. Both must have the
same ids and hashes. Short chats are measured with and without a cache in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.train_tokenizer import corpus
from plait.backends.protocol.openai import ChatRequest
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.calls.tokenization import PromptReader, TokenizedPrompt
from plait.gateway.config import Config, ModelConfig
from plait.gateway.server_config import ServerConfig
from plait.policy.prefix.block_hash import chain, root_hash

DOCUMENT_TOKENS: Final = 24_000
QUESTIONS: Final = 50
BLOCK_TOKENS: Final = 64
TARGET_SHARE: Final = 0.02
SHORT_CHATS: Final = 200
"""Per round and kind: one alone is too short to be timed."""
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


def main() -> None:
    """Measure, print, and say whether the target holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tokenization")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 50 questions (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    arguments = parser.parse_args()
    costs = measure(arguments.rounds)
    for cost in costs.values():
        print(f"{cost.chat:<42}{cost.tokens:>7} tokens: median {cost.median_ms:8.4f} ms, max {cost.max_ms:8.4f} ms")
    share = costs["last"].median_ms / min(costs["whole"].median_ms, costs["first"].median_ms)
    claim = {
        "name": f"CPU time of question {QUESTIONS} on a document of {DOCUMENT_TOKENS} tokens, as a share of the whole "
        "tokenization or of the first question, whichever takes less",
        "value": f"{share:.2%}",
        "target": f"< {TARGET_SHARE:.0%}",
        "holds": share < TARGET_SHARE,
    }
    print(f"{'holds' if claim['holds'] else 'FAILS'}: {claim['name']} = {claim['value']}, wanted {claim['target']}")
    if arguments.json is not None:
        report = {
            "rounds": arguments.rounds,
            "costs": {name: asdict(cost) for name, cost in costs.items()},
            "claims": [claim],
        }
        arguments.json.write_text(json.dumps(report, indent=2))
    sys.exit(not claim["holds"])


def measure(rounds: int) -> dict[str, Cost]:
    """The cost of each kind of chat."""
    tokenizer = load_tokenizer("embedded")
    text = document(tokenizer)
    keeping, forgetting = reader(ServerConfig().token_cache_bytes), reader(0)
    times_ms: dict[str, list[float]] = {}
    for number in range(rounds):
        salt = f"round {number}"
        questions = [question(text, each) for each in range(QUESTIONS)]
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
    for text in corpus():
        texts.append(f"{text}\n\n")
        tokens += len(tokenizer.encode(texts[-1]))
        if tokens > DOCUMENT_TOKENS:
            break
    whole = "".join(texts)
    return whole[: len(whole) * DOCUMENT_TOKENS // tokens]


def question(text: str, number: int) -> ChatRequest:
    """A chat with the document and a question."""
    content = f"{text}\n\nQuestion {number}: which of these would you use for {number + 3} files, and why?"
    return ChatRequest(model=MODEL, messages=[{"role": "user", "content": content}])


def timed(prompts: PromptReader, requests: list[ChatRequest], salt: str) -> tuple[float, TokenizedPrompt]:
    """The milliseconds of CPU time of a request, and the last prompt."""
    began_s = time.process_time()
    for request in requests:
        prompt = prompts.read(request, salt)
    spent_s = time.process_time() - began_s
    return 1e3 * spent_s / len(requests), prompt


def check(tokenizer: Tokenizer, prompt: TokenizedPrompt, request: ChatRequest, salt: str) -> None:
    """The ids and hashes are those of the whole, which does without a prompt reader."""
    ids = tokenizer.encode_chat(request.messages)
    assert list(prompt.prompts[0]) == ids
    assert prompt.block_hashes == chain(ids, BLOCK_TOKENS, root_hash(MODEL, salt))


if __name__ == "__main__":
    main()
