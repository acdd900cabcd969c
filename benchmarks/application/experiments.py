"""The experiments: what is swept in each, on which engines, with which systems, and what their clients do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from benchmarks.application.conversations import CHAT_FILE, Chat, assistants
from benchmarks.application.documents import (
    ARTICLES_FILE,
    Documents,
    chain_summary,
    map_reduce_summary,
    shared_map_reduce,
)
from benchmarks.application.multi_agent import TRACE_FILE, multi_agent, read_lengths
from benchmarks.application.program import Launch, Program, Scenario, Vocabulary
from benchmarks.application.systems import BLOCK_TOKENS, LATENCY, OURS, THROUGHPUT, Machine
from plait.backends.profiles import load_profile
from plait.policy.types import Objective

TRACE_FILES = (ARTICLES_FILE, CHAT_FILE, TRACE_FILE)

LLAMA_13B_KV_TOKENS = 62_624
"""KV cache of LLaMA-13B on the paper's A100: 90 % of 80 GiB less 26.0 GB of weights, 819,200 bytes a token."""
ONE_ENGINE = Machine("a100-opt-13b", 1, LLAMA_13B_KV_TOKENS)
FOUR_ENGINES = Machine("a6000-mistral-7b", 4, load_profile("a6000-mistral-7b").kv.tokens // BLOCK_TOKENS * BLOCK_TOKENS)

ARRIVALS_S = 60.0
"""How long calls and applications keep arriving where they do."""
CHAIN_STARTS_S = 10.0
"""The chain among background calls starts when there are some."""
STEADY_S = 180.0
"""So long Parrot's background calls keep arriving: longer than a chain among them takes."""
PARROT_BACKGROUND = (680, 50)
"""Parrot, section 8.2: 512 words, which are some 680 tokens, and 50 of output."""
PARROT_OUTPUT_TOKENS = 490
"""The middle of Parrot's 180 to 800 tokens of output (section 8.3)."""
CHAT_PER_S = 1.0
"""Parrot, section 8.5."""
SUSTAINED_CALLS = (240, 1200)
"""Calls in a run that looks for the sustained rate: a minute's, within these bounds."""
MAPS = 16
MAP_OUTPUT_TOKENS = 60
OWN_TOKENS = {200: 1_000, 2_000: 500, 6_000: 200}
"""Of a map's prompt, by the tokens that all maps share: little, half and nearly all of it."""
MAPS_EVERY_S = 10.0
"""Between two map-reduces of the mixes with chat."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an experiment can sweep; rates are per second, `files` are those that the agents write.

    Background calls have (prompt, output) tokens `background`, or are drawn from Azure's conversations.
    """

    chunk_tokens: int = 1024
    output_tokens: int = 50
    background_rate: float = 0.0
    background: tuple[int, int] | None = None
    applications: int = 1
    map_reduce_rate: float = 0.0
    files: int = 8
    shared_tokens: int = 2_000
    chat_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One point of an experiment's sweep: one setting differs from the experiment's own."""

    experiment: str
    parameter: str
    value: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """`kinds` are the jobs that it is about; `normalised`: their latency is judged per output token.

    `sustained`: the figure is the highest rate that a system sustains, and `build` takes it as its last argument.
    """

    title: str
    machine: Machine
    systems: tuple[str, ...]
    sweeps: Mapping[str, tuple[float, ...]]
    quick: Mapping[str, tuple[float, ...]]
    seeds: int
    kinds: tuple[str, ...]
    settings: Settings = Settings()
    normalised: tuple[str, ...] = ()
    sustained: bool = False

    def cases(self, name: str, *, quick: bool = False) -> list[Case]:
        """The points of the sweep."""
        sweeps = self.quick if quick else self.sweeps
        return [Case(name, parameter, value) for parameter, values in sweeps.items() for value in values]


CHAINED = (OURS, "plait_fcfs", LATENCY, THROUGHPUT)
CHAINERS = ("client_e2", "client_plait", "plait_undeduced")
"""The strongest simple alternatives: prefix-aware placement without programs, and programs without deduction."""
LENGTHS = {"output_tokens": (25, 50, 75, 100), "chunk_tokens": (512, 1024, 1536, 2048)}

EXPERIMENTS: dict[str, Experiment] = {
    "chain": Experiment(
        "Chain summary of one document",
        ONE_ENGINE,
        CHAINED,
        sweeps=LENGTHS,
        quick={"output_tokens": (25, 100)},
        seeds=10,
        kinds=("chain",),
    ),
    "background": Experiment(
        "Chain summary among background calls",
        ONE_ENGINE,
        CHAINED,
        sweeps={"background_rate": (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)},
        quick={"background_rate": (1.0, 3.5)},
        seeds=4,
        kinds=("chain",),
    ),
    "background_parrot": Experiment(
        "Chain summary among Parrot's background calls",
        ONE_ENGINE,
        CHAINED,
        sweeps={"background_rate": (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)},
        quick={"background_rate": (3.5,)},
        seeds=4,
        kinds=("chain",),
        settings=Settings(background=PARROT_BACKGROUND),
    ),
    "chains": Experiment(
        "Chain summaries at once",
        ONE_ENGINE,
        CHAINED,
        sweeps={"applications": (10, 15, 20, 25)},
        quick={"applications": (25,)},
        seeds=2,
        kinds=("chain",),
    ),
    "map_reduce": Experiment(
        "Map-reduce summary of one document",
        ONE_ENGINE,
        CHAINED,
        sweeps=LENGTHS,
        quick={"output_tokens": (25, 100), "chunk_tokens": (2048,)},
        seeds=10,
        kinds=("map_reduce",),
    ),
    "multi_agent": Experiment(
        "Multi-agent programming",
        ONE_ENGINE,
        (*CHAINED, "latency_uncached", "throughput_uncached"),
        sweeps={"files": (4, 8, 12, 16)},
        quick={"files": (4, 16)},
        seeds=1,
        kinds=("multi_agent",),
    ),
    "chat_mix": Experiment(
        "Chat and map-reduce summaries on four engines",
        FOUR_ENGINES,
        CHAINED,
        sweeps={"map_reduce_rate": (0.1, 0.2, 0.4, 0.8)},
        quick={"map_reduce_rate": (0.2, 0.8)},
        seeds=3,
        kinds=("chat", "map_reduce"),
        normalised=("chat",),
    ),
    "latency_mix": Experiment(
        "Latency map-reduces beside some chat on four engines",
        FOUR_ENGINES,
        (*CHAINED, *CHAINERS),
        sweeps={"shared_tokens": tuple(OWN_TOKENS)},
        quick={"shared_tokens": (6_000,)},
        seeds=10,
        kinds=("map_reduce", "chat"),
        normalised=("chat",),
    ),
    "busy_mix": Experiment(
        "Latency map-reduces beside much chat on four engines",
        FOUR_ENGINES,
        (*CHAINED, *CHAINERS),
        sweeps={"shared_tokens": tuple(OWN_TOKENS)},
        quick={"shared_tokens": (6_000,)},
        seeds=40,
        kinds=("map_reduce", "chat"),
        settings=Settings(chat_rate=4.0),
        normalised=("chat",),
    ),
    "assistants": Experiment(
        "Assistants with long system prompts on four engines: sustained rate",
        FOUR_ENGINES,
        (OURS, THROUGHPUT, "throughput_uncached"),
        sweeps={"applications": (4, 16, 64, 128), "output_tokens": (25, 50, 200)},
        quick={"output_tokens": (25,)},
        seeds=1,
        kinds=("assistant",),
        settings=Settings(applications=64, output_tokens=100),
        sustained=True,
    ),
    "assistants_parrot": Experiment(
        "Four of Parrot's assistants on four engines: sustained rate",
        FOUR_ENGINES,
        (OURS, THROUGHPUT, "throughput_uncached"),
        sweeps={"output_tokens": (PARROT_OUTPUT_TOKENS,)},
        quick={"output_tokens": (PARROT_OUTPUT_TOKENS,)},
        seeds=1,
        kinds=("assistant",),
        settings=Settings(applications=4),
        sustained=True,
    ),
}
"""By name. Parameters, the number of documents and of review rounds are Parrot's where it gives them (section 8)."""


class Workloads:
    """What the clients of a case do; the traces are read once."""

    def __init__(self, traces: Path) -> None:
        self._documents = Documents(traces)
        self._chat = Chat(traces)
        self._agents = read_lengths(traces)
        self._builders: dict[str, Callable[[Settings, int], Scenario]] = {
            "chain": self._chain,
            "background": self._chain,
            "background_parrot": self._chain,
            "chains": self._chain,
            "map_reduce": self._map_reduce,
            "multi_agent": self._multi_agent,
            "chat_mix": self._chat_mix,
            "latency_mix": self._latency_mix,
            "busy_mix": self._latency_mix,
        }

    def scenario(self, case: Case, seed: int, rate_per_s: float | None = None) -> Scenario:
        """One run's; `rate_per_s` where the experiment looks for the sustained one."""
        settings = _settings(case)
        if rate_per_s is None:
            return self._builders[case.experiment](settings, seed)
        least, most = SUSTAINED_CALLS
        calls = round(min(most, max(least, ARRIVALS_S * rate_per_s)))
        return assistants(
            settings.applications, calls, rate_per_s, mean_output_tokens=settings.output_tokens, seed=seed
        )

    def _chain(self, settings: Settings, seed: int) -> Scenario:
        vocabulary = Vocabulary()
        starts_s = CHAIN_STARTS_S if settings.background_rate else 0.0
        launches = [
            Launch(starts_s, "chain", self._chain_program(vocabulary, tokens, settings), Objective.LATENCY)
            for tokens in self._documents.draw(settings.applications, seed)
        ]
        if settings.background_rate:
            launches += self._chat.draw(
                vocabulary,
                "background",
                rate_per_s=settings.background_rate,
                duration_s=ARRIVALS_S if settings.background is None else STEADY_S,
                seed=seed,
                objective=None,
                lengths=None if settings.background is None else [settings.background],
            )
        return tuple(launches)

    @staticmethod
    def _chain_program(vocabulary: Vocabulary, document_tokens: int, settings: Settings) -> Program:
        return chain_summary(vocabulary, document_tokens, settings.chunk_tokens, settings.output_tokens)

    def _map_reduce(self, settings: Settings, seed: int) -> Scenario:
        program = map_reduce_summary(
            Vocabulary(), self._documents.draw(1, seed)[0], settings.chunk_tokens, settings.output_tokens
        )
        return (Launch(0.0, "map_reduce", program, Objective.LATENCY),)

    def _multi_agent(self, settings: Settings, _seed: int) -> Scenario:
        program = multi_agent(Vocabulary(), self._agents, settings.files)
        return (Launch(0.0, "multi_agent", program, Objective.LATENCY),)

    def _chat_mix(self, settings: Settings, seed: int) -> Scenario:
        """Chat wants latency, the summaries want throughput (Parrot, section 8.5)."""
        vocabulary, chance = Vocabulary(), random.Random(f"map-reduce-{seed}")
        launches = self._chat.draw(
            vocabulary, "chat", rate_per_s=CHAT_PER_S, duration_s=ARRIVALS_S, seed=seed, objective=Objective.LATENCY
        )
        at_s = 0.0
        for number in count():
            at_s += chance.expovariate(1.0) / settings.map_reduce_rate
            if at_s >= ARRIVALS_S:
                break
            tokens = self._documents.draw(1, seed * 1000 + number)[0]
            program = map_reduce_summary(vocabulary, tokens, settings.chunk_tokens, settings.output_tokens)
            launches.append(Launch(at_s, "map_reduce", program, Objective.THROUGHPUT))
        return tuple(launches)

    def _latency_mix(self, settings: Settings, seed: int) -> Scenario:
        """Chat is plain: nobody annotates it. The map-reduces are wanted soon."""
        vocabulary = Vocabulary()
        launches = self._chat.draw(
            vocabulary, "chat", rate_per_s=settings.chat_rate, duration_s=ARRIVALS_S, seed=seed, objective=None
        )
        own_tokens = OWN_TOKENS[settings.shared_tokens]
        for number in range(1, int(ARRIVALS_S / MAPS_EVERY_S)):
            program = shared_map_reduce(vocabulary, MAPS, settings.shared_tokens, own_tokens, MAP_OUTPUT_TOKENS)
            launches.append(Launch(number * MAPS_EVERY_S, "map_reduce", program, Objective.LATENCY))
        return tuple(launches)


def _settings(case: Case) -> Settings:
    default = EXPERIMENTS[case.experiment].settings
    given = getattr(default, case.parameter)
    return replace(default, **{case.parameter: type(given)(case.value)})
