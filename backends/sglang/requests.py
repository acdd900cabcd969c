"""Maps SGLang's requests to the calls of a plan, and back."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from plait.backends.sglang.calls import SglangCall

_ORDER = attrgetter("order")


class Requests:
    """The requests of one scheduler. `received` makes the call of a request that has none yet."""

    def __init__(self, scheduler: Any, received: Callable[[Any], SglangCall]) -> None:
        self._scheduler = scheduler
        self._received = received
        self._requests: dict[SglangCall, Any] = {}

    def of(self, call: SglangCall) -> Any:
        """The request of a call that the last `calls` returned."""
        return self._requests[call]

    def calls(self, running_batch: Any) -> tuple[list[SglangCall], list[SglangCall]]:
        """Running calls with something to compute, and waiting calls, both in order of arrival."""
        scheduler, in_chunks = self._scheduler, self._scheduler.chunked_req
        in_flight = self._in_flight()
        running = []
        self._requests = {}
        if in_chunks is not None:
            running.append(self._call(in_chunks))
            running[0].follow_prefill(in_chunks)
        for request in running_batch.reqs:
            flying = request.rid in in_flight
            if not request.finished() and not (flying and request.next_output_finishes_by_length()):
                call = self._call(request)
                call.follow_decode(request, int(flying))
                running.append(call)
        waiting = []
        for request in scheduler.waiting_queue:
            call = self._call(request)
            call.follow_waiting(request)
            waiting.append(call)
        running.sort(key=_ORDER)
        waiting.sort(key=_ORDER)
        return running, waiting

    def running(self, running_batch: Any) -> list[Any]:
        """Requests that have begun and not ended, including the prompt in chunks."""
        scheduler = self._scheduler
        begun = [*running_batch.reqs, *(scheduler.last_batch.reqs if scheduler.last_batch else ())]
        if scheduler.chunked_req is not None:
            begun.append(scheduler.chunked_req)
        return [request for request in {id(request): request for request in begun}.values() if not request.finished()]

    def _call(self, request: Any) -> SglangCall:
        call: SglangCall = getattr(request, "plait_call", None) or self._received(request)
        self._requests[call] = request
        return call

    def _in_flight(self) -> set[str]:
        """Ids of requests whose next token is still being computed."""
        return {request.rid for batch, _ in self._scheduler.result_queue for request in batch.reqs}
