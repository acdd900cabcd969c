"""The load of one engine: the work placed on it within the last H seconds, and the prompts that it has to compute.

The `LoadLedger` has the work, in seconds of engine time (docs/design/placement.md). The `PrefillQueue` has the prompts:
those that the engine was sent, and those that wait in the gateway. A streamed call waits until its first byte. Nothing
shows when another call's prefill ends, so it is taken as predicted: after the prefills that were sent before it and its
own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from plait.policy.costs.cost_model import CostModel
from plait.policy.prefix.prefix_tree import Node

DEFAULT_WINDOW_S = 180.0
"""H: three minutes. Preble (section 3.2) finds that the length of the window hardly matters."""

DEFAULT_PRIOR_OUTPUT_TOKENS = 128
"""Expected output while no call in the window has ended. It is between the means of Azure's code (28) and conversation
(211) traces.
"""


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """One call in the window. Its prompt ends at `leaf`, and `missed_tokens` of it are not cached, as was predicted.

    `prefill_s` is predicted first and replaced in `settle`.

    `queue_s` is the time from the booking to the first token, less the predicted prefill; None until it is known.
    """

    booked_s: float
    leaf: Node
    prompt_tokens: int
    missed_tokens: int
    prefill_s: float
    output_tokens: int | None = None
    queue_s: float | None = None


class LoadLedger:
    """One engine's calls in the window. The ledger keeps totals, so a cost takes O(1) and ageing amortised O(1).

    `mean_output_tokens` is the mean output length of the ended calls in the window; the prior if none has ended.
    """

    def __init__(
        self,
        cost_model: CostModel,
        window_s: float = DEFAULT_WINDOW_S,
        prior_output_tokens: float = DEFAULT_PRIOR_OUTPUT_TOKENS,
    ) -> None:
        self.window_s = window_s
        self._cost_model = cost_model
        self._prior_output_tokens = self.mean_output_tokens = float(prior_output_tokens)
        self._entries: OrderedDict[LedgerEntry, None] = OrderedDict()
        self._prefill_s = 0.0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._outputs = 0

    def __len__(self) -> int:
        """Calls in the window."""
        return len(self._entries)

    def __iter__(self) -> Iterator[LedgerEntry]:
        """The calls in the window, the oldest first."""
        return iter(self._entries)

    def __repr__(self) -> str:
        return f"LoadLedger(calls={len(self)}, prefill_s={self._prefill_s:.3f}, decode_s={self._decode_s():.3f})"

    def window_cost_s(self) -> float:
        """L: the prefills of all calls in the window, plus a decode of mean output length for each call."""
        return self._prefill_s + self._decode_s()

    def decode_ratio(self) -> float:
        """Decode's share of the window's cost; 0 if the window is empty."""
        total = self.window_cost_s()
        return self._decode_s() / total if total else 0.0

    def mean_decode_s(self) -> float:
        """The part of the window's cost that is one call's decode."""
        return self._decode_s() / len(self) if self._entries else 0.0

    def book(self, leaf: Node, missed_tokens: int, prompt_tokens: int, now_s: float) -> LedgerEntry:
        """Enter a call that was placed here. `missed_tokens` of its prompt are not cached."""
        cached_tokens = prompt_tokens - missed_tokens if prompt_tokens > missed_tokens else 0
        prefill_s = self._cost_model.prefill_time_s(missed_tokens, cached_tokens)
        entry = LedgerEntry(now_s, leaf, prompt_tokens, missed_tokens, prefill_s)
        self._entries[entry] = None
        self._prefill_s += entry.prefill_s
        self._prompt_tokens += prompt_tokens
        return entry

    def answered(self, entry: LedgerEntry, now_s: float) -> None:
        """The call has its first token."""
        entry.queue_s = max(0.0, now_s - entry.booked_s - entry.prefill_s)

    def settle(self, entry: LedgerEntry, missed_tokens: int, output_tokens: int) -> None:
        """Replace the prediction by the engine's token counts. No effect on an entry that has aged out."""
        if entry not in self._entries:
            return
        assert entry.output_tokens is None, "a call is settled once"
        self._prefill_s -= entry.prefill_s
        if missed_tokens != entry.missed_tokens:
            cached_tokens = max(0, entry.prompt_tokens - missed_tokens)
            entry.prefill_s = self._cost_model.prefill_time_s(missed_tokens, cached_tokens)
        self._prefill_s += entry.prefill_s
        entry.output_tokens = output_tokens
        self._output_tokens += output_tokens
        self._outputs += 1
        self.mean_output_tokens = self._output_tokens / self._outputs

    def cancel(self, entry: LedgerEntry) -> bool:
        """Remove a call that never ran. Returns False if its entry had aged out already."""
        if entry not in self._entries:
            return False
        self._drop(entry)
        return True

    def age(self, now_s: float) -> list[LedgerEntry]:
        """Drop the calls booked more than H ago, and return them."""
        aged: list[LedgerEntry] = []
        while self._entries:
            oldest = next(iter(self._entries))
            if oldest.booked_s >= now_s - self.window_s:
                break
            self._drop(oldest)
            aged.append(oldest)
        return aged

    def check(self) -> None:
        """Assert that the totals are the sums; for tests."""
        assert abs(self._prefill_s - sum(entry.prefill_s for entry in self._entries)) < 1e-6
        assert self._prompt_tokens == sum(entry.prompt_tokens for entry in self._entries)
        ended = [entry.output_tokens for entry in self._entries if entry.output_tokens is not None]
        assert (self._outputs, self._output_tokens) == (len(ended), sum(ended))

    def _drop(self, entry: LedgerEntry) -> None:
        del self._entries[entry]
        self._prefill_s = self._prefill_s - entry.prefill_s if self._entries else 0.0  # 0.0 drops rounding errors
        self._prompt_tokens -= entry.prompt_tokens
        if entry.output_tokens is not None:
            self._output_tokens -= entry.output_tokens
            self._outputs -= 1
            outputs, prior = self._outputs, self._prior_output_tokens
            self.mean_output_tokens = self._output_tokens / outputs if outputs else prior

    def _decode_s(self) -> float:
        calls = len(self._entries)
        if not calls:
            return 0.0
        return calls * self._cost_model.decode_time_s(self.mean_output_tokens, self._prompt_tokens / calls)


MOST_PROGRESS = 0.95
"""The part of its prefill that a prompt counts as computed at most while it has no first token."""


@dataclass(slots=True, eq=False)
class Prefill:
    """One call's prefill: uncached tokens, and the seconds that it takes alone. `attention_s` is a part of them.

    The engine was sent the call at `sent_s`. `is_urgent` says that the call has a TTFT, and `is_own` that this gateway
    has sent it.
    """

    tokens: int
    time_s: float
    attention_s: float
    sent_s: float
    is_streamed: bool = True
    is_urgent: bool = False
    is_own: bool = True


class PrefillQueue:
    """The waiting prefills of one engine. `tokens` and `attention_s` are their sums.

    `urgent_tokens` are those of urgent prefills. `held` counts the prefills of calls that wait in the gateway, and
    `sent` those that the engine was sent and has not computed. `sent_tokens` and `sent_attention_s` are the sums of the
    latter. The oldest of them has been computed since `head_s`. `expires_s` is when the next one ends without an event
    (infinite: none does).
    """

    __slots__ = (
        *("_held", "_own_time_s", "_sent", "_sent_time_s", "_whole"),
        *("attention_s", "expires_s", "head_s", "held", "sent", "sent_attention_s"),
        *("sent_tokens", "tokens", "urgent_tokens"),
    )

    def __init__(self) -> None:
        self.tokens = self.sent_tokens = 0
        self.urgent_tokens = 0
        self.attention_s = self.sent_attention_s = 0.0
        self._sent_time_s = self._own_time_s = 0.0
        self._held: dict[Prefill, None] = {}
        self._sent: dict[Prefill, None] = {}
        self._whole: deque[tuple[float, Prefill]] = deque()  # when the prefill of a call that is not streamed ends
        self.held = self.sent = 0
        self.head_s = 0.0
        self.expires_s = inf

    def __len__(self) -> int:
        """Prefills that wait, or are being computed."""
        return self.held + self.sent

    def add(self, prefill: Prefill) -> None:
        """A call was placed here. It waits in the gateway."""
        self._held[prefill] = None
        self.held += 1
        self.tokens += prefill.tokens
        self.urgent_tokens += prefill.tokens * prefill.is_urgent
        self.attention_s += prefill.attention_s

    def send(self, prefill: Prefill, now_s: float) -> None:
        """The engine was sent the call, which has waited, or was placed here just now."""
        tokens, time_s, attention_s = prefill.tokens, prefill.time_s, prefill.attention_s
        if prefill in self._held:
            del self._held[prefill]
            self.held -= 1
        else:
            self.tokens += tokens
            self.attention_s += attention_s
            if prefill.is_urgent:
                self.urgent_tokens += tokens
        if not self._sent:
            self.head_s = now_s
        prefill.sent_s = now_s
        self._sent[prefill] = None
        self.sent += 1
        self.sent_tokens += tokens
        self.sent_attention_s += attention_s
        self._sent_time_s += time_s
        if prefill.is_own:
            self._own_time_s += time_s
        if not prefill.is_streamed:
            self._whole.append((now_s + self._sent_time_s, prefill))
            self.expires_s = self._whole[0][0]

    def leave(self, prefill: Prefill, now_s: float) -> None:
        """A call does not wait any more: its prompt is computed, or it has ended; no effect if it did not wait."""
        if prefill in self._sent:
            if prefill is next(iter(self._sent)):
                self.head_s = now_s
            del self._sent[prefill]
            if not self._sent and not self._held:  # rounding ends with the last one
                self.sent = self.sent_tokens = self.tokens = self.urgent_tokens = 0
                self._sent_time_s = self._own_time_s = self.sent_attention_s = self.attention_s = 0.0
                self._whole.clear()
                self.expires_s = inf
                return
            self.sent -= 1
            self.sent_tokens -= prefill.tokens
            self.sent_attention_s -= prefill.attention_s
            self._sent_time_s -= prefill.time_s
            self._own_time_s -= prefill.time_s * prefill.is_own
            if self._whole:
                while self._whole and self._whole[0][1] not in self._sent:
                    self._whole.popleft()
                self.expires_s = self._whole[0][0] if self._whole else inf
        elif prefill in self._held:
            del self._held[prefill]
            self.held -= 1
        else:
            return
        self.tokens -= prefill.tokens
        self.urgent_tokens -= prefill.tokens * prefill.is_urgent
        self.attention_s -= prefill.attention_s
        if not self._sent:  # rounding ends with the calls
            self._sent_time_s = self._own_time_s = self.sent_attention_s = 0.0
            if not self._held:
                self.attention_s = 0.0

    def mark(self, prefill: Prefill, *, is_urgent: bool) -> None:
        """A call has got a TTFT, or lost it."""
        if prefill in self._sent or prefill in self._held:
            self.urgent_tokens += prefill.tokens * (is_urgent - prefill.is_urgent)
        prefill.is_urgent = is_urgent

    def expire(self, now_s: float) -> None:
        """Prefills of calls that are not streamed end as predicted. This comes before the sums are read at `now_s`."""
        while self.expires_s <= now_s:
            ended_s, prefill = self._whole[0]
            self.leave(prefill, ended_s)

    @property
    def own_share(self) -> float:
        """The part of what the engine was sent, by time, that this gateway has sent."""
        return self._own_time_s / self._sent_time_s if self._sent_time_s else 1.0

    @property
    def most_progress_s(self) -> float:
        """What `progress_s` is at most while nothing happens."""
        return MOST_PROGRESS * next(iter(self._sent)).time_s if self._sent else 0.0

    def progress_s(self, now_s: float) -> float:
        """How much of the oldest prefill that was sent has been computed, as seconds of it."""
        return min(now_s - self.head_s, self.most_progress_s)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for prefills, tokens, attention_s in (
            ([*self._held, *self._sent], self.tokens, self.attention_s),
            (list(self._sent), self.sent_tokens, self.sent_attention_s),
        ):
            assert tokens == sum(prefill.tokens for prefill in prefills)
            assert abs(attention_s - sum(prefill.attention_s for prefill in prefills)) < 1e-6 or not prefills
        assert (self.held, self.sent) == (len(self._held), len(self._sent))
        assert self.expires_s == (self._whole[0][0] if self._whole else inf)
        waiting = [*self._held, *self._sent]
        assert self.urgent_tokens == sum(prefill.tokens for prefill in waiting if prefill.is_urgent)
        assert abs(self._sent_time_s - sum(prefill.time_s for prefill in self._sent)) < 1e-6 or not self._sent
        assert abs(self._own_time_s - sum(prefill.time_s for prefill in self._sent if prefill.is_own)) < 1e-6
