"""Summaries of long documents, as a chain of calls or as map and reduce (Parrot, section 8.2)."""

from __future__ import annotations

import csv
import random
from pathlib import Path

from benchmarks.application.program import Program, ProgramCall, Segment, Vocabulary

ARTICLES_FILE = "arxiv_summarization_lengths.csv"
DOCUMENT_TOKENS = 20_000
"""Parrot's documents are longer; the articles of the trace are not, so that a document is several of them in a row."""
INSTRUCTION_TOKENS = 60
"""Ours: what stands before the text to summarise; it is the same in all calls of a program."""


class Documents:
    """Lengths of documents, from the articles of the arXiv summarization trace."""

    def __init__(self, traces: Path) -> None:
        with (traces / ARTICLES_FILE).open(encoding="utf-8", newline="") as lines:
            self._articles = [int(record["num_prefill_tokens"]) for record in csv.DictReader(lines)]

    def draw(self, count: int, seed: int) -> list[int]:
        """Tokens of so many documents."""
        chance = random.Random(f"documents-{seed}")
        lengths = []
        for _ in range(count):
            tokens = 0
            while tokens <= DOCUMENT_TOKENS:
                tokens += chance.choice(self._articles)
            lengths.append(tokens)
        return lengths


def chain_summary(vocabulary: Vocabulary, document_tokens: int, chunk_tokens: int, output_tokens: int) -> Program:
    """Each call summarises a chunk together with the summary so far."""
    instruction = vocabulary.fresh(INSTRUCTION_TOKENS)
    calls: list[ProgramCall] = []
    for chunk in _chunks(vocabulary, document_tokens, chunk_tokens):
        before: tuple[Segment, ...] = (calls[-1].output,) if calls else ()
        calls.append(ProgramCall((instruction, *before, chunk), f"summary_{len(calls)}", output_tokens))
    return Program(tuple(calls), (calls[-1].output,))


def map_reduce_summary(vocabulary: Vocabulary, document_tokens: int, chunk_tokens: int, output_tokens: int) -> Program:
    """A summary of each chunk, and then one of all of these."""
    instruction = vocabulary.fresh(INSTRUCTION_TOKENS)
    chunks = _chunks(vocabulary, document_tokens, chunk_tokens)
    maps = [
        ProgramCall((instruction, chunk), f"summary_{number}", output_tokens) for number, chunk in enumerate(chunks)
    ]
    parts: list[Segment] = [vocabulary.fresh(INSTRUCTION_TOKENS), *(call.output for call in maps)]
    return Program((*maps, ProgramCall(tuple(parts), "summary", output_tokens)), ("summary",))


def shared_map_reduce(
    vocabulary: Vocabulary, maps: int, shared_tokens: int, own_tokens: int, output_tokens: int
) -> Program:
    """Map calls whose prompts share their beginning, and a call that takes all answers."""
    shared = vocabulary.fresh(shared_tokens)
    calls = [
        ProgramCall((shared, vocabulary.fresh(own_tokens)), f"part_{number}", output_tokens) for number in range(maps)
    ]
    parts: list[Segment] = [vocabulary.fresh(INSTRUCTION_TOKENS), *(call.output for call in calls)]
    return Program((*calls, ProgramCall(tuple(parts), "whole", output_tokens)), ("whole",))


def _chunks(vocabulary: Vocabulary, document_tokens: int, chunk_tokens: int) -> list[range]:
    starts = range(0, document_tokens, chunk_tokens)
    return [vocabulary.fresh(min(chunk_tokens, document_tokens - start)) for start in starts]
