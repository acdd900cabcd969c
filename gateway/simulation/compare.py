"""`plait demo --compare`: the same shared-prefix calls through several policies, on equal engines.

By default, the real router and the real engine cores run in virtual time. `live` sends the calls to real servers.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from plait.backends.embedded.engine import Engine, EngineSettings
from plait.backends.profiles import load_profile
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.fleet.router import Router
from plait.gateway.simulation.simulate import Simulation
from plait.gateway.simulation.simulated_call import CallRecord, Prompt, SimulatedCall
from plait.gateway.simulation.workload import (
    Kind,
    SharedPrefix,
    WorkloadCall,
    generate_calls,
    load_prefixes,
    poisson_arrivals,
    select_working_set,
)
from plait.policy.placement.load import DEFAULT_WINDOW_S
from plait.policy.placement.policies import POLICIES
from plait.policy.placement.situation import Policy
from plait.policy.prefix.block_hash import HashChain, root_hash, tree_block_tokens

MODEL = "demo"

Progress = Callable[[str, int, int], None]
"""Called with a label, how much is done, and how much there is in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The inputs. `working_set` is in units of one engine's KV cache, `rate` in units of round robin's saturation.

    `kinds` of prompts are asked. Without `admission`, calls are sent as they arrive. `scheduler` names the engines'
    local scheduler. `window_s` is the router's.
    """

    traces: Path | None = None
    policies: tuple[str, ...] = ("round_robin", "e2", "plait")
    calls: int = 6000
    seed: int = 1
    zipf: float = 1.1
    engines: int = 4
    profile: str = "a6000-mistral-7b"
    kv_tokens: int | None = None
    block_tokens: int = 16
    working_set: float = 1.5
    rate: float = 0.9
    kinds: tuple[Kind, ...] = ("document", "tools")
    scheduler: str = "slo"
    window_s: float = DEFAULT_WINDOW_S
    admission: bool = True

    def __post_init__(self) -> None:
        unknown = [policy for policy in self.policies if policy not in POLICIES]
        if unknown:
            raise ValueError(f"unknown placement policy {unknown[0]!r}; expected any of {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class Workload:
    """The calls of an experiment, as messages and as tokenized prompts. `kv_tokens` is the KV cache of each engine."""

    calls: Sequence[WorkloadCall]
    prompts: Sequence[Prompt]
    prefixes: int
    working_set_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy's figures: tokens, token-weighted hit rate, times in seconds, and how well the cache was predicted.

    `misprediction` is the sum over calls of |predicted - reported| cached tokens, over the sum of prompt tokens.
    """

    policy: str
    calls: int
    prompt_tokens: int
    computed_tokens: int
    hit_rate: float
    predicted_hit_rate: float
    misprediction: float
    ttft_mean_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    calls_per_engine: dict[str, int]
    reasons: dict[str, int]


def prepare(experiment: Experiment, progress: Progress) -> Workload:
    """Choose the working set, draw the calls, tokenize their prompts. Raises ValueError for unusable traces."""
    tokenizer = load_tokenizer("embedded")
    prefixes = [prefix for prefix in load_prefixes(experiment.traces) if prefix.kind in experiment.kinds]
    sizes = {prefix.name: len(_encode(tokenizer, prefix)) for prefix in prefixes}
    kv_tokens = experiment.kv_tokens or min(
        load_profile(experiment.profile).kv.tokens, int(sum(sizes.values()) / experiment.working_set)
    )
    chosen = select_working_set(
        prefixes, lambda prefix: sizes[prefix.name], round(kv_tokens * experiment.working_set), experiment.seed
    )
    calls = generate_calls(chosen, experiment.calls, experiment.seed, experiment.zipf)
    prompts = []
    for call in calls:
        prompts.append(_prompt(tokenizer.encode_chat(call.messages, tools=call.tools), experiment.block_tokens))
        progress("tokenizing", len(prompts), len(calls))
    return Workload(calls, prompts, len(chosen), sum(sizes[prefix.name] for prefix in chosen), kv_tokens)


def saturation_rate(experiment: Experiment, workload: Workload, progress: Progress) -> float:
    """The calls/s that round robin completes if all calls arrive at the start."""
    records = simulate(experiment, workload, "round_robin", None, progress)
    return len(records) / max(record.finished_s for record in records)


def simulate(
    experiment: Experiment, workload: Workload, policy: str | Policy, rate_per_s: float | None, progress: Progress
) -> list[CallRecord]:
    """Run the workload in virtual time. Calls arrive at a Poisson rate; None: all at once."""
    profile = load_profile(experiment.profile)
    router = Router(policy, block_tokens=tree_block_tokens(experiment.block_tokens), window_s=experiment.window_s)
    engines = {}
    for number in range(experiment.engines):
        engine_id = f"engine-{number}"
        router.add_engine(engine_id, profile.cost_model(), kv_tokens=workload.kv_tokens)
        settings = EngineSettings(
            name=engine_id,
            model=MODEL,
            kv_tokens=workload.kv_tokens,
            block_tokens=experiment.block_tokens,
            scheduler=experiment.scheduler,
        )
        engines[engine_id] = Engine(settings, profile.cost_model())
    name = policy if isinstance(policy, str) else "policy"
    label = f"{name} at {rate_per_s:.2f}/s" if rate_per_s else f"{name}, saturated"
    simulation = Simulation(
        router,
        engines,
        MODEL,
        ahead_s=AHEAD_S if experiment.admission else inf,
        progress=lambda finished: progress(label, finished, len(workload.calls)),
    )
    arrivals = arrival_times(experiment, rate_per_s)
    return simulation.run(
        [
            SimulatedCall(arrives_s, prompt, call.max_tokens, call.prefix)
            for arrives_s, prompt, call in zip(arrivals, workload.prompts, workload.calls, strict=True)
        ]
    )


def arrival_times(experiment: Experiment, rate_per_s: float | None) -> list[float]:
    """Seconds from the start at which each call arrives."""
    if rate_per_s is None:
        return [0.0] * experiment.calls
    return poisson_arrivals(experiment.calls, rate_per_s, experiment.seed)


def summarise(policy: str, records: Sequence[CallRecord]) -> Outcome:
    """The figures of one run."""
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
        reasons=dict(sorted(Counter(record.reason.value for record in records).items())),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(round(len(ordered) * share, 6))) - 1]


def _encode(tokenizer: Tokenizer, prefix: SharedPrefix) -> list[int]:
    return tokenizer.encode_chat(prefix.messages_for(""), tools=list(prefix.tools) or None)


def _prompt(tokens: Sequence[int], block_tokens: int) -> Prompt:
    root = root_hash(MODEL)
    chain = HashChain(block_tokens, root, tokens)
    granularity = tree_block_tokens(block_tokens)
    tree_chain = chain if granularity == block_tokens else HashChain(granularity, root, tokens)
    return Prompt(len(tokens), chain, tree_chain)
