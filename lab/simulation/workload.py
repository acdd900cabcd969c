"""The workloads for comparing placement policies: repeated questions about long documents and tool lists.

Their shape is Preble's (table 1 and section 4.1). A call has a long shared part, a short question and a short answer.
The popularity of the shared parts follows Zipf's law. Calls or sessions arrive as a Poisson process. The next turn of a
session begins with the turn before, and adds a passage. All functions are pure: the same seed gives the same workload.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from plait.lab.simulation.shared_prefixes import OUTPUT_TOKENS, SharedPrefix

PASSAGE_WORDS: Final = (100, 500)
"""The words that a later turn of a session adds, as the result of a function or a pasted passage."""
THINK_S: Final = 2.0
"""The mean time from an answer to the next turn of its session."""


@dataclass(frozen=True, slots=True)
class WorkloadCall:
    """One chat-completion call to be sent. `prefix` is the name of its shared prefix.

    A later call of a `session` is sent `think_s` seconds after the end of the session's call before it.
    """

    prefix: str
    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] | None
    max_tokens: int
    session: str = ""
    think_s: float = 0.0


def select_working_set(
    prefixes: Sequence[SharedPrefix], token_count: Callable[[SharedPrefix], int], target_tokens: int, seed: int
) -> list[SharedPrefix]:
    """A seeded subset whose shared parts sum to nearly `target_tokens`, in the order of `prefixes`.

    `token_count` gives the tokens of a prefix's shared part and is called once for each. Documents and tool lists get
    half of the target each. If one kind cannot fill its half, the other kind may. If all prefixes together do not reach
    the target, all are returned. If even the smallest exceeds it, only the smallest is returned.
    """
    tokens = [token_count(prefix) for prefix in prefixes]
    order = stream("working set", seed).sample(range(len(prefixes)), len(prefixes))
    kinds = sorted({prefix.kind for prefix in prefixes})  # documents first: tool lists are finer, and fill what is left
    chosen: set[int] = set()
    left_tokens = target_tokens
    for n_kinds, kind in zip(range(len(kinds), 0, -1), kinds, strict=True):
        of_kind = [index for index in order if prefixes[index].kind == kind]
        left_tokens -= _take(of_kind, tokens, chosen, left_tokens // n_kinds, left_tokens)
    left_tokens -= _take(order, tokens, chosen, left_tokens, left_tokens)
    _close_gap(prefixes, tokens, chosen, left_tokens)
    return [prefix for index, prefix in enumerate(prefixes) if index in chosen]


def generate_calls(prefixes: Sequence[SharedPrefix], n_calls: int, seed: int, zipf: float = 1.1) -> list[WorkloadCall]:
    """`n_calls` calls on `prefixes`. A seeded order ranks the prefixes; rank r is drawn in proportion to `r ** -zipf`.

    A longer run with the same seed begins with the calls of the shorter one. Each call holds its whole prompt as text.
    """
    rng = stream("calls", seed)
    asked = popular(prefixes, rng, zipf)
    return [_call(next(asked), rng) for _ in range(n_calls)]


def generate_sessions(
    prefixes: Sequence[SharedPrefix], n_calls: int, seed: int, zipf: float, turns: int
) -> list[WorkloadCall]:
    """`n_calls` calls in sessions of 1 to `2 * turns - 1` calls, session by session. The last one may be cut short.

    A session asks about one prefix, drawn as in `generate_calls`.
    """
    rng = stream("sessions", seed)
    asked = popular(prefixes, rng, zipf)
    calls: list[WorkloadCall] = []
    while len(calls) < n_calls:
        calls += _session(f"session {len(calls)}", next(asked), rng, turns)
    return calls[:n_calls]


def popular(prefixes: Sequence[SharedPrefix], rng: random.Random, zipf: float) -> Iterator[SharedPrefix]:
    """An endless draw of prefixes, by Zipf's law as in `generate_calls`."""
    if not prefixes:
        raise ValueError("there are no shared prefixes to make calls on")
    by_rank = rng.sample(prefixes, len(prefixes))
    cumulative = list(accumulate(rank**-zipf for rank in range(1, len(by_rank) + 1)))
    while True:
        yield rng.choices(by_rank, cum_weights=cumulative)[0]


def poisson_arrivals(n: int, rate_per_s: float, seed: int) -> list[float]:
    """`n` ascending arrival times in seconds from the start, of a Poisson process of `rate_per_s` arrivals a second."""
    if rate_per_s <= 0:
        raise ValueError(f"the arrival rate must be above 0 a second, not {rate_per_s}")
    rng = stream("arrivals", seed)
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(n)))


def stream(purpose: str, seed: int) -> random.Random:
    """A random generator for one purpose. Each purpose draws independently from the run's one seed."""
    return random.Random(f"{purpose} {seed}")  # noqa: S311 - a reproducible workload, not a secret


# Questions repeat, and equal prompts would be cached whole. So the opening varies, which ends the shared prefix right
# before the question, and a random number at the end makes any two prompts differ.
_OPENINGS = (
    "", "Please help me with this.", "A quick one.", "I have been asked the following.", "One more question.",
    "I could not find this myself.", "For a report I am writing:", "This came up in a meeting today.",
    "My colleague would like to know:", "Could you look into this?", "I need this before noon.", "Just to be sure:",
)  # fmt: skip
_WORDS = (
    "above", "after", "again", "along", "answer", "around", "before", "below", "between", "build", "carry",
    "change", "check", "clear", "close", "count", "cover", "cross", "early", "empty", "enough", "field", "first",
    "follow", "full", "given", "ground", "half", "hard", "heat", "high", "hold", "hour", "keep", "large", "last",
    "leave", "level", "light", "line", "long", "main", "mark", "measure", "middle", "move", "near", "next", "note",
    "number", "open", "order", "other", "over", "part", "pass", "place", "plan", "point", "press", "range", "reach",
    "record", "right", "round", "second", "short", "side", "small", "space", "start", "state", "step", "store",
    "table", "time", "turn", "under", "unit", "wait", "watch", "water", "week", "weight", "while", "whole", "work",
    "year",
)  # fmt: skip
_CLOSINGS = (
    "Ticket {n}.",
    "Keep it short, this is for note {n}.",
    "I will file the answer under {n}.",
    "My case: {n}.",
)


def _call(prefix: SharedPrefix, rng: random.Random) -> WorkloadCall:
    question = draw_question(prefix, rng)
    max_tokens = draw_output_tokens(prefix, rng)
    return WorkloadCall(prefix.name, prefix.messages_for(question), list(prefix.tools) or None, max_tokens)


def _session(name: str, prefix: SharedPrefix, rng: random.Random, turns: int) -> Iterator[WorkloadCall]:
    """The calls of one session. Each turn's messages begin with those of the turn before."""
    call = replace(_call(prefix, rng), session=name)
    yield call
    for _ in range(rng.randrange(2 * turns - 1)):
        question = f"{_words(rng.randint(*PASSAGE_WORDS), rng)}\n\n{draw_question(prefix, rng)}"
        messages = [
            *call.messages,
            {"role": "assistant", "content": _words(call.max_tokens, rng)},
            {"role": "user", "content": question},
        ]
        think_s = rng.expovariate(1 / THINK_S)
        call = replace(call, messages=messages, max_tokens=draw_output_tokens(prefix, rng), think_s=think_s)
        yield call


def _words(n: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=n))


def draw_question(prefix: SharedPrefix, rng: random.Random) -> str:
    """One of the prefix's questions, between an opening and a closing."""
    opening, closing = rng.choice(_OPENINGS), rng.choice(_CLOSINGS).format(n=rng.randrange(10_000, 1_000_000))
    return f"{opening} {rng.choice(prefix.questions)}\n{closing}".lstrip()


def draw_output_tokens(prefix: SharedPrefix, rng: random.Random) -> int:
    """A log-normal length with the prefix's mean. The spread is that of its kind in `OUTPUT_TOKENS`."""
    mean_tokens, deviation_tokens = OUTPUT_TOKENS[prefix.kind]
    variance = math.log1p((deviation_tokens / mean_tokens) ** 2)
    location = math.log(prefix.mean_output_tokens) - variance / 2
    return max(1, round(rng.lognormvariate(location, math.sqrt(variance))))


def _take(
    candidates: Sequence[int], tokens: Sequence[int], chosen: set[int], share_tokens: int, limit_tokens: int
) -> int:
    """Choose the candidates that fit `share_tokens`, or else the smallest if it fits `limit_tokens`; returns tokens."""
    taken_tokens = 0
    for index in candidates:
        if index not in chosen and taken_tokens + tokens[index] <= share_tokens:
            chosen.add(index)
            taken_tokens += tokens[index]
    if taken_tokens or not candidates:
        return taken_tokens
    smallest = min(candidates, key=tokens.__getitem__)
    if smallest in chosen or tokens[smallest] > limit_tokens:
        return 0
    chosen.add(smallest)
    return tokens[smallest]


def _close_gap(prefixes: Sequence[SharedPrefix], tokens: Sequence[int], chosen: set[int], gap_tokens: int) -> None:
    """Make the one addition, or exchange within a kind, that brings the sum nearest to the target."""
    spare = [index for index in range(len(prefixes)) if index not in chosen]
    if not spare:
        return
    moves = [(abs(gap_tokens), -1, -1)] if chosen else []  # no move is an option, unless nothing is chosen yet
    moves += [(abs(gap_tokens - tokens[new]), -1, new) for new in spare]
    moves += [
        (abs(gap_tokens - tokens[new] + tokens[old]), old, new)
        for old in sorted(chosen)
        for new in spare
        if prefixes[old].kind == prefixes[new].kind
    ]
    _, old, new = min(moves)
    if new >= 0:
        chosen.discard(old)
        chosen.add(new)
