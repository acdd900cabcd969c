"""The load of one engine: the work placed on it within the last H seconds, in seconds of engine time.

See docs/design/placement.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

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
    """One call in the window."""

    booked_s: float
    leaf: Node
    """The tree node at which the prompt ends."""
    prompt_tokens: int
    missed_tokens: int
    """As predicted when the call was booked."""
    prefill_s: float
    """Predicted at first; `settle` replaces it."""
    output_tokens: int | None = None
    """None until the call ends."""
    queue_s: float | None = None
    """From the booking to the first token, less the predicted prefill; None until the first token."""


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
        return len(self._entries)

    def __iter__(self) -> Iterator[LedgerEntry]:
        """The calls in the window, the oldest first."""
        return iter(self._entries)

    def __repr__(self) -> str:
        return f"LoadLedger(calls={len(self)}, prefill_s={self._prefill_s:.3f}, decode_s={self.decode_s():.3f})"

    @property
    def prefill_share(self) -> float:
        """The part of the window that the prefills booked in it take."""
        return self._prefill_s / self.window_s

    @property
    def mean_call_tokens(self) -> float:
        """The mean prompt of the calls in the window and the mean output; 0 without calls."""
        return self._prompt_tokens / len(self._entries) + self.mean_output_tokens if self._entries else 0.0

    def window_cost_s(self) -> float:
        """L: the prefills of all calls in the window, plus a decode of mean output length for each call."""
        return self._prefill_s + self.decode_s()

    def decode_s(self) -> float:
        calls = len(self._entries)
        if not calls:
            return 0.0
        return calls * self._cost_model.decode_time_s(self.mean_output_tokens, self._prompt_tokens / calls)

    def book(self, leaf: Node, missed_tokens: int, prompt_tokens: int, now_s: float) -> LedgerEntry:
        cached_tokens = prompt_tokens - missed_tokens if prompt_tokens > missed_tokens else 0
        prefill_s = self._cost_model.prefill_time_s(missed_tokens, cached_tokens)
        entry = LedgerEntry(now_s, leaf, prompt_tokens, missed_tokens, prefill_s)
        self._entries[entry] = None
        self._prefill_s += entry.prefill_s
        self._prompt_tokens += prompt_tokens
        return entry

    def answered(self, entry: LedgerEntry, now_s: float) -> None:
        """The call's first token has arrived."""
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

    def _drop(self, entry: LedgerEntry) -> None:
        del self._entries[entry]
        self._prefill_s = self._prefill_s - entry.prefill_s if self._entries else 0.0  # 0.0 drops rounding errors
        self._prompt_tokens -= entry.prompt_tokens
        if entry.output_tokens is not None:
            self._output_tokens -= entry.output_tokens
            self._outputs -= 1
            outputs, prior = self._outputs, self._prior_output_tokens
            self.mean_output_tokens = self._output_tokens / outputs if outputs else prior
