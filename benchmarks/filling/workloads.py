"""The workloads of full fleets: calls that share prefixes, as token ids without texts.

Each workload is a function of a number of calls, their mean rate in calls a second and a seed. The rate only stretches
the time between the calls; at an infinite rate, all come at once. A longer run with the same seed begins with the calls
of the shorter one.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final

from benchmarks.mixed_prompts import LONG_FILE
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.simulation.compare import MODEL
from plait.lab.simulation.simulate import Prompt, SimulatedCall
from plait.lab.simulation.workload import poisson_arrivals
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, root_hash

BLOCK_TOKENS: Final = 16
ZIPF: Final = 1.1
"""The popularity of documents and tool lists, as in `plait demo --compare`."""
FIRST_UNIQUE_ID: Final = 1 << 24
"""Token ids from here on are of one call's own tokens; shared prefixes have smaller ones."""

VIDEO_WINDOW: Final = 40
"""A document that comes and goes is asked while so many other documents come."""

TRACE_BLOCK_TOKENS: Final = 512
MAX_TRACE_PROMPT_TOKENS: Final = 30_000
MAX_TRACE_OUTPUT_TOKENS: Final = 400
"""A 7B engine has a context of 32k tokens. Longer prompts of the trace are left out, longer outputs are cut."""

PERIOD_S: Final = 60.0
BURST_S: Final = 10.0
QUIET_SHARE: Final = 0.25
"""Each period ends with a burst. Before it, the rate is this share of the mean rate."""
BURST_TIMES: Final = (PERIOD_S - QUIET_SHARE * (PERIOD_S - BURST_S)) / BURST_S
"""A burst's rate over the mean rate: 4.75."""

Workload = Callable[[int, float, int], list[SimulatedCall]]
"""The calls of (number of calls, mean rate in calls/s, seed), in the order of arrival."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The tokens of a call's own question and answer.

    A question's are equally likely between two. An answer's are exponential between two, with a mean that is a little
    less than `answer_mean` for what is cut.
    """

    question: tuple[int, int]
    answer: tuple[int, int]
    answer_mean: int

    def draw_question(self, dice: random.Random) -> int:
        """One question's tokens."""
        return dice.randint(*self.question)

    def draw_answer(self, dice: random.Random) -> int:
        """One answer's tokens."""
        least, most = self.answer
        return min(most, least + round(dice.expovariate(1 / (self.answer_mean - least))))


DOCUMENT_LENGTHS: Final = Lengths((20, 80), (20, 160), 67)
VIDEO_LENGTHS: Final = Lengths((20, 60), (10, 150), 41)
TOOL_LENGTHS: Final = Lengths((50, 200), (20, 200), 61)
BURST_LENGTHS: Final = Lengths((20, 80), (20, 600), 123)


@dataclass(frozen=True, slots=True)
class Coming:
    """Documents that come and go: their length, and how often each is asked. Their token ids are from `first_id` on."""

    tokens: int
    askings: int
    lengths: Lengths
    first_id: int = 0


VIDEO: Final = Coming(8_500, 9, VIDEO_LENGTHS)

EMPTY: Final = Prompt(0, HashChain(BLOCK_TOKENS, root_hash(MODEL)), HashChain(TREE_BLOCK_TOKENS, root_hash(MODEL)))


def extended(prompt: Prompt, token_id: int, tokens: int) -> Prompt:
    """The prompt and `tokens` times `token_id` after it. The chains are copied, so that many can begin with one."""
    added = array("I", [token_id]) * tokens
    chains = prompt.chain.copy(), prompt.tree_chain.copy()
    for one in chains:
        one.extend(added)
    return Prompt(prompt.tokens + tokens, *chains)


def documents(calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """30 documents of 24,000 tokens by Zipf's law, unique questions of 20 to 80, answers of about 64."""
    shared = [extended(EMPTY, number, 24_000) for number in range(30)]
    dice = _dice("documents", seed)
    asked = zipf(len(shared), dice)
    drawn = (_call(number, shared, next(asked), dice, DOCUMENT_LENGTHS) for number in range(calls))
    return _at(poisson_arrivals(calls, rate, seed), drawn)


def video(calls: int, rate: float, seed: int, document: Coming = VIDEO) -> list[SimulatedCall]:
    """Documents that come and go: each is asked some times while 40 others come.

    A document's time is its first asking and the number of documents that came before. The run begins when the first 40
    are already there, so that the mix is the same throughout.
    """
    askings = sorted(_video_askings(document.askings, calls // document.askings + VIDEO_WINDOW + 1, seed))
    shared: dict[int, Prompt] = {}
    dice = _dice("video questions", seed)
    drawn = []
    for number, (_, asked) in enumerate(askings[:calls]):
        if asked not in shared:
            shared[asked] = extended(EMPTY, document.first_id + asked, document.tokens)
        drawn.append(_call(number, shared, asked, dice, document.lengths))
    return _at(poisson_arrivals(calls, rate, seed), drawn)


def tools(calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """200 tool lists of 1,000 to 8,000 tokens by Zipf's law, unique requests of 50 to 200, answers of about 60."""
    dice = _dice("tools", seed)
    shared = [extended(EMPTY, number, dice.randint(1_000, 8_000)) for number in range(200)]
    asked = zipf(len(shared), dice)
    drawn = (_call(number, shared, next(asked), dice, TOOL_LENGTHS) for number in range(calls))
    return _at(poisson_arrivals(calls, rate, seed), drawn)


def burst(calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """50 prefixes of 500 to 4,000 tokens, each equally often; answers of about 120. The calls come in bursts."""
    dice = _dice("burst", seed)
    shared = [extended(EMPTY, number, dice.randint(500, 4_000)) for number in range(50)]
    drawn = (_call(number, shared, dice.randrange(len(shared)), dice, BURST_LENGTHS) for number in range(calls))
    return _at(map(burst_time, poisson_arrivals(calls, rate, seed)), drawn)


def burst_time(mean_s: float) -> float:
    """When a call comes that would come at `mean_s` if the rate were the same at all times; both in seconds."""
    periods, rest_s = divmod(mean_s, PERIOD_S)
    quiet_s = PERIOD_S - BURST_S
    before_s = QUIET_SHARE * quiet_s
    within_s = rest_s / QUIET_SHARE if rest_s < before_s else quiet_s + (rest_s - before_s) / BURST_TIMES
    return periods * PERIOD_S + within_s


def mooncake(traces: Path, calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """Mooncake's conversations in their order, from one that the seed chooses; after the last comes the first.

    Prompts share what they share in the trace. `traces` is the folder with the trace.
    """
    with (traces / LONG_FILE).open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["input_length"] <= MAX_TRACE_PROMPT_TOKENS]
    first = _dice("mooncake", seed).randrange(len(rows))
    drawn = (_traced(rows[(first + number) % len(rows)]) for number in range(calls))
    return _at(poisson_arrivals(calls, rate, seed), drawn)


def workloads(traces: Path) -> dict[str, Workload]:
    """All workloads by name. `traces` is the folder with Mooncake's trace; see `missing`."""
    return {
        "documents": documents,
        "video": video,
        "tools": tools,
        "mooncake": partial(mooncake, traces),
        "burst": burst,
    }


def missing(traces: Path) -> dict[str, str]:
    """The workloads that cannot run, with the file that `traces` lacks."""
    return {} if (traces / LONG_FILE).is_file() else {"mooncake": LONG_FILE}


def _dice(purpose: str, seed: int) -> random.Random:
    return random.Random(f"{purpose} {seed}")


def zipf(n: int, dice: random.Random) -> Iterator[int]:
    """Numbers below `n`; number r in proportion to `(r + 1) ** -ZIPF`."""
    cumulative = list(accumulate(rank**-ZIPF for rank in range(1, n + 1)))
    while True:
        yield dice.choices(range(n), cum_weights=cumulative)[0]


def _video_askings(askings: int, coming: int, seed: int) -> Iterator[tuple[float, int]]:
    """The time of each asking, in documents that came before, and the document's number; no time is below 0.

    `coming` documents come from time 0 on.
    """
    dice = _dice("video", seed)
    for number in range(VIDEO_WINDOW + coming):
        begins = number - VIDEO_WINDOW
        later = (begins + dice.uniform(0, VIDEO_WINDOW) for _ in range(askings - 1))
        yield from ((time, number) for time in (begins, *later) if time >= 0)


def _call(
    number: int, shared: Sequence[Prompt] | Mapping[int, Prompt], asked: int, dice: random.Random, lengths: Lengths
) -> SimulatedCall:
    """A call on one of the shared prefixes, with a question of its own."""
    prompt = extended(shared[asked], FIRST_UNIQUE_ID + number, lengths.draw_question(dice))
    return SimulatedCall(0.0, prompt, lengths.draw_answer(dice), prefix=f"prefix {asked}")


def _traced(row: dict[str, Any]) -> SimulatedCall:
    """A call of the trace."""
    prompt = of_blocks(row["hash_ids"], TRACE_BLOCK_TOKENS, row["input_length"])
    return SimulatedCall(0.0, prompt, min(row["output_length"], MAX_TRACE_OUTPUT_TOKENS))


def of_blocks(ids: Iterable[int], block_tokens: int, prompt_tokens: int) -> Prompt:
    """A prompt of so many tokens. Each of its blocks is one token id, many times; the last block may not be full."""
    blocks = (array("I", [block]) * block_tokens for block in ids)
    tokens = array("I", chain.from_iterable(blocks))[:prompt_tokens]
    root = root_hash(MODEL)
    return Prompt(len(tokens), HashChain(BLOCK_TOKENS, root, tokens), HashChain(TREE_BLOCK_TOKENS, root, tokens))


def _at(arrivals_s: Iterable[float], calls: Iterable[SimulatedCall]) -> list[SimulatedCall]:
    """The calls, each with its time of arrival."""
    return [replace(call, arrives_s=arrives_s) for arrives_s, call in zip(arrivals_s, calls, strict=True)]
