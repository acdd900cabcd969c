"""Two engines with a sliding window in virtual time, and a gateway that knows more or less of where hits end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from plait.backends.adapter.prefix_search import shared_blocks
from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.windowed_blocks import WindowedBlocks
from plait.lab.simulation.compare import MODEL, Experiment, Workload, arrival_times, schedule
from plait.lab.simulation.simulate import CallRecord, SimulatedCall, Simulation
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS
from plait.policy.prefix.hit_ends import EndRule, Hit, HitEnds
from plait.policy.prefix.prefix_tree import Segment

ENGINES: Final = ("engine-0", "engine-1")

System = Literal["oracle", "reported", "ends ignored", "least outstanding"]
"""What a gateway knows of a call's hits: what the engines have and will have, asked of them when the call is placed;
what they report; their reports without ends, as a gateway from before ends; nothing that counts.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """The calls of a run. Without `rate_per_s`, all come at once."""

    asked: Experiment
    workload: Workload
    rate_per_s: float | None = None


class EndlessEngine(Engine):
    """An engine that reports all it has, and not where hits can end."""

    def cache_state(self, since: int | None = None, gateway: str | None = None) -> CacheState:
        return msgspec.structs.replace(super().cache_state(since, gateway), ends=None)


class AskedEngine(Engine):
    """An engine that can be asked for hits beforehand."""

    def hit_tokens(self, chain: HashChain, tokens: int) -> int:
        """How much a call with this prompt of so many tokens will hit, once the calls that are here are computed."""
        blocks, most_tokens = self._blocks, tokens - 1
        assert isinstance(blocks, WindowedBlocks)
        found = [blocks.ends.deepest(chain.hashes, most_tokens)]
        for call in (*self.running, *self.waiting):
            most_blocks = min(len(call.chain.hashes), most_tokens // blocks.block_tokens)
            shared = shared_blocks(chain.hashes, call.chain.hashes, most_blocks)
            found.append(blocks.end_of(call, shared * blocks.block_tokens))
        return max(found)


class AskedEnds(HitEnds):
    """The ends of one engine, which is asked for each hit. `chains` has the prompts' by `id` of their tokens."""

    def __init__(self, engine: AskedEngine, chains: Mapping[int, HashChain]) -> None:
        settings = engine.settings
        super().__init__(settings.name, EndRule(settings.block_tokens, 0, TREE_BLOCK_TOKENS))
        self._engine = engine
        self._chains = chains

    def hit(
        self, path: Sequence[Segment], prompt_tokens: int, tokens: Sequence[int] = (), *, sent: bool = False
    ) -> Hit:
        hit_tokens = self._engine.hit_tokens(self._chains[id(tokens)], prompt_tokens)
        return super().hit(path, prompt_tokens, tokens, sent=sent)._replace(tokens=hit_tokens)


class Run:
    """One system's run of a load."""

    def __init__(self, system: System, load: Load) -> None:
        self._load = load
        costs = load_profile(load.asked.profile).cost_model()
        kinds: dict[System, type[Engine]] = {"oracle": AskedEngine, "ends ignored": EndlessEngine}
        self._engines = {
            name: kinds.get(system, Engine)(
                EngineSettings(
                    name=name,
                    model=MODEL,
                    kv_tokens=load.workload.kv_tokens,
                    block_tokens=load.asked.block_tokens,
                    window_tokens=load.asked.window_tokens,
                ),
                costs,
            )
            for name in ENGINES
        }
        router = Router("least_outstanding" if system == "least outstanding" else "plait", gateway_id="gateway")
        chains = {id(prompt.ids): prompt.chain for prompt in load.workload.prompts}
        for name, engine in self._engines.items():
            router.add_engine(name, costs)
            if isinstance(engine, AskedEngine):
                router.engines[name].view.residency.ends = AskedEnds(engine, chains)
        self._simulation = Simulation(router, self._engines, MODEL)
        self._records: dict[int, CallRecord] = {}

    def __call__(self) -> list[CallRecord]:
        """The records of the calls, in the workload's order."""
        load = self._load
        times_s = arrival_times(load.asked, load.workload, load.rate_per_s)
        schedule(self._simulation, load.workload, times_s, self._send, thinks=load.rate_per_s is not None)
        self._simulation.run()
        return [self._records[number] for number in range(len(load.workload.calls))]

    def _send(self, number: int, now_s: float, on_ended: Callable[[object], None]) -> None:
        call, prompt = self._load.workload.calls[number], self._load.workload.prompts[number]
        simulated = SimulatedCall(now_s, prompt, call.max_tokens, call.prefix, session=call.session)
        self._records[number] = self._simulation.send(simulated, on_ended)
