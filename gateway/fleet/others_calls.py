"""The calls on one engine that other gateways have sent, as the engine reports them.

Gateways do not tell each other about their calls, because each engine knows all of its calls
(docs/design/residency.md). A reported call counts in the engine's queue and decodes, and its prefix is expected, as for
a booked call. It ends when the engine reports its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from plait.backends.protocol.cache_state import OutstandingCall
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.prefix.prefix_tree import Node, PrefixTree


@dataclass(slots=True)
class _Other:
    """A reported call: `prefill` until its prompt is computed; `leaf` while its blocks are expected."""

    gateway: str
    context_tokens: float
    prefill: Prefill | None
    leaf: Node | None
    is_line: bool = False

    def computed_at_s(self) -> float:
        """As `Booking.computed_at_s`; the report that says so has its blocks."""
        return -inf if self.leaf is None else inf


class OthersCalls:
    """The calls on the engine of `view` that the gateway `own` has not sent.

    `came` is called with the prompt tokens and the time of each new one.
    """

    def __init__(
        self, view: EngineView, tree: PrefixTree, block_tokens: int, own: str, came: Callable[[int, float], None]
    ) -> None:
        self._view = view
        self._tree = tree
        self._block_tokens = block_tokens
        self._own = own
        self._came = came
        self._calls: dict[int, _Other] = {}
        self._gateways: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._calls)

    def apply(
        self, calls: Collection[OutstandingCall], ended: Iterable[int], now_s: float, *, snapshot: bool, blocks: bool
    ) -> None:
        """Apply a report; a `snapshot` has all calls. `blocks`: the engine's block names are the gateway's."""
        if snapshot:
            named = {call.number for call in calls}
            ended = [number for number in self._calls if number not in named]
        for number in ended:
            self._end(number, now_s)
        for call in calls:
            if call.gateway == self._own:
                continue
            known = self._calls.get(call.number)
            if known is None:
                self._begin(call, now_s, call.hashes if blocks else ())
                self._came(call.prompt_tokens, now_s)
            elif call.is_computed:
                self._compute(known, now_s)

    def clear(self) -> None:
        """The engine no longer reports its calls, or has restarted."""
        for number in list(self._calls):
            self._end(number, self._view.queue.head_s)

    def _begin(self, call: OutstandingCall, now_s: float, hashes: Sequence[int]) -> None:
        view, costs, ends, hit = self._view, self._view.cost_model, self._view.residency.ends, None
        context_tokens = call.prompt_tokens + view.ledger.mean_output_tokens / 2
        prefill = leaf = None
        if not call.is_computed:
            missed_tokens = call.missed_tokens
            if hashes:
                leaf = self._tree.insert(hashes)
                leaf.use(now_s)
                hit = None if ends is None else ends.hit(leaf.segments(), call.prompt_tokens, sent=True)
                ready_tokens = view.residency.join(leaf) * self._block_tokens
                if hit is not None:  # the engine counts what full attention lacks
                    ready_tokens, missed_tokens = hit.tokens, call.prompt_tokens
                missed_tokens = max(1, min(missed_tokens, call.prompt_tokens - ready_tokens))  # not what others compute
            cached_tokens = call.prompt_tokens - missed_tokens
            attention_s = costs.added_s(missed_tokens, cached_tokens)[1]
            time_s = costs.prefill_time_s(missed_tokens, cached_tokens)
            if not call.is_line:
                prefill = Prefill(missed_tokens, time_s, attention_s, now_s, is_on_time=call.is_urgent, is_own=False)
        view.begin_reported(context_tokens, prefill, now_s, is_line=call.is_line)
        other = self._calls[call.number] = _Other(call.gateway, context_tokens, prefill, leaf, call.is_line)
        if ends is not None and leaf is not None and hit is not None:
            left = ends.rule.left_by(call.prompt_tokens, hit.leading_tokens)
            ends.expect(leaf, left, (), other.computed_at_s)
        self._gateways[call.gateway] += 1
        view.gateways = 1 + len(self._gateways)

    def _compute(self, known: _Other, now_s: float) -> None:
        """A call's prompt is computed, and the report has its blocks."""
        if known.prefill is not None:
            self._view.compute(known.prefill, now_s)
            known.prefill = None
        self._unbook(known)

    def _end(self, number: int, now_s: float) -> None:
        known = self._calls.pop(number, None)
        if known is not None:
            self._gateways[known.gateway] -= 1
            if not self._gateways[known.gateway]:
                del self._gateways[known.gateway]
            self._view.gateways = 1 + len(self._gateways)
            self._view.end_reported(known.context_tokens, known.prefill, now_s, is_line=known.is_line)
            self._unbook(known)

    def _unbook(self, known: _Other) -> None:
        if known.leaf is not None:
            self._view.residency.unbook(known.leaf)
            known.leaf = None
