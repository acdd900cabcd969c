"""An embedded engine in virtual time, as the profiler reaches engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.profiling.timed_stream import TimedStream
from plait.policy.costs.cost_model import CostModel
from plait.policy.prefix.block_hash import root_hash


class EmbeddedEngine:
    """Computes on a clock of its own, and nothing but computing takes time."""

    def __init__(self, settings: EngineSettings, costs: CostModel) -> None:
        self.engine = Engine(settings, costs)
        self.now_s = 5.0
        self._streams: dict[EmbeddedCall, TimedStream] = {}

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self.now_s

    async def check_idle(self) -> None:
        assert not self.engine.running

    async def complete(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        streams = {self._add(prompt, output_tokens): TimedStream(self.now_s, [], len(prompt)) for prompt in prompts}
        self._streams |= streams
        while any(call in self._streams for call in streams):
            self._advance()
            await asyncio.sleep(0)  # other calls can be sent at this moment
        return list(streams.values())

    def _advance(self) -> None:
        """Let the next iteration or load end."""
        ends_s = self.engine.step(self.now_s).ends_s
        assert ends_s is not None
        self.now_s = ends_s
        for output in self.engine.step(self.now_s).outputs:
            stream = self._streams[output.call]
            stream.arrivals.append((self.now_s, len(stream.arrivals) + 1))
            stream.cached_tokens = output.call.cached_tokens
            if output.finished:
                del self._streams[output.call]

    def _add(self, prompt: Sequence[int], output_tokens: int) -> EmbeddedCall:
        chain, tree = (HashChain(tokens, root_hash("m"), prompt) for tokens in (16, 64))
        call = EmbeddedCall(
            "c",
            self.now_s,
            len(prompt),
            chain=chain,
            tree_chain=tree,
            final_output_tokens=output_tokens,
            max_output_tokens=output_tokens,
        )
        self.engine.add(call)
        return call
