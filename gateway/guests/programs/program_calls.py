"""A completion that is a call of a program waits for its inputs, and its answer's text becomes a variable's value."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive

from plait.backends.errors import PlaitError
from plait.gateway.api.call_api import Answer, AskedCompletion
from plait.gateway.api.refusals import Refusals
from plait.gateway.asgi import ClientGoneError, ClientSink, unless_gone
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.programs.chained_calls import AnsweredCall, ChainedCalls


@dataclass(frozen=True, slots=True)
class ProgramCalls:
    """The step before a completion that makes it a call of its session's program."""

    chained: ChainedCalls
    refusals: Refusals

    async def take(self, asked: AskedCompletion) -> Answer | None:
        """As in `StepBefore`."""
        incoming, request, annotations, receive, sink = asked
        self.chained.runner.reader.prompts.check(request)
        held = await self.chained.take(incoming, request, annotations)
        return None if held is None else partial(self._answer, *held, incoming, receive, sink)

    def refused(self, incoming: Incoming, error: PlaitError) -> None:
        """The output that the request has promised fails, if another try could not mend it."""
        self.chained.refused(incoming, error)

    async def _answer(
        self, held: AnsweredCall, is_repeated: bool, incoming: Incoming, receive: Receive, sink: ClientSink
    ) -> None:
        """Send a call's answer to one of its clients. The relay logs the call; a repeated request is logged here."""
        try:
            await unless_gone(receive, self.chained.answer(held, sink.send))
        except (PlaitError, ClientGoneError, asyncio.CancelledError) as error:
            if is_repeated:
                self.refusals.no_call(incoming, error)
            raise
        else:
            if is_repeated:
                self.refusals.no_call(incoming, held.problem, status=held.answer.status)
        finally:
            self.chained.left(held)
