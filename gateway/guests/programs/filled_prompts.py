"""Prompts with the values of variables filled in: measured first, then counted against limits, then built.

`{{name}}` in a prompt is replaced by the variable's value. The size is computed before, because a prompt may have a
placeholder a thousand times, and its value may be a megabyte.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeVar

import msgspec

from plait.backends.errors import BodyTooLargeError, LimitError, ValueTooLargeError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.backends.tokenization.chat_messages import TEXT_KEYS
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.call_reader import OFF_LOOP_BYTES, CallReader, Incoming
from plait.gateway.calls.outgoing import Fields
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, utf8_bytes
from plait.gateway.ids import VARIABLE_NAME
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.intake.turns import Steps

PLACEHOLDER = re.compile(rf"\{{\{{\s*({VARIABLE_NAME.pattern})\s*\}}\}}")
NOWHERE: Final[Mapping[int, int]] = {}
Request = ChatRequest | CompletionRequest
T = TypeVar("T")


def fill_in(
    fields: Fields, request: ChatRequest | CompletionRequest, values: Mapping[str, str]
) -> ChatRequest | CompletionRequest:
    """The request with `values` filled into its messages or its prompt, also in the `fields` of its body.

    Every other field stays as the client wrote it. Placeholders inside a value are not replaced.
    """
    if not values:
        return request
    name, filled = (
        ("messages", [filled_message(message, values) for message in request.messages])
        if isinstance(request, ChatRequest)
        else ("prompt", _texts(request.prompt, values))
    )
    fields[name] = msgspec.Raw(msgspec.json.encode(filled))
    return msgspec.structs.replace(request, **{name: filled})


def filled_sizes(request: ChatRequest | CompletionRequest, values: Mapping[str, str]) -> list[int]:
    """The bytes of text in each prompt that `fill_in` would make; empty without `values`.

    Takes time linear in the request's own texts, not in the filled ones.
    """
    if not values:
        return []
    sizes = sizes_of(values)
    if isinstance(request, ChatRequest):
        return [sum(filled_bytes(text, sizes) for message in request.messages for text in message_texts(message))]
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    return [filled_bytes(prompt, sizes) for prompt in prompts if isinstance(prompt, str)]


def sizes_of(values: Mapping[str, str]) -> dict[str, int]:
    return {name: utf8_bytes(value) for name, value in values.items()}


def filled_bytes(text: str, sizes: Mapping[str, int], at: Mapping[int, int] = NOWHERE) -> int:
    """The bytes of a text whose placeholders are replaced by values of these `sizes`, by name.

    A placeholder whose position in `text` is in `at` is replaced by a text of that size instead.
    """
    total = utf8_bytes(text)
    if "{{" in text:
        for match in PLACEHOLDER.finditer(text):
            size = at.get(match.start(), sizes.get(match[1]))
            if size is not None:
                total += size - utf8_bytes(match[0])
    return total


def replaced(text: str, values: Mapping[str, str]) -> str:
    """A text with its placeholders replaced. Placeholders of other names stay."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text) if "{{" in text else text


def filled_message(message: Mapping[str, Any], values: Mapping[str, str]) -> Mapping[str, Any]:
    """A chat message with its placeholders replaced: in its content, or in the texts among the content's parts."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [_part(part, values) for part in content]}
    return {**message, "content": replaced(content, values)} if isinstance(content, str) else message


def message_texts(message: Mapping[str, Any]) -> Sequence[str]:
    """The texts of a chat's message that `filled_message` replaces."""
    content = message.get("content")
    if isinstance(content, str):
        return (content,)
    parts: list[Any] = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        key = _text_key(part)
        if key is not None or isinstance(part, str):
            texts.append(part if key is None else part[key])
    return texts


def _part(part: Any, values: Mapping[str, str]) -> Any:
    if isinstance(part, str):
        return replaced(part, values)
    key = _text_key(part)
    return part if key is None else {**part, key: replaced(part[key], values)}


def _text_key(part: Any) -> str | None:
    """The key that holds a part's text; None for a part that is not text."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    key = TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    return key if key is not None and isinstance(part.get(key), str) else None


def _texts(prompt: Any, values: Mapping[str, str]) -> Any:
    """One prompt or several, filled. Token ids stay as they are."""
    if isinstance(prompt, list):
        return [_texts(item, values) if isinstance(item, str) else item for item in prompt]
    return replaced(prompt, values) if isinstance(prompt, str) else prompt


async def in_turns(reader: CallReader, tenant: str, work: Callable[[], T], size: int) -> T:
    """Run `work` on `size` bytes: at once for a few bytes, else on a tokenizer thread, where tenants take turns.

    Raises what `work` raises, and `LimitError` if too many bytes of the tenant wait for the threads.
    """
    return work() if size <= OFF_LOOP_BYTES else await reader.threads.run(tenant, _in_one_turn(work), size)


def _in_one_turn(work: Callable[[], T]) -> Steps[T]:
    yield from ()
    return work()


class Unfilled(NamedTuple):
    """A request whose prompts are to be filled. `measure` and `fill` may run on a thread."""

    model: str
    field: str
    """The request's field with the prompts."""
    measure: Callable[[], Sequence[int]] | None
    """Computes the bytes of text of each filled prompt. None: no value is filled in."""
    fill: Callable[[], tuple[bytes, Request]]
    """Makes the body and the request."""


class FilledPrompts:
    """The limit on filled prompts, and the queue of those that wait for room.

    Filled prompts count as open bodies and in the tenant's `held_bytes`. A prompt without room waits until other
    prompts of its tenant have ended; if the tenant has no other prompt, it is refused.
    """

    def __init__(self, reader: CallReader, executor: Executor, bodies: OpenBodies) -> None:
        self.reader = reader
        self.executor = executor
        self.bodies = bodies
        self._open: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        waiting = {tenant: len(prompts) for tenant, prompts in self._waiting.items()}
        return f"FilledPrompts(open={dict(self._open)}, waiting={waiting})"

    def of(self, tenant: str, call: HeldCall) -> FilledPrompt:
        """A context for one prompt of a call, which has to last until the end of its delivery."""
        return FilledPrompt(self, tenant, call, call.held_bytes)

    def take(self, tenant: str, size: int) -> None:
        """Count a prompt of `size` bytes. Raises `LimitError` beyond the limit."""
        self.bodies.add(tenant, size)
        self._open[tenant] += 1

    def give_back(self, tenant: str, size: int) -> None:
        self.bodies.remove(tenant, size)
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]

    async def room(self, tenant: str, *, has_waited: bool) -> bool:
        """Wait for the end of another prompt of the tenant. False at once if there is none.

        With `has_waited`, wait at the front of the queue: the prompt has had its turn, and did not fit.
        """
        if not self._open[tenant]:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(tenant, deque())
        (waiting.appendleft if has_waited else waiting.append)(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.wake(tenant)  # pass the wake-up on to the next prompt
            raise
        return True

    def wake(self, tenant: str) -> None:
        """Wake the tenant's next prompt, because there may be room."""
        waiting = self._waiting.get(tenant, deque())
        while waiting and waiting[0].done():
            waiting.popleft()
        if waiting:
            waiting.popleft().set_result(None)
        if not waiting:
            self._waiting.pop(tenant, None)


@dataclass(slots=True)
class FilledPrompt:
    """One prompt of a call. `own_bytes`: the call's `held_bytes` without it. `size`: the bytes of the filled prompt."""

    prompts: FilledPrompts
    tenant: str
    call: HeldCall
    own_bytes: int
    size: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size:
            self._give_back()
            self.prompts.wake(self.tenant)

    async def read(
        self, incoming: Incoming, unfilled: Unfilled, annotations: Annotations, adapt: Callable[[Request], Request]
    ) -> Asked:
        """Measure, count and fill the prompt, then `adapt` and read the request. Raises as `CallReader.read` does.

        Raises, before it fills, `BodyTooLargeError` for a prompt above the limit of a request's body, `LimitError` and
        `ValueTooLargeError` for a prompt beyond the tenant's limits.
        """
        prompts, has_waited = self.prompts, False
        try:
            while True:
                try:
                    return await self._read(incoming, unfilled, annotations, adapt)
                except (LimitError, ValueTooLargeError):
                    self._give_back()
                    if not await prompts.room(self.tenant, has_waited=has_waited):
                        raise
                    has_waited = True
        finally:
            if has_waited:
                prompts.wake(self.tenant)  # `wake` wakes one prompt only: the room may be enough for another

    async def _read(
        self, incoming: Incoming, unfilled: Unfilled, annotations: Annotations, adapt: Callable[[Request], Request]
    ) -> Asked:
        reader, own_bytes = self.prompts.reader, len(incoming.body)
        if unfilled.measure is not None:
            sizes = await in_turns(reader, self.tenant, unfilled.measure, own_bytes)
            reader.check_sizes(unfilled.model, sizes, unfilled.field)
            self._take(sum(sizes))
        body, request = await in_turns(reader, self.tenant, unfilled.fill, max(self.size, own_bytes))
        return await reader.read(msgspec.structs.replace(incoming, body=body), adapt(request), annotations)

    def _take(self, size: int) -> None:
        if not size:
            return
        most = self.prompts.bodies.max_bytes
        if size > most:
            raise BodyTooLargeError(f"The prompt with its values has {size} bytes; at most {most} are accepted.")
        self.prompts.executor.hold(self.call, self.own_bytes + size)
        try:
            self.prompts.take(self.tenant, size)
        except LimitError:
            self.prompts.executor.hold(self.call, self.own_bytes)
            raise
        self.size = size

    def _give_back(self) -> None:
        if self.size:
            self.prompts.give_back(self.tenant, self.size)
            self.prompts.executor.hold(self.call, self.own_bytes)
            self.size = 0
