"""Compares placement policies on equal engines. Each gets the same calls with shared prefixes: single, or in sessions.

The real router and the real engine cores run in virtual time. `plait demo --real-time` runs the calls on real servers.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, Final

import msgspec

from plait.backends.profiles import load_profile
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.prompt_encoder import EncodedPrompt, PartCache, PromptEncoder
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.placement_policy import placement_policy
from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.lockstep import Lockstep
from plait.lab.embedded.ranks import Ranks
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.rivals import KNOWN
from plait.lab.simulation.shared_prefixes import Kind, load_prefixes
from plait.lab.simulation.simulate import REPORT_INTERVAL_S, CallRecord, Prompt, SimulatedCall, Simulation
from plait.lab.simulation.workload import (
    WorkloadCall,
    generate_calls,
    generate_sessions,
    poisson_arrivals,
    select_working_set,
)
from plait.policy.costs.load import DEFAULT_WINDOW_S
from plait.policy.placement.policies import Policy
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, root_hash

MODEL = "demo"
OURS: Final = "plait"

WARM_UP: Final = 0.25
"""The share of a run's calls that fill the caches. These first calls are in no figure."""

CACHE_BYTES: Final = 256 * 2**20
"""The size of the encoder's prefix cache."""

COLD_S: Final = 2.0
"""A new gateway polls the engines for this long before it takes calls."""

Progress = Callable[[str, int, int], None]
"""Called with (label, steps done, all steps)."""

Send = Callable[[int, float, Callable[[object], None]], None]

BASELINE: Final = "least_outstanding"


def policy_of(name: str) -> Policy:
    """Return a policy of `KNOWN`, or the user's own. Raises ValueError for an unknown name."""
    return placement_policy(name, known=KNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The inputs of a comparison."""

    traces: Path | None = None
    """A folder of traces; None: the built-in prompts."""
    policies: tuple[str, ...] = (OURS, "least_outstanding", "session_hash", "smg", "llmd")
    calls: int = 2000
    seed: int = 1
    zipf: float = 1.1
    engines: int = 4
    ranks: int = 1
    """Each of the `engines` is a server of so many data-parallel ranks."""
    lockstep: bool = False
    """The ranks of a server step together."""
    balanced: bool = False
    """Gateways know the servers' addresses alone, and each server chooses the rank of a call."""
    profile: str = "a6000-mistral-7b"
    kv_tokens: int | None = None
    block_tokens: int = 16
    window_tokens: int = 0
    """The sliding window of some layers of the model; 0: none."""
    working_set: float = 1.5
    """The size of all shared prefixes together, in units of one engine's KV cache."""
    rate: float = 0.85
    """The arrival rate, in units of the saturation rate."""
    kinds: tuple[Kind, ...] = ("document", "tools")
    turns: int | None = None
    """The mean turns of a session; None: single calls."""
    scheduler: str = "slo"
    """The engines' local scheduler."""
    window_s: float = DEFAULT_WINDOW_S
    admission: bool = True
    """False: gateways do not queue calls, but send them as they arrive."""
    gateways: int = 1
    """Calls go to the gateways in turn."""
    report_interval_s: float = REPORT_INTERVAL_S
    report_delay_s: float = 0.0
    """Seconds from when an engine makes a report until it reaches the gateways."""
    blind: bool = False
    """Gateways ignore each other's calls in reports."""
    ends_by_reports: bool = False
    """Gateways see first tokens and ends of their own calls only with reports."""
    replaced_after: int | None = None
    """After this many calls, a gateway without any knowledge starts, and takes all calls `COLD_S` later."""

    def __post_init__(self) -> None:
        for policy in self.policies:
            policy_of(policy)


@dataclass(frozen=True, slots=True)
class Workload:
    """The calls of an experiment, as messages and as tokenized prompts. `kv_tokens` is the KV cache of each engine."""

    calls: Sequence[WorkloadCall]
    prompts: Sequence[Prompt]
    prefixes: int
    working_set_tokens: int
    kv_tokens: int

    def sessions(self) -> Iterator[Sequence[int]]:
        """The numbers of each session's calls. A call without a session is a session by itself."""

        def session(number: int) -> Hashable:
            return self.calls[number].session or number

        for _, numbers in groupby(range(len(self.calls)), session):
            yield tuple(numbers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy's figures."""

    policy: str
    calls: int
    prompt_tokens: int
    computed_tokens: int
    hit_rate: float
    """Weighted by tokens."""
    predicted_hit_rate: float
    misprediction: float
    """The sum over calls of |predicted - reported| cached tokens, over the sum of prompt tokens."""
    ttft_mean_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    calls_per_engine: dict[str, int]
    reasons: dict[str, int]


def prepare(experiment: Experiment, progress: Progress) -> Workload:
    """Choose the working set, draw the calls and tokenize their prompts. Raises ValueError for unusable traces."""
    encode = _Encoder()
    prefixes = [prefix for prefix in load_prefixes(experiment.traces) if prefix.kind in experiment.kinds]
    sizes = {prefix.name: len(encode(prefix.messages_for(""), prefix.tools)) for prefix in prefixes}
    kv_tokens = experiment.kv_tokens or min(
        load_profile(experiment.profile).kv.tokens, int(sum(sizes.values()) / experiment.working_set)
    )
    chosen = select_working_set(
        prefixes, lambda prefix: sizes[prefix.name], round(kv_tokens * experiment.working_set), experiment.seed
    )
    drawn = (chosen, experiment.calls, experiment.seed, experiment.zipf)
    calls = generate_calls(*drawn) if experiment.turns is None else generate_sessions(*drawn, experiment.turns)
    prompts = []
    for call in calls:
        ids = encode(call.messages, call.tools)
        prompts.append(_prompt(ids, experiment.block_tokens, ids if experiment.window_tokens else ()))
        progress("tokenizing", len(prompts), len(calls))
    return Workload(calls, prompts, len(chosen), sum(sizes[prefix.name] for prefix in chosen), kv_tokens)


def saturation_rate(
    experiment: Experiment, workload: Workload, progress: Progress, policy: str | Policy = "round_robin"
) -> float:
    """The calls/s that a policy completes if all sessions begin at once, with think times of 0."""
    records = simulate(experiment, workload, policy, None, progress)
    return len(records) / max(record.finished_s for record in records)


def simulate(
    experiment: Experiment, workload: Workload, policy: str | Policy, rate_per_s: float | None, progress: Progress
) -> list[CallRecord]:
    """Run the workload in virtual time; returns the records in the order of its calls.

    Sessions begin at Poisson times, so that on average `rate_per_s` calls arrive; None: all at once.
    """
    title = (policy_of(policy) if isinstance(policy, str) else policy).title
    label = f"{title}, {rate_per_s:.1f} calls/s" if rate_per_s else f"{title}, all at once"
    fleet = _Fleet(experiment, workload, policy)
    engines, lockstep = fleet.engines()
    router, *more = (fleet.router(number) for number in range(experiment.gateways))
    simulation = Simulation(
        router,
        engines,
        MODEL,
        lockstep=lockstep,
        more=more,
        report_interval_s=experiment.report_interval_s,
        report_delay_s=experiment.report_delay_s,
        ends_by_reports=experiment.ends_by_reports,
        ahead_s=AHEAD_S if experiment.admission else inf,
        progress=lambda finished: progress(label, finished, len(workload.calls)),
    )
    records: dict[int, CallRecord] = {}

    def send(number: int, now_s: float, on_ended: Callable[[object], None]) -> None:
        call = workload.calls[number]
        simulated = SimulatedCall(now_s, workload.prompts[number], call.max_tokens, call.prefix, session=call.session)
        records[number] = simulation.send(simulated, on_ended)
        if len(records) == experiment.replaced_after:
            simulation.replace(fleet.router(experiment.gateways), now_s + COLD_S)

    schedule(simulation, workload, arrival_times(experiment, workload, rate_per_s), send, thinks=bool(rate_per_s))
    simulation.run()
    return [records[number] for number in range(len(workload.calls))]


def schedule(simulation: Simulation, workload: Workload, times_s: list[float], send: Send, *, thinks: bool) -> None:
    """Let sessions begin at their times. `send` gets a call's number, the time, and what to call at the call's end."""

    def turn(numbers: Sequence[int], now_s: float) -> None:
        send(numbers[0], now_s, partial(go_on, numbers[1:]))

    def go_on(later: Sequence[int], _ended: object) -> None:
        if later:
            think_s = workload.calls[later[0]].think_s if thinks else 0.0
            simulation.at(simulation.now_s + think_s, partial(turn, later))

    for begins_s, numbers in zip(times_s, workload.sessions(), strict=True):
        simulation.at(begins_s, partial(turn, numbers))


def arrival_times(experiment: Experiment, workload: Workload, rate_per_s: float | None) -> list[float]:
    """Seconds from the start at which each session begins."""
    sessions, calls = sum(1 for _ in workload.sessions()), len(workload.calls)
    if rate_per_s is None:
        return [0.0] * sessions
    return poisson_arrivals(sessions, rate_per_s * sessions / calls, experiment.seed)


def summarise(policy: str, records: Sequence[CallRecord]) -> Outcome:
    prompt_tokens = sum(record.prompt_tokens for record in records)
    computed = sum(record.computed_tokens for record in records)
    wrong = sum(abs(record.predicted_cached_tokens - record.cached_tokens) for record in records)
    ttft, e2e = [record.ttft_s for record in records], [record.e2e_s for record in records]
    return Outcome(
        policy=policy,
        calls=len(records),
        prompt_tokens=prompt_tokens,
        computed_tokens=computed,
        hit_rate=1 - computed / prompt_tokens,
        predicted_hit_rate=sum(record.predicted_cached_tokens for record in records) / prompt_tokens,
        misprediction=wrong / prompt_tokens,
        ttft_mean_s=statistics.fmean(ttft),
        ttft_p99_s=percentile(ttft, 0.99),
        e2e_mean_s=statistics.fmean(e2e),
        e2e_p99_s=percentile(e2e, 0.99),
        calls_per_engine=dict(sorted(Counter(record.engine_id for record in records).items())),
        reasons=dict(sorted(Counter(str(record.reason) for record in records).items())),
    )


def after_warm_up(records: Sequence[CallRecord]) -> Sequence[CallRecord]:
    return records[round(WARM_UP * len(records)) :]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(round(len(ordered) * share, 6))) - 1]


@dataclass(frozen=True, slots=True)
class _Fleet:
    """Makes the gateways' routers and the engines."""

    experiment: Experiment
    workload: Workload
    policy: str | Policy

    def router(self, number: int) -> Router:
        """The router of a gateway. Blind gateways share one id, and a report leaves out calls of the asking id."""
        experiment, cost_model = self.experiment, load_profile(self.experiment.profile).cost_model()
        gateway_id = "gateway" if experiment.blind else f"gateway-{number}"
        policy = policy_of(self.policy) if isinstance(self.policy, str) else self.policy
        router = Router(policy, window_s=experiment.window_s, gateway_id=gateway_id)
        for address, ranks in self._ranks().items():
            for engine_id in [address] if experiment.balanced else ranks:
                router.add_engine(engine_id, cost_model, kv_tokens=self.workload.kv_tokens, address=address)
        return router

    def engines(self) -> tuple[dict[str, Engine | Ranks], list[Lockstep]]:
        """The engines as the gateways know them, and those that step together."""
        known: dict[str, Engine | Ranks] = {}
        lockstep: list[Lockstep] = []
        for address, engine_ids in self._ranks().items():
            ranks = {engine_id: self._engine(engine_id) for engine_id in engine_ids}
            known |= {address: Ranks([*ranks.values()])} if self.experiment.balanced else ranks
            lockstep += [Lockstep([*ranks.values()])] if self.experiment.lockstep else []
        return known, lockstep

    def _engine(self, engine_id: str) -> Engine:
        settings = EngineSettings(
            name=engine_id,
            model=MODEL,
            kv_tokens=self.workload.kv_tokens,
            block_tokens=self.experiment.block_tokens,
            window_tokens=self.experiment.window_tokens,
            scheduler=self.experiment.scheduler,
        )
        profile = load_profile(self.experiment.profile)
        if profile.ahead is not None:
            settings = replace(settings, ahead=profile.ahead)
        return Engine(settings, profile.cost_model())

    def _ranks(self) -> dict[str, list[str]]:
        """The names of each address's ranks."""
        names = [""] if self.experiment.ranks == 1 else [f"@{rank}" for rank in range(self.experiment.ranks)]
        return {one: [one + name for name in names] for one in map("engine-{}".format, range(self.experiment.engines))}


class _Encoder:
    """Encodes chats, with a cache of encoded prefixes."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer("embedded")
        self._root = root_hash(MODEL)
        self._encoder = PromptEncoder(self._tokenizer, TREE_BLOCK_TOKENS, PartCache(CACHE_BYTES))

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> array[int]:
        text = self._tokenizer.render_chat(messages, tools=tools or None)
        steps = self._encoder.steps(text, MODEL, self._root, add_special_tokens=False)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                prompt: EncodedPrompt = end.value
                return prompt.ids


def _prompt(tokens: Sequence[int], block_tokens: int, kept: Sequence[int]) -> Prompt:
    root = root_hash(MODEL)
    chain = HashChain(block_tokens, root, tokens)
    tree_chain = chain if block_tokens == TREE_BLOCK_TOKENS else HashChain(TREE_BLOCK_TOKENS, root, tokens)
    return Prompt(len(tokens), chain, tree_chain, kept)


COLUMNS: Final[Mapping[str, Callable[[Outcome], str]]] = {
    "hit rate": lambda o: f"{o.hit_rate:.1%}",
    "TTFT mean": lambda o: f"{o.ttft_mean_s:.3f} s",
    "TTFT p99": lambda o: f"{o.ttft_p99_s:.2f} s",
    "E2E mean": lambda o: f"{o.e2e_mean_s:.3f} s",
    "E2E p99": lambda o: f"{o.e2e_p99_s:.2f} s",
    "busiest": lambda o: f"{max(o.calls_per_engine.values()) / o.calls:.0%}",
}
"""The columns of the text table, whose rows are policies. `busiest` is the largest share of calls of one engine."""

MARKDOWN_ROWS: Final[Mapping[str, Callable[[Outcome], str]]] = {
    "TTFT, mean / p99": lambda o: f"{o.ttft_mean_s:.2f} s / {o.ttft_p99_s:.1f} s",
    "E2E, mean": lambda o: f"{o.e2e_mean_s:.2f} s",
    "prompt tokens recomputed": lambda o: f"{1 - o.hit_rate:.1%}",
}
"""The rows of the Markdown table, whose columns are policies."""


@dataclass(frozen=True, slots=True)
class Report:
    experiment: Experiment
    workload: Workload
    saturation_per_s: float
    outcomes: tuple[Outcome, ...]
    real_time: bool

    def claims(self) -> Iterator[Claim]:
        """Figures of the default policy with their targets, most of them relative to another policy of the run."""
        by_policy = {outcome.policy: outcome for outcome in self.outcomes}
        ours, base = by_policy.pop(OURS, None), by_policy.get(BASELINE)
        if ours is None:
            return
        if base is not None:
            title, computed = KNOWN[BASELINE].title, ours.computed_tokens / base.computed_tokens
            yield Claim(f"prompt tokens recomputed, {OURS} / {title}", computed, most=0.5)
            gain = base.e2e_mean_s / ours.e2e_mean_s
            yield Claim(f"mean E2E, {title} / {OURS}", gain, least=2)
        if by_policy:
            gain = min(other.e2e_mean_s for other in by_policy.values()) / ours.e2e_mean_s
            yield Claim(f"mean E2E, the best other / {OURS}", gain, least=0.97)
        wrong = ours.misprediction
        yield Claim(f"{OURS}: |predicted - reported cached tokens| / prompt tokens", wrong, most=0.02)

    def json(self) -> bytes:
        experiment = {**asdict(self.experiment), "traces": str(self.experiment.traces or "built-in")}
        report = {
            "plait": version("plait"),
            "real_time": self.real_time,
            "experiment": experiment,
            "kv_tokens": self.workload.kv_tokens,
            "working_set_tokens": self.workload.working_set_tokens,
            "shared_prefixes": self.workload.prefixes,
            "saturation_per_s": self.saturation_per_s,
            "rate_per_s": self.experiment.rate * self.saturation_per_s,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "claims": [claim.json() for claim in self.claims()],
        }
        return msgspec.json.format(msgspec.json.encode(report))

    def text(self) -> str:
        """The table, with the inputs above it and the claims below; at most 100 columns."""
        e, w = self.experiment, self.workload
        source = "ToolBench's tool lists and LooGLE's documents" if e.traces else "manuals and tool lists"
        sessions = sum(1 for _ in w.sessions())
        head = (
            f"{e.calls} calls in {sessions} sessions on {w.prefixes} {source}, Zipf {e.zipf}, seed {e.seed}\n"
            f"{e.engines} engines, {e.profile}, {w.kv_tokens:,} KV tokens each; the shared prefixes have "
            f"{w.working_set_tokens:,}\n"
            f"{e.rate * self.saturation_per_s:.1f} calls/s come, {e.rate:g} of what {OURS} completes if all come at "
            f"once; {'real servers' if self.real_time else 'virtual time'}\n"
            f"the first {WARM_UP:.0%} of the calls fill the caches and do not count\n"
        )
        claims = [str(claim) for claim in self.claims()]
        return "\n".join((head, *_table(self.outcomes), "", *claims))

    def markdown(self) -> str:
        titles = [policy_of(outcome.policy).title for outcome in self.outcomes]
        rows = [("", *titles), ("---",) * (1 + len(titles))]
        rows += [(label, *map(show, self.outcomes)) for label, show in MARKDOWN_ROWS.items()]
        return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    cells = [["", *COLUMNS]]
    cells += [[policy_of(outcome.policy).title, *(show(outcome) for show in COLUMNS.values())] for outcome in outcomes]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        yield row[0].ljust(widths[0]) + "".join(
            f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)
        )
