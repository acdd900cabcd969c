"""The cleanup of an ended call: it leaves every book that lists it, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable

from plait.backends.errors import ENDS_STREAMS, PlaitError
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import CallWatch, Delivery
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.records import CallRecords, Reader
from plait.gateway.calls.request_faults import RequestFaults
from plait.gateway.calls.silent_streams import SilentStreams
from plait.gateway.fleet.router import RetryBudgets
from plait.gateway.timer import loop_time_s

LetGo = Callable[[Delivery], None]


class Holdings:
    """Takes ended calls out of the gateway's books, and shows them to the readers of `records` and to `watch`."""

    def __init__(
        self,
        gate: Gate,
        records: CallRecords,
        *,
        silent_streams: SilentStreams,
        objectives: ChangedObjectives,
        faults: RequestFaults,
        retries: RetryBudgets,
    ) -> None:
        self.watch: CallWatch | None = None
        self.records = records
        self._silent_streams = silent_streams
        self._objectives = objectives
        self._faults = faults
        self._gate = gate
        self._retries = retries
        books = self._leave_streams, self._leave_doubts, self._leave_admission, self._leave_retries
        self.of_clients: tuple[LetGo, ...] = (*books, *(reader.ended for reader in records.readers), self._leave_watch)
        """The cleanup steps of a client's own call."""
        self.of_guests: tuple[LetGo, ...] = (self._leave_objectives, *self.of_clients)
        """Those of a guest's call."""
        self.unrecorded: tuple[LetGo, ...] = (self._leave_objectives, *books, self._leave_watch)
        """Those of a guest's call that is delivered again: metrics and log do not see this delivery."""

    def read_by(self, *readers: Reader) -> None:
        """Have these read the ends of calls, too."""
        self.records.readers = (*self.records.readers, *readers)
        *steps, last = self.of_clients
        self.of_clients = (*steps, *(reader.ended for reader in readers), last)
        self.of_guests = (self._leave_objectives, *self.of_clients)

    def _leave_streams(self, delivery: Delivery) -> None:
        if delivery.commented is not None:
            self._silent_streams.end(delivery)

    def _leave_objectives(self, delivery: Delivery) -> None:
        if delivery.asked.slot.handle is not None:
            self._objectives.end(delivery)

    def _leave_doubts(self, delivery: Delivery) -> None:
        """Settle the doubts about engines that no other engine's answer has settled."""
        assert delivery.ending is not None
        if self._faults.doubts:
            self._faults.unresolved(delivery, loop_time_s(), client_gone=delivery.ending.outcome == "client_gone")

    def _leave_admission(self, delivery: Delivery) -> None:
        if delivery.entry is not None:
            usage = delivery.usage
            self._gate.left(delivery.entry, None if usage is None else usage.prompt_tokens + usage.output_tokens)

    def _leave_retries(self, delivery: Delivery) -> None:
        if delivery.charged:
            self._retries.give_back(delivery.call.model)

    def _leave_watch(self, delivery: Delivery) -> None:
        if self.watch is not None:
            self.watch.ended(delivery)


def tell(delivery: Delivery) -> None:
    """Report the end of a call: as an error event if its stream already has a status, and through `on_end`.

    Raises a defect if there is no `on_end`. Has no effect if it is called again for the same delivery.
    """
    ending, on_end, commented, defect = delivery.ending, delivery.on_end, delivery.commented, delivery.defect
    assert ending is not None
    error: BaseException | None = defect or ending.error
    if isinstance(error, ENDS_STREAMS) and ending.is_told:
        error = None  # it was the stream's last event
    delivery.close()
    try:
        if isinstance(error, PlaitError) and on_end is not None and commented is not None and commented.has_begun:
            told, error = error, None
            commented.fail(told)
    finally:
        if on_end is not None:
            on_end(error)
    if on_end is None and defect is not None:
        raise defect
