"""Finds, from the log alone, the calls of a session that have ended: their requests are not needed any more.

Logs of earlier releases do not say which calls were skipped. So a replay decides skips anew, by the conditions in the
requests, and the request of a call that was skipped or failed with an input always matters.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.gateway.guests.programs.core.record import CallEnded, SessionEvent, Submitted, ValueSet


def ended_calls(events: Sequence[SessionEvent]) -> dict[int, list[int]]:
    """The calls that produced all outputs, failed or were cancelled, but not those skipped or failed with an input.

    Maps the place of each `Submitted` in `events` to the places of the call's values and its end.
    """
    ended, submitted, left = dict[int, list[int]](), dict[str, int](), dict[str, int]()
    later = dict[str, list[int]]()
    for place, event in enumerate(events):
        match event:
            case Submitted():
                submitted[event.call_id], left[event.call_id], later[event.call_id] = place, len(event.outputs), []
            case ValueSet(call_id=str(call_id)) if call_id in submitted:
                later[call_id].append(place)
                left[call_id] -= 1
                if not left[call_id]:
                    ended[submitted.pop(call_id)] = later[call_id]
            case CallEnded() if event.call_id in submitted and not event.is_skip:
                ended[submitted.pop(event.call_id)] = [*later[event.call_id], place]
            case _:
                pass
    return ended
