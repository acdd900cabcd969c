"""A request that an asynchronous program has sent without waiting for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from plait.client.errors import ClientError, VariableFailedError
from plait.client.failure_cause import FailureCause


class SentRequest:
    """A request that `task` sends. It needs the variables that the requests in `parents` create.

    If the gateway refuses it, the error is raised when a dependent variable is awaited, or at the end of the session.
    """

    __slots__ = ("_seen", "_task", "parents", "what")

    def __init__(self, what: str, task: asyncio.Task[None], parents: Sequence[SentRequest]) -> None:
        self.what = what
        self._task = task
        self.parents = tuple(parents)
        self._seen = False

    async def accepted(self, variable: str) -> None:
        """Wait until the gateway has accepted this request and all requests upstream.

        Raises this request's own error, or `VariableFailedError` for `variable` if a request upstream was refused.
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
        """Wait for the answer; returns the error, or None if the request was accepted."""
        await asyncio.wait([self._task])
        self._seen = True
        if self._task.cancelled():
            return ClientError(f"{self.what} was not sent: its session has ended")
        error = self._task.exception()
        if error is not None and not isinstance(error, ClientError):
            raise error
        return error

    async def end(self) -> ClientError | None:
        """Wait at the end of the session; returns the error unless it was raised before."""
        seen = self._seen
        refusal = await self.refusal()
        return None if seen else refusal

    def cancel(self) -> None:
        """Cancel the request if it is still being sent."""
        self._task.cancel()
