"""Agents that work turn by turn: each prompt is the one before, the engine's own answer, and what came of it.

The questions and observations are those of recorded ReAct trajectories; the answers are as long as the recorded ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from openai import OpenAI

from e2e.real_engines.calls import Answer
from e2e.real_engines.engine import MODEL
from e2e.sdk import sync_client
from e2e.server_process import Server
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.lab.embedded.hash_chain import HashChain
from tests.waiting import WITHIN_S

TRACE: Final = "hotpotqa_100.jsonl"

INSTRUCTIONS: Final = (
    "Answer the question. Take turns of a thought, an action and an observation. A thought reasons about what is known "
    "so far. An action is Search[topic], Lookup[words] or Finish[answer]. An observation is what the action found.\n\n"
)


@dataclass(frozen=True, slots=True)
class Step:
    """What an agent said, and what it was told then."""

    answer: str
    observation: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A question and the steps towards its answer."""

    question: str
    steps: Sequence[Step]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of an agent: its figures, and the token ids as the engine had them. `sent_s` orders the calls."""

    answer: Answer
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sent_s: float


def load_trajectories(traces: Path) -> list[Trajectory]:
    """The recorded trajectories, those first that are examples."""
    found = []
    for line in (traces / TRACE).read_text().splitlines():
        for question, steps in json.loads(line).items():
            said = [Step(f" {step['thought']}\nAction: {step['action']}", step["observation"]) for step in steps]
            found.append(Trajectory(question, said))
    return found


def run_agents(
    gateway: Server, trajectories: Sequence[Trajectory], n_examples: int, concurrency: int, *, with_ids: bool
) -> list[list[Turn]]:
    """Each agent's turns, `concurrency` agents at a time. The first `n_examples` are examples in all prompts.

    `with_ids`: an agent keeps its prompt as token ids, with the ids that the engine generated. Else it keeps a text.
    """
    tokenizer = load_tokenizer("embedded")
    examples, tasks = trajectories[:n_examples], trajectories[n_examples:]
    beginning = INSTRUCTIONS + "".join(map(_recorded, examples))
    with sync_client(gateway, timeout=2 * WITHIN_S) as client, ThreadPoolExecutor(concurrency) as pool:

        def work(numbered: tuple[int, Trajectory]) -> list[Turn]:
            number, task = numbered
            return list(_turns(client, tokenizer, str(number), f"{beginning}{_asked(task)}", task, with_ids=with_ids))

        return list(pool.map(work, enumerate(tasks)))


def ask(client: OpenAI, name: str, prompt: str | list[int], output_tokens: int) -> tuple[Turn, str]:
    """One call of the agent `name`: its turn, and the text of its answer."""
    sent_s = time.monotonic()
    raw = client.completions.with_raw_response.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=output_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    first_s, usage, said = None, None, ""
    prompt_ids: list[int] = []
    output_ids: list[int] = []
    for chunk in raw.parse():
        first_s = first_s or time.monotonic()
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said += choice.text
            more = choice.model_extra or {}
            prompt_ids += more.get("prompt_token_ids") or []
            output_ids += more.get("token_ids") or []
    assert first_s is not None
    assert usage is not None
    assert (len(prompt_ids), len(output_ids)) == (usage.prompt_tokens, usage.completion_tokens)
    details = usage.prompt_tokens_details
    answer = Answer(
        prefix=name,
        engine=raw.headers["plait-engine"],
        prompt_tokens=usage.prompt_tokens,
        predicted_tokens=int(raw.headers["plait-cached-tokens"]),
        cached_tokens=(details and details.cached_tokens) or 0,
        ttft_s=first_s - sent_s,
        sent_s=sent_s,
    )
    return Turn(answer, prompt_ids, output_ids, sent_s), said


def possible_tokens(turns: Sequence[Turn], block_tokens: int) -> int:
    """Prompt tokens that one engine with an infinite cache would find, if it got the calls in this order."""
    found, cached = 0, set[int]()
    for turn in sorted(turns, key=lambda turn: turn.sent_s):
        # The last token of a prompt is computed in any case, and the KV of the last generated token never is.
        for block in HashChain(block_tokens, 0, turn.prompt_ids[:-1]).hashes:
            if block not in cached:
                break
            found += block_tokens
        cached.update(HashChain(block_tokens, 0, [*turn.prompt_ids, *turn.output_ids[:-1]]).hashes)
    return found


def repeated_tokens(turns: Sequence[Turn]) -> tuple[int, int]:
    """Of one agent's generated tokens that its next prompt continues: how many of them it begins with, and all."""
    same, generated = 0, 0
    for turn, following in pairwise(turns):
        whole = [*turn.prompt_ids, *turn.output_ids]
        pairs = zip(whole, following.prompt_ids, strict=False)
        common = next((place for place, (one, other) in enumerate(pairs) if one != other), len(whole))
        same += max(0, common - len(turn.prompt_ids))
        generated += len(turn.output_ids)
    return same, generated


def _turns(
    client: OpenAI, tokenizer: Tokenizer, name: str, text: str, task: Trajectory, *, with_ids: bool
) -> Iterator[Turn]:
    ids = tokenizer.encode(text)
    for step in task.steps:
        output_tokens = len(tokenizer.encode(step.answer))
        turn, said = ask(client, name, ids if with_ids else text, output_tokens)
        yield turn
        told = f"\nObservation: {step.observation}\nThought:"
        text += said + told
        ids = [*ids, *turn.output_ids, *tokenizer.encode(told)]


def _asked(task: Trajectory) -> str:
    return f"{task.question}\nThought:"


def _recorded(task: Trajectory) -> str:
    steps = "\nThought:".join(f"{step.answer}\nObservation: {step.observation}" for step in task.steps)
    return f"{_asked(task)}{steps}\n\n"
