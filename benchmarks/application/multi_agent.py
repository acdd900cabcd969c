"""A multi-agent programming workflow after a recorded MetaGPT run (Parrot, section 8.4)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.application.program import Program, ProgramCall, Segment, Vocabulary

TRACE_FILE = "metagpt/log_3_round.jsonl"
REVIEW_ROUNDS = 3
"""Parrot, section 8.4; the recorded run has one, whose lengths are taken for each."""
FILE_HEADER_TOKENS = 6
"""A file's name and its fences in a code base."""


@dataclass(frozen=True, slots=True)
class AgentLengths:
    """Tokens in the recorded run. `*_shared`: constant text before what differs between the calls of a stage, without
    the values in it; `*_own`: behind it. Outputs are per file, in the order of the run.
    """

    architect_prompt: int
    architect_output: int
    coder_shared: int
    coder_own: int
    reviewer_shared: int
    reviewer_own: int
    reviser_shared: int
    reviser_own: int
    codes: tuple[int, ...]
    comments: tuple[int, ...]
    revisions: tuple[int, ...]


def read_lengths(traces: Path) -> AgentLengths:
    """The lengths of the recorded run: the prompts' and outputs' own token counts, split where their texts differ."""
    stages: dict[str, Any] = {}
    with (traces / TRACE_FILE).open(encoding="utf-8") as lines:
        for line in lines:
            stages |= json.loads(line)
    architect = stages["r0_responses"]["noname"]["usage"]
    codes, comments, revisions = (_outputs(stages[f"r{number}_responses"]) for number in (1, 2, 3))
    files_tokens = sum(codes) + FILE_HEADER_TOKENS * len(codes)
    coder, reviewer, reviser = (_shared_and_own(stages, number) for number in (1, 2, 3))
    return AgentLengths(
        architect_prompt=architect["prompt_tokens"],
        architect_output=architect["completion_tokens"],
        coder_shared=coder[0] - architect["completion_tokens"],
        coder_own=coder[1],
        reviewer_shared=reviewer[0] - files_tokens,
        reviewer_own=reviewer[1],
        reviser_shared=reviser[0] - files_tokens - max(comments),
        reviser_own=reviser[1],
        codes=codes,
        comments=comments,
        revisions=revisions,
    )


def multi_agent(vocabulary: Vocabulary, lengths: AgentLengths, files: int, rounds: int = REVIEW_ROUNDS) -> Program:
    """An architect, then for each file a coder, and in each round a reviewer and a reviser, who see all files.

    The architect's output grows with the number of files; files beyond the recorded ones have lengths as those.
    """
    numbers = range(files)
    output_tokens = round(lengths.architect_output * files / len(lengths.codes))
    architect = ProgramCall((vocabulary.fresh(lengths.architect_prompt),), "design", output_tokens)
    calls = [architect]
    before: list[Segment] = [vocabulary.fresh(lengths.coder_shared // 2), "design"]
    before.append(vocabulary.fresh(lengths.coder_shared - lengths.coder_shared // 2))
    stage = [
        ProgramCall((*before, vocabulary.fresh(lengths.coder_own)), f"code_{n}", _of(lengths.codes, n)) for n in numbers
    ]
    calls += stage
    review, revise = vocabulary.fresh(lengths.reviewer_shared), vocabulary.fresh(lengths.reviser_shared)
    headers = [vocabulary.fresh(FILE_HEADER_TOKENS) for _ in numbers]
    reviewers = [vocabulary.fresh(lengths.reviewer_own) for _ in numbers]
    revisers = [vocabulary.fresh(lengths.reviser_own) for _ in numbers]
    for turn in range(1, rounds + 1):
        files_then = [part for n in numbers for part in (headers[n], stage[n].output)]
        comments = [
            ProgramCall((review, *files_then, reviewers[n]), f"comment_{turn}_{n}", _of(lengths.comments, n))
            for n in numbers
        ]
        stage = [
            ProgramCall(
                (revise, *files_then, comments[n].output, revisers[n]), f"code_{turn}_{n}", _of(lengths.revisions, n)
            )
            for n in numbers
        ]
        calls += [*comments, *stage]
    return Program(tuple(calls), tuple(call.output for call in stage))


def _of(outputs: Sequence[int], number: int) -> int:
    return outputs[number % len(outputs)]


def _outputs(responses: dict[str, Any]) -> tuple[int, ...]:
    return tuple(response["usage"]["completion_tokens"] for response in responses.values())


def _shared_and_own(stages: dict[str, Any], number: int) -> tuple[int, int]:
    """Prompt tokens of a stage's calls up to where their texts differ, and from there on; characters divide them."""
    queries, responses = stages[f"r{number}_queries"], stages[f"r{number}_responses"]
    (first, *_), (_, second, *_) = queries, queries
    texts = [queries[name]["system"] + queries[name]["user_msg"] for name in (first, second)]
    tokens = responses[first]["usage"]["prompt_tokens"]
    same = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), len(texts[0]))
    shared = round(tokens * same / len(texts[0]))
    return shared, tokens - shared
