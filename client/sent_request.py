"""A request that an asynchronous program has sent without waiting for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from plait.client.errors import ClientError, VariableFailedError
from plait.client.failure_cause import FailureCause


class SentRequest:
    """A request on its way in `task`, which needs the variables that `parents` announce.

    A refusal reaches whoever waits for a variable that depends on it, and otherwise the end of the session.
    """

    __slots__ = ("_seen", "_task", "parents", "what")

    def __init__(self, what: str, task: asyncio.Task[None], parents: Sequence[SentRequest]) -> None:
        self.what = what
        self._task = task
        self.parents = tuple(parents)
        self._seen = False

    async def accepted(self, variable: str) -> None:
        """Return once it and everything upstream of it were accepted.

        Raises its own error as it is, and `VariableFailedError` for `variable` because of one upstream.
        """
        refusal = await self.refusal()
        if refusal is not None:
            raise refusal
        upstream = dict.fromkeys(self.parents)
        todo = list(upstream)
        while todo:
            parent = todo.pop()
            refusal = await parent.refusal()
            if refusal is not None:
                causes = [FailureCause(message=text) for text in (f"{parent.what} was refused", str(refusal))]
                raise VariableFailedError(variable, causes) from refusal
            todo += [further for further in parent.parents if further not in upstream]
            upstream.update(dict.fromkeys(parent.parents))

    async def refusal(self) -> ClientError | None:
        """Its error, once it is answered; None if it was accepted."""
        await asyncio.wait([self._task])
        self._seen = True
        if self._task.cancelled():
            return ClientError(f"{self.what} was not sent: its session has ended")
        error = self._task.exception()
        if error is not None and not isinstance(error, ClientError):
            raise error
        return error

    async def end(self) -> ClientError | None:
        """At the end of its session: its error if nobody has met it."""
        seen = self._seen
        refusal = await self.refusal()
        return None if seen else refusal

    def cancel(self) -> None:
        """Give it up, if it is still on its way."""
        self._task.cancel()
