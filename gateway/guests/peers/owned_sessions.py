"""A completion whose session another gateway owns is answered by that gateway."""

from __future__ import annotations

from dataclasses import dataclass

from plait.backends.errors import PlaitError
from plait.gateway.api.call_api import Answer, AskedCompletion, answered, as_forwarded
from plait.gateway.asgi import ClientGoneError, check_client
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.peers.forwarding import Forwarding, OwnedName


@dataclass(frozen=True, slots=True)
class OwnedSessions:
    """The step before a completion that forwards it to the owner of its session."""

    forwarding: Forwarding

    async def take(self, asked: AskedCompletion) -> Answer | None:
        """As in `StepBefore`. The other gateway has answered by then, and logs the call."""
        incoming, _, annotations, receive, sink = asked
        owned, is_label = OwnedName(incoming.tenant, annotations.session), annotations.is_label
        check_client(receive)
        try:
            is_elsewhere = await self.forwarding.forward_to_owner(
                owned, as_forwarded(incoming), receive, sink.send, is_label=is_label
            )
        except ClientGoneError:
            is_elsewhere = True
        return answered if is_elsewhere else None

    def refused(self, incoming: Incoming, error: PlaitError) -> None:
        """Nothing was forwarded."""
