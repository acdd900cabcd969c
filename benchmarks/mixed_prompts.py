"""AccelGen's mixed prompts: a share of long ones, chat and instructions for the rest, each call with objectives.

Lengths are those of published traces, drawn with replacement: long prompts from Mooncake's conversations, the rest from
Azure's. AccelGen's own sets (BookCorpus, Alpaca, ShareGPT) have no lengths of their own in public.
"""

from __future__ import annotations

import csv
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from plait.policy.costs.cost_model import CostModel
from plait.policy.types import Slo

LONG_FILE = "mooncake_conversation_trace.jsonl"
SHORT_FILE = "AzureLLMInferenceTrace_conv.csv"
TRACE_FILES = (LONG_FILE, SHORT_FILE)
PROFILE = "a100-opt-13b"

LONG_SHARE = 0.35
"""AccelGen, section 3.1."""
LONG_TOKENS = 4096
"""What counts as a long prompt there."""
MAX_OUTPUT_TOKENS = 2048
"""The most a call generates there."""
PUBLISHED_PER_S = 8.0
"""The rate there."""
BRIEF_PROMPT_TOKENS = 8192
"""The longest prompt that its engines take: the sequences that Orca reserves."""
GROUP_TOKENS = 512
"""Prompts of one group share a TTFT objective but for its scale."""
TTFT_SCALE = (0.5, 1.5)
READING_S = 0.1875
"""Reading speed, seconds a token."""
TPOT_CHOICES = (0.25, 0.5, 1.0, 2.0)
"""Section 3's scales of the reading speed: one of these."""
TPOT_RANGE = (0.75, 1.25)
"""Section 6's: any in between."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A prompt and what is generated for it, in tokens; `capped` if the prompt was cut to fit the KV cache."""

    prompt_tokens: int
    output_tokens: int
    capped: bool = False


@dataclass(frozen=True, slots=True)
class MixedCall:
    """One call: `long_source` says which trace its lengths are from, `slo` what it was promised."""

    number: int
    arrives_s: float
    lengths: Lengths
    long_source: bool
    slo: Slo
    feasible: bool
    """Whether an otherwise idle engine meets the objectives: the whole prompt in one pass, then lone decodes."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Which workload: `tpot` is `range` (AccelGen's section 6) or `choice` (its section 3).

    `brief`: prompts are cut to `BRIEF_PROMPT_TOKENS`, and long ones have outputs like the others, 211 tokens in the
    mean. AccelGen's data sets have as many: 58 of Alpaca's and 338 of ShareGPT's (vLLM's paper), half each.
    """

    calls: int
    rate_per_s: float
    seed: int
    long_share: float = LONG_SHARE
    tpot: str = "range"
    brief: bool = False


class MixedPrompts:
    """The lengths of both traces, cut to a KV cache of `kv_tokens`, and the mean prefill time of each length group."""

    def __init__(self, traces: Path, cost_model: CostModel, kv_tokens: int) -> None:
        self._cost_model = cost_model
        self.long = [cap(pair, kv_tokens) for pair in read_long(traces)]
        self.short = [cap(pair, kv_tokens) for pair in read_short(traces)]
        groups: dict[int, list[float]] = defaultdict(list)
        for lengths in (*self.long, *self.short):
            tokens = lengths.prompt_tokens
            groups[tokens // GROUP_TOKENS].append(cost_model.prefill_time_s(tokens))
        self.group_prefill_s = {group: fmean(times) for group, times in groups.items()}

    def draw(self, mix: Mix) -> list[MixedCall]:
        """The calls of a workload in the order of arrival; the rate only stretches the time between them."""
        chance = random.Random(mix.seed)
        gaps = [chance.expovariate(1.0) for _ in range(mix.calls)]
        sources = [index < round(mix.calls * mix.long_share) for index in range(mix.calls)]
        chance.shuffle(sources)
        calls = []
        for number, (at, long_source) in enumerate(zip(accumulate(gaps), sources, strict=True)):
            lengths = chance.choice(self.long if long_source else self.short)
            if mix.brief:
                output_tokens = chance.choice(self.short).output_tokens
                prompt_tokens = min(lengths.prompt_tokens, BRIEF_PROMPT_TOKENS)
                lengths = Lengths(prompt_tokens, output_tokens if long_source else lengths.output_tokens)
            slo = self._promise(lengths, mix.tpot, chance)
            feasible = self._feasible(lengths, slo)
            calls.append(MixedCall(number, at / mix.rate_per_s, lengths, long_source, slo, feasible))
        return calls

    def _promise(self, lengths: Lengths, tpot: str, chance: random.Random) -> Slo:
        prefill_s = self.group_prefill_s[lengths.prompt_tokens // GROUP_TOKENS]
        ttft_s = prefill_s * chance.uniform(*TTFT_SCALE)
        position = chance.random()  # drawn once, so that the rest is the same for both kinds of TPOT
        if tpot == "choice":
            scale = TPOT_CHOICES[int(position * len(TPOT_CHOICES))]
        else:
            scale = TPOT_RANGE[0] + (TPOT_RANGE[1] - TPOT_RANGE[0]) * position
        return Slo(ttft_s=ttft_s, tpot_s=READING_S * scale)

    def _feasible(self, lengths: Lengths, slo: Slo) -> bool:
        assert slo.ttft_s is not None
        assert slo.tpot_s is not None
        prompt_tokens, rest = lengths.prompt_tokens, lengths.output_tokens - 1
        return (
            self._cost_model.prefill_time_s(prompt_tokens) <= slo.ttft_s
            and self._cost_model.decode_time_s(rest, prompt_tokens) <= rest * slo.tpot_s
        )


def cap(pair: tuple[int, int], kv_tokens: int) -> Lengths:
    """At most `MAX_OUTPUT_TOKENS` of output, and as much of the prompt as the KV cache then holds."""
    prompt_tokens, output_tokens = max(1, pair[0]), min(max(1, pair[1]), MAX_OUTPUT_TOKENS)
    room = kv_tokens - output_tokens
    return Lengths(min(prompt_tokens, room), output_tokens, capped=prompt_tokens > room)


def read_long(traces: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of Mooncake's conversations."""
    with (traces / LONG_FILE).open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [(record["input_length"], record["output_length"]) for record in records]


def read_short(traces: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of Azure's conversations."""
    with (traces / SHORT_FILE).open(encoding="utf-8", newline="") as lines:
        return [(int(record["ContextTokens"]), int(record["GeneratedTokens"])) for record in csv.DictReader(lines)]


def statistics(calls: Sequence[MixedCall]) -> dict[str, float]:
    """What a drawn workload is like: shares of its calls, and mean tokens."""
    return {
        "calls": len(calls),
        "long_source_share": _share(call.long_source for call in calls),
        "long_prompt_share": _share(call.lengths.prompt_tokens > LONG_TOKENS for call in calls),
        "capped_calls": sum(call.lengths.capped for call in calls),
        "feasible_share": _share(call.feasible for call in calls),
        "mean_prompt_tokens": fmean(call.lengths.prompt_tokens for call in calls),
        "mean_output_tokens": fmean(call.lengths.output_tokens for call in calls),
    }


def _share(flags: Iterable[bool]) -> float:
    return fmean(float(flag) for flag in flags)
