"""Calls of chat services, and of assistants that share long system prompts (Parrot, sections 8.2, 8.3 and 8.5)."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from benchmarks.application.program import Launch, Program, ProgramCall, Vocabulary
from plait.policy.types import Objective

CHAT_FILE = "AzureLLMInferenceTrace_conv.csv"
SYSTEM_TOKENS = (3000, 6000)
"""Ours, around the 6,000 of Parrot's production assistant: lengths of assistants' system prompts."""
QUERY_TOKENS = (20, 200)
"""Ours: what a user asks an assistant."""


class Chat:
    """Lengths of chat calls, drawn with replacement from Azure's conversations."""

    def __init__(self, traces: Path) -> None:
        with (traces / CHAT_FILE).open(encoding="utf-8", newline="") as lines:
            self._lengths = [
                (int(record["ContextTokens"]), int(record["GeneratedTokens"])) for record in csv.DictReader(lines)
            ]

    def draw(
        self,
        vocabulary: Vocabulary,
        kind: str,
        *,
        rate_per_s: float,
        duration_s: float,
        seed: int,
        objective: Objective | None,
        lengths: Sequence[tuple[int, int]] | None = None,
    ) -> list[Launch]:
        """Calls that arrive as a Poisson process; only the times between them depend on the rate.

        Prompts and outputs have one of `lengths`, by default of Azure's.
        """
        chance = random.Random(f"chat-{seed}")
        launches: list[Launch] = []
        at_s = 0.0
        while (at_s := at_s + chance.expovariate(1.0) / rate_per_s) < duration_s:
            prompt_tokens, output_tokens = chance.choice(lengths or self._lengths)
            call = ProgramCall((vocabulary.fresh(max(1, prompt_tokens)),), "answer", max(1, output_tokens))
            launches.append(Launch(at_s, kind, Program((call,), ("answer",)), objective))
        return launches


def assistants(
    applications: int, calls: int, rate_per_s: float, *, mean_output_tokens: int, seed: int
) -> tuple[Launch, ...]:
    """Calls to so many assistants, each with its own system prompt, chosen with equal probability (Parrot, 8.3).

    Outputs are between a third of the mean and five thirds, about the spread of Parrot's 180 to 800 tokens.
    """
    vocabulary, chance = Vocabulary(), random.Random(f"assistants-{seed}")
    prompts = [vocabulary.fresh(chance.randint(*SYSTEM_TOKENS)) for _ in range(applications)]
    arrivals = accumulate(chance.expovariate(1.0) for _ in range(calls))
    launches = []
    for at in arrivals:
        output_tokens = chance.randint(mean_output_tokens // 3, mean_output_tokens * 5 // 3)
        segments = (chance.choice(prompts), vocabulary.fresh(chance.randint(*QUERY_TOKENS)))
        program = Program((ProgramCall(segments, "answer", output_tokens),), ("answer",))
        launches.append(Launch(at / rate_per_s, "assistant", program))
    return tuple(launches)
