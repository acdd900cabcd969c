"""Maps SGLang's requests to the calls of a plan, and back."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from plait.backends.sglang.calls import SglangCall
from plait.backends.sglang.waiting_hits import WaitingHits

_ORDER = attrgetter("order")


class Requests:
    """The requests of one scheduler. Each has its call in `plait_call`.

    The waiting ones are kept from step to step, because they can be many. SGLang's queue gets no request that `queued`
    does not get. So if the queue is as long as what is kept, it has the same requests.
    """

    def __init__(self, scheduler: Any, hits: WaitingHits) -> None:
        self._scheduler = scheduler
        self._hits = hits
        self._running: dict[SglangCall, Any] = {}
        self._waiting: dict[SglangCall, Any] = {}
        self._in_order = True

    def of(self, call: SglangCall) -> Any:
        """The request of a call that the last `calls` returned."""
        return self._waiting[call] if call.waits else self._running[call]

    def queued(self, request: Any) -> None:
        """A request begins to wait."""
        call: SglangCall = request.plait_call
        latest = next(reversed(self._waiting), call)
        self._in_order = self._in_order and latest.order <= call.order
        self._waiting[call] = request
        self._hits.queued(call)

    def waiting_but(self, calls: Iterable[SglangCall]) -> list[Any]:
        """The waiting requests in order of arrival, without those of `calls`."""
        left = self._waiting.copy()
        for call in calls:
            del left[call]
        return list(left.values())

    def admitted(self, call: SglangCall) -> None:
        """A waiting call has begun to run."""
        del self._waiting[call]
        self._hits.left(call)

    def calls(self, running_batch: Any) -> tuple[list[SglangCall], list[SglangCall]]:
        """Running calls with something to compute, and waiting calls, both in order of arrival."""
        self._follow_queue()
        in_chunks, in_flight = self._scheduler.chunked_req, self._in_flight()
        self._running = running = {}
        if in_chunks is not None:
            running[in_chunks.plait_call] = in_chunks
            in_chunks.plait_call.follow_prefill(in_chunks)
        for request in running_batch.reqs:
            flying = request.rid in in_flight
            if not request.finished() and not (flying and request.next_output_finishes_by_length()):
                call: SglangCall = request.plait_call
                running[call] = request
                call.follow_decode(request, flying)
        return sorted(running, key=_ORDER), list(self._waiting)

    def running(self, running_batch: Any, beginning: Iterable[Any] = ()) -> list[Any]:
        """Requests that have begun and not ended, including the prompt in chunks, and those `beginning`."""
        scheduler = self._scheduler
        begun = [*running_batch.reqs, *(scheduler.last_batch.reqs if scheduler.last_batch else ()), *beginning]
        if scheduler.chunked_req is not None:
            begun.append(scheduler.chunked_req)
        return [request for request in {id(request): request for request in begun}.values() if not request.finished()]

    def _follow_queue(self) -> None:
        queue = self._scheduler.waiting_queue
        if len(queue) != len(self._waiting):  # some were aborted
            before, self._waiting = self._waiting, {request.plait_call: request for request in queue}
            self._in_order = False
            for call in before.keys() - self._waiting:
                self._hits.left(call)
        if not self._in_order:
            self._waiting = {call: self._waiting[call] for call in sorted(self._waiting, key=_ORDER)}
            self._in_order = True

    def _in_flight(self) -> set[str]:
        """Ids of requests whose next token is still being computed."""
        return {request.rid for batch, _ in self._scheduler.result_queue for request in batch.reqs}
