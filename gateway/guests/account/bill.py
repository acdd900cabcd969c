"""One call's part in prices, budgets and the limits of its key, from its arrival to its end.

A stream reserves its prompt and `FIRST_TOKENS` of each choice, and as many again while it goes on; if nothing is left,
it ends with an error event, and its engine's call is aborted. What an answer that is not streamed uses is known at its
end only, so such a call reserves the longest answer that it may have, and its limit is cut to what it could reserve.
Without a limit of its own it reserves `USUAL_TOKENS`, unless the budget is near its end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

import msgspec

from plait.backends.errors import CallerError, PlaitError
from plait.backends.http.body import Body
from plait.backends.protocol.dialects import DIALECTS
from plait.gateway.admission.tenants import TenantLimits, TenantUse
from plait.gateway.answers.event_bytes import events_of
from plait.gateway.asgi import Headers, Sink, Stage
from plait.gateway.calls.delivery import Companion, Delivery
from plait.gateway.calls.gate import EXPECTED_OUTPUT_TOKENS
from plait.gateway.calls.outgoing import FIELDS
from plait.gateway.calls.routes import CHAT_PATH, KINDS
from plait.gateway.fleet.router import Router
from plait.gateway.guests.account.budgets import Purse, Reserve
from plait.gateway.guests.account.prices import UNIT, Price, Used, used_by
from plait.gateway.timer import loop_time_s

FIRST_TOKENS: Final = 64
USUAL_TOKENS: Final = 4096
"""Of an answer without a limit: hardly any is longer. Also the longest one where the model's context is not known."""

FAR: Final = 8
"""A budget is far from its end while so many of a call's longest answers are left."""

CAPPED: Final = (b"plait-budget", b"capped")

LIMIT_FIELDS: Final = {
    CHAT_PATH: "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
"""By route: the field that limits an answer. A chat may have `max_completion_tokens` in its place."""

_USAGE: Final = re.compile(rb',\s?"usage":\s?\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_NO_CHOICES: Final = re.compile(rb'"choices":\s?\[\]')


class ModelNotAllowedError(CallerError, status=403, kind="permission_error", code="model_not_allowed", quotes=False):
    """The API key may not call the model."""


class KeyTerms(NamedTuple):
    """What a key may do: these models (none: all), and as much at a time."""

    models: frozenset[str]
    limits: TenantLimits
    use: TenantUse

    def check(self, model: str, tokens: int) -> None:
        """Raise `PlaitError` for a call that the key may not make, or not now; else count it."""
        if self.models and model not in self.models:
            raise ModelNotAllowedError(f"This API key may not call the model '{model}'.", param="model")
        self.use.check_rate(self.limits, tokens, loop_time_s(), whose="API key")
        if self.limits.has_rates:
            self.use.enter(tokens)


def cost_of(delivery: Delivery, price: Price) -> int:
    """The cost of a call that has ended, or of a whole answer, in 1e-9 of the currency."""
    used = used_of(delivery)
    return 0 if used is None else price.cost(used.prompt, used.cached, used.output)


def used_of(delivery: Delivery) -> Used | None:
    """What a call has used that has ended, or whose answer is whole; None: its client got nothing."""
    asked, attempt, ending = delivery.asked, delivery.attempt, delivery.ending
    if attempt is None:
        return None
    answer, outcome = attempt.answer, "ok" if ending is None else ending.outcome
    return used_by(asked.path, outcome, asked.call.prompt_tokens, answer.passed_tokens, answer.usage)


@dataclass(slots=True, eq=False)
class Bill(Companion):
    """The companion of one call. `price` is its model's, `purses` are those from which it takes."""

    delivery: Delivery
    router: Router
    price: Price | None
    purses: tuple[Purse, ...]
    terms: KeyTerms | None
    refusal: PlaitError | None = None
    """Why a stream may not go on."""
    counts: bool = False
    """Whether each event of the stream has a usage, which `withholds` keeps from a client that has not asked for it."""
    withholds: bool = False
    cap: int | None = None
    """The most tokens of each choice; None: as the client wants."""
    more: asyncio.Task[None] | None = None
    """Waits for what a stream may use next."""
    _reserves: list[Reserve] = field(default_factory=list)
    _covered: int = 0  # tokens of output that are reserved

    def enter(self) -> Awaitable[None] | None:
        """Check the key's limits and reserve. Raises `PlaitError` for a call that may not run."""
        asked, call = self.delivery.asked, self.delivery.call
        if self.terms is not None:
            expected = min(call.output_limit or inf, EXPECTED_OUTPUT_TOKENS) * asked.choices
            self.terms.check(call.model, call.prompt_tokens + int(expected))
        if not self.purses:
            return None
        prompt, longest = call.prompt_tokens, self._longest_tokens()
        first = wanted = min(longest, FIRST_TOKENS * asked.choices)
        if not call.streamed:
            is_far = all(purse.free >= FAR * self._amount(purse, prompt, longest) for purse in self.purses)
            has_none = call.output_limit is None
            wanted = min(longest, USUAL_TOKENS * asked.choices) if has_none and is_far else longest
        elif asked.form.has_events:
            self.delivery.one_by_one = True  # so that one event at most exceeds what is reserved
        self._reserves = [
            Reserve(purse, None if call.streamed else self._amount(purse, prompt, first)) for purse in self.purses
        ]
        return None if self._take(prompt, wanted) else self._begin(wanted)

    def stage(self, sink: Sink) -> Sink:
        return BilledSink(sink, self)

    def sent(self, headers: Headers, body: Body, delivery: Delivery) -> tuple[Headers, Body]:
        """With the cut limit, and with a usage in each event of a stream if the engine can."""
        path = delivery.asked.path
        if not isinstance(body, bytes) or not (delivery.call.streamed or self.cap):
            return headers, body
        fields = FIELDS.decode(body)
        if self.cap is not None:
            is_new = path == CHAT_PATH and "max_completion_tokens" in fields
            return headers, msgspec.json.encode(
                {**fields, "max_completion_tokens" if is_new else LIMIT_FIELDS[path]: self.cap}
            )
        kind = self.router.engines[delivery.latest_engine_id].kind
        if kind is None or not DIALECTS[kind].counts_in_streams or path not in KINDS:
            return headers, body
        options: dict[str, Any] = msgspec.json.decode(fields.get("stream_options", b"null")) or {}
        self.counts, self.withholds = True, not options.get("continuous_usage_stats")
        told = {**options, "include_usage": True, "continuous_usage_stats": True}
        return headers, msgspec.json.encode({**fields, "stream_options": told})

    def passed(self, sink: Sink) -> None:
        """More of a stream was passed on: reserve what the next part may use."""
        attempt, more = self.delivery.attempt, FIRST_TOKENS * self.delivery.asked.choices
        if not self.purses or attempt is None or not self.delivery.asked.form.has_events:
            return
        if self.counts and attempt.exchange is not None:
            attempt.exchange.keep()
        answer = attempt.answer
        output = answer.passed_tokens if answer.usage is None else answer.usage.output_tokens
        while output >= self._covered and self._take(0, more):
            pass
        if output >= self._covered and self.more is None:
            self.more = asyncio.create_task(self._go_on(more, sink), name="budget-of-a-stream")

    def ended(self, delivery: Delivery) -> None:
        self._settle(used_of(delivery))

    def undone(self) -> None:
        self._settle(None)

    # Reserves.

    def _longest_tokens(self) -> int:
        """The longest answer that the call may have, in all choices."""
        asked, call = self.delivery.asked, self.delivery.call
        if asked.path not in LIMIT_FIELDS:
            return asked.choices
        if call.output_limit is not None:
            return call.output_limit * asked.choices
        context = self.router.models.contexts.get(call.model)
        return asked.choices * (USUAL_TOKENS if context is None else max(1, context - call.prompt_tokens))

    def _amount(self, purse: Purse, prompt: int, output: int, cached: int = 0) -> int:
        """What tokens are in a purse's unit."""
        if purse.budget.unit == "tokens":
            return prompt + output
        return 0 if self.price is None else self.price.cost(prompt, cached, output)

    def _take(self, prompt: int, output: int) -> bool:
        """Reserve for tokens, of what is leased here. Returns whether there was enough."""
        amounts = [self._amount(purse, prompt, output) for purse in self.purses]
        if not all(purse.has(amount) for purse, amount in zip(self.purses, amounts, strict=True)):
            return False
        for reserve, amount in zip(self._reserves, amounts, strict=True):
            reserve.add(reserve.purse.take(amount, amount) or 0)
        self._covered += output
        return True

    async def _draw(self, prompt: int, output: int, *, waits: bool) -> None:
        """Reserve for tokens, also of what is not leased yet: for fewer of output if there are not as many."""
        covered, choices = output, self.delivery.asked.choices
        for reserve in self._reserves:
            purse, none = reserve.purse, self._amount(reserve.purse, prompt, 0)
            least, most = self._amount(purse, prompt, choices), self._amount(purse, prompt, output)
            granted = await purse.draw(least, most, waits=waits)
            reserve.add(granted)
            if granted < most:
                covered = min(covered, max(choices, output * (granted - none) // (most - none)))
        self._covered += covered

    async def _begin(self, output: int) -> None:
        call, asked = self.delivery.call, self.delivery.asked
        await self._draw(call.prompt_tokens, output, waits=True)
        if not call.streamed and self._covered < output and asked.path in LIMIT_FIELDS:
            self.cap = max(1, self._covered // asked.choices)

    async def _go_on(self, output: int, sink: Sink) -> None:
        """Reserve for more of a stream, or let it end. Its engine goes on meanwhile, so nothing is waited for."""
        try:
            await self._draw(0, output, waits=False)
        except PlaitError as error:
            self.refusal = error
        self.more = None
        if sink.on_room is not None:
            sink.on_room()

    def _settle(self, used: Used | None) -> None:
        """Give back what was reserved and not used."""
        if self.more is not None:
            self.more.cancel()
            self.more = None
        for reserve in self._reserves:
            amount = 0 if used is None else self._amount(reserve.purse, used.prompt, used.output, used.cached)
            reserve.settle(amount)
        self._reserves = []


class BilledSink(Stage):
    """The stage of a call with a price or a budget."""

    def __init__(self, to: Sink, bill: Bill) -> None:
        super().__init__(to)
        self._client, self.last = self.last, self
        self._bill = bill

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written, or the budget has to answer."""
        return self._bill.more is not None or self._client.is_full

    def head(self, headers: Headers) -> Headers:
        return headers if self._bill.cap is None else [*headers, CAPPED]

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """With the cost of an answer, which is known now."""
        price = self._bill.price
        if price is not None and status == 200:
            headers = [*headers, (b"plait-cost", f"{cost_of(self._bill.delivery, price) / UNIT:.9f}".encode())]
        super().whole(status, headers, body)

    def write(self, body: bytes) -> None:
        """Raises the refusal of a stream that may not go on."""
        if self._bill.refusal is not None:
            raise self._bill.refusal
        super().write(body)
        self._bill.passed(self)

    def events(self, events: bytes) -> bytes:
        """Without the usages that the client has not asked for."""
        if not self._bill.withholds or b'"usage"' not in events:
            return events
        each = events_of(events) if _NO_CHOICES.search(events) else [events]  # the last one may have been asked for
        return b"".join([one if _NO_CHOICES.search(one) else _USAGE.sub(b"", one) for one in each])
