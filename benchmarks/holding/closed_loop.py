"""Sessions of agents in a closed loop, in virtual time: the next one begins when one has ended."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from statistics import fmean

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.filling.workloads import EMPTY, extended
from benchmarks.placing.rivals import RIVALS
from benchmarks.placing.workloads import AgentShape, Turn, agents
from plait.gateway.admission.admission import caches
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.sections import AdmissionConfig
from plait.lab.simulation.compare import percentile
from plait.lab.simulation.simulate import CallRecord, Ended, SimulatedCall, Simulation
from plait.policy.placement.policies import Policy
from plait.policy.sessions.session_gate import CHAT_TOKENS
from plait.policy.sessions.worth import Caches

STARTS_S = 60.0
"""The first sessions begin within this time."""

CHAT = "chat"
FIRST_CHAT_ID = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Calls without a session that come beside, each with a new prompt."""

    per_s: float = 0.5
    prompt_tokens: int = 3_000
    answer_tokens: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """So many `sessions`, of which some are there `at_a_time`, on engines of `kv_tokens` each.

    `thinks_s`: the sessions think so long, evenly between the two, instead of what the trace has. Clients name their
    sessions if they are `named`. Of every so many sessions, one is of another tenant (`other_tenant`, 0: none), which
    the gate knows if it `is_fair`. It is told so many times the capacity (`told`). So many `gateways` hear of each
    other's calls from the engines, and each has a part of the capacity for its sessions. The engines have so many times
    their KV in `host` memory.
    """

    engines: int
    kv_tokens: int
    sessions: int
    at_a_time: int
    shape: AgentShape
    profile: str = "h100-llama-70b-tp2"
    thinks_s: tuple[float, float] | None = None
    named: bool = True
    other_tenant: int = 0
    is_fair: bool = False
    chat: Chat | None = None
    told: float = 1.0
    gateways: int = 1
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. Seconds are of whole sessions, by their number, and `ttfts_s` those of chat.

    `refused` calls came again, and count in their sessions. `paused` and `expired` count the gate's. The turn that
    waited longest was sent after `longest_held_s`, and of those of the other tenant, if the gate knows it, after
    `other_longest_wait_s`.
    """

    sessions_s: list[float]
    tenants: list[str]
    hit_rate: float
    tpot_s: float
    ttfts_s: list[float]
    refused: int
    paused: int
    expired: int
    longest_held_s: float
    other_longest_wait_s: float

    @property
    def mean_s(self) -> float:
        """Of all sessions."""
        return fmean(self.sessions_s)

    @property
    def other_mean_s(self) -> float:
        """Of the other tenant's sessions."""
        return fmean(took_s for took_s, tenant in zip(self.sessions_s, self.tenants, strict=True) if tenant)

    @property
    def ttft_s(self) -> float:
        """The mean of chat."""
        return fmean(self.ttfts_s)

    @property
    def p99_s(self) -> float:
        """Of all sessions."""
        return percentile(self.sessions_s, 0.99)


class ClosedLoop:
    """One run of a condition: with the gateway's `gate` for sessions or without, or with a `cap` before the gateway.

    A cap is what programs are scheduled by elsewhere: the next session begins once its context fits into the engines'
    KV beside those of the sessions that are there. A session counts with its mean context, which is known beforehand.
    """

    def __init__(
        self,
        traces: Path,
        condition: Condition,
        seed: int,
        *,
        policy: str = "plait",
        gate: bool = True,
        cap: bool = False,
    ):
        self._condition = condition
        fleet = FleetSize(
            engines=condition.engines,
            profile=condition.profile,
            kv_tokens=condition.kv_tokens,
            gateways=condition.gateways,
            host=condition.host,
        )
        chosen: str | Policy = RIVALS.get(policy, policy)
        max_wait_s = AdmissionConfig().max_wait_s
        self._router, self._simulation = simulated(fleet, chosen, AHEAD_S, max_wait_s, CHAT_TOKENS if gate else inf)
        self._seed = seed
        self._coming = enumerate(islice(agents(traces, seed, condition.shape), condition.sessions))
        self._dice = random.Random(f"thinks {seed}")
        self._room_tokens = condition.engines * condition.kv_tokens if cap else inf
        self._outside: deque[tuple[int, float, Sequence[Turn]]] = deque()
        self._contexts: dict[int, float] = {}
        """Of the sessions that are there, by number."""
        self._took_s: dict[int, float] = {}
        self._chats: list[CallRecord] = []

    def run(self) -> Outcome:
        """Run until all sessions have ended."""
        condition, simulation = self._condition, self._simulation
        if condition.told != 1.0:
            _tell(simulation, condition.told)
        for slot in range(condition.at_a_time):
            simulation.at(slot * STARTS_S / condition.at_a_time, self._begin)
        if condition.chat is not None:
            simulation.at(0.0, partial(self._chat, condition.chat, 0, random.Random(f"chat {self._seed}")))
        simulation.run()
        return self._outcome()

    def _begin(self, now_s: float) -> None:
        number, turns = next(self._coming, (0, ()))
        if turns:
            self._outside.append((number, now_s, turns))
        self._let_in()

    def _let_in(self) -> None:
        """Let the sessions that are outside begin, in their order, as far as the cap goes. One runs in any case."""
        while self._outside:
            number, began_s, turns = self._outside[0]
            context = fmean(turn.call.prompt.tokens for turn in turns)
            if self._contexts and sum(self._contexts.values()) + context > self._room_tokens:
                return
            self._outside.popleft()
            self._contexts[number] = context
            self._go_on(number, began_s, turns)

    def _go_on(self, number: int, began_s: float, turns: Sequence[Turn], ended: CallRecord | None = None) -> None:
        simulation = self._simulation
        if not turns:
            self._took_s[number] = simulation.now_s - began_s
            del self._contexts[number]
            self._begin(simulation.now_s)
            return
        first, *rest = turns
        thinks_s = self._condition.thinks_s
        think_s = first.think_s if thinks_s is None else self._dice.uniform(*thinks_s)
        when_s = simulation.now_s + (0.0 if ended is None else think_s)
        simulation.at(
            when_s, partial(self._send, self._named(number, first.call), partial(self._go_on, number, began_s, rest))
        )

    def _named(self, number: int, call: SimulatedCall) -> SimulatedCall:
        condition = self._condition
        named = replace(call, session=f"session {number}") if condition.named else call
        return replace(named, tenant=_tenant(condition, number) if condition.is_fair else "")

    def _send(self, call: SimulatedCall, on_ended: Ended, now_s: float) -> None:
        def again(refused: CallRecord) -> None:
            back_s = refused.finished_s + max(1.0, refused.retry_after_s)
            self._simulation.at(back_s, partial(self._send, call, on_ended))

        self._simulation.send(replace(call, arrives_s=now_s), on_ended, again)

    def _chat(self, chat: Chat, number: int, dice: random.Random, now_s: float) -> None:
        """One chat now, and the next one later, while sessions go on."""
        prompt = extended(EMPTY, FIRST_CHAT_ID + number, chat.prompt_tokens)
        call = SimulatedCall(now_s, prompt, chat.answer_tokens, prefix=CHAT)
        self._simulation.send(call, self._chats.append, lambda _refused: None)
        if len(self._took_s) < self._condition.sessions:
            next_s = now_s + dice.expovariate(chat.per_s)
            self._simulation.at(next_s, partial(self._chat, chat, number + 1, dice))

    def _outcome(self) -> Outcome:
        simulation = self._simulation
        turns = [record for record in simulation.records if record.prefix != CHAT]
        decoded = [record for record in turns if record.output_tokens > 1]
        gates = [gate for each in simulation.admissions for gate in each.sessions.gates.values()]
        return Outcome(
            sessions_s=[self._took_s[number] for number in sorted(self._took_s)],
            tenants=[_tenant(self._condition, number) for number in sorted(self._took_s)],
            hit_rate=sum(one.cached_tokens for one in turns) / sum(one.prompt_tokens for one in turns),
            tpot_s=fmean((one.finished_s - one.first_token_s) / (one.output_tokens - 1) for one in decoded),
            ttfts_s=[record.ttft_s for record in self._chats],
            refused=len(simulation.refused),
            paused=sum(gate.paused for gate in gates),
            expired=sum(gate.expired for gate in gates),
            longest_held_s=max(map(_waited_s, turns)),
            other_longest_wait_s=max((_waited_s(record) for record in turns if record.tenant), default=0.0),
        )


def _waited_s(record: CallRecord) -> float:
    return record.sent_s - record.arrived_s


def _tenant(condition: Condition, number: int) -> str:
    return "other" if condition.other_tenant and number % condition.other_tenant == 0 else ""


def _tell(simulation: Simulation, share: float) -> None:
    """The gates are told another capacity than the engines have."""
    (admission,) = simulation.admissions
    admission.sessions.caches = lambda router, model: _scaled(caches(router, model), share)


def _scaled(found: Caches | None, share: float) -> Caches | None:
    return None if found is None else found._replace(kv_tokens=round(share * found.kv_tokens))
