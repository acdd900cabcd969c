"""A session's entries (values, calls, native steps) from their collection until the gateway has them. No I/O.

`set_value`, `call` and `expect` collect. `batches` hands out entries in parts that fit into a request. An entry comes
after the entries whose outputs it takes. A batch ends in one of three ways: accepted (its entries are settled), refused
(the entry at fault and all that need it are lost), or neither (its entries are sent again with the next batch).
Requests may overtake each other, so a batch repeats the entries that it needs and that are under way; a gateway takes
each entry once.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from plait.client.errors import AnswerError, ClientError, FailureCause, VariableFailedError
from plait.client.variable import Text

BATCH_CALLS = 1024
"""The most calls and native steps in a request: a gateway's default limit (`sessions.max_program_calls`)."""
BATCH_BYTES = 16 * 2**20
"""About the most bytes of a request: half of a gateway's default limit (`server.max_body_bytes`)."""

Field = Literal["values", "calls", "natives"]
"""The field of a program that an entry is in."""


@dataclass(slots=True, eq=False)
class Entry:
    """A value that is set, a call, or a native step."""

    number: int
    """The entry's place in the order of collection."""
    field: Field
    what: str
    """The entry's name in messages."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    content: msgspec.Raw
    """JSON, encoded once, so that it is the same each time the entry is sent."""
    carriers: int = 0
    """How many requests with the entry are under way."""
    settled: bool = False
    """Whether the gateway has taken or refused the entry."""
    was_sent: bool = False


def parted(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries, in the same order, in parts that fit into a request."""
    part: list[Entry] = []
    calls = size_bytes = 0
    for entry in entries:
        own_calls, own_bytes = int(entry.field != "values"), len(bytes(entry.content))
        calls, size_bytes = calls + own_calls, size_bytes + own_bytes
        if part and (calls > BATCH_CALLS or size_bytes > BATCH_BYTES):
            yield part
            part, calls, size_bytes = [], own_calls, own_bytes
        part.append(entry)
    if part:
        yield part


_NAME_CHARACTERS = 55  # a name has at most 64; the rest is for a unique suffix
_PLACE = re.compile(r"(?:(?P<field>calls|natives)\[(?P<index>\d+)\]|values\.(?P<value>\w+))")
_OF_THE_PROGRAM = frozenset({400, 404, 409, 413, 424, 501})
"""Statuses that the same program would get if it were sent again."""


class _Refusal(NamedTuple):
    """Why a variable will have no value: the entry `what` was refused, which is its own one or one upstream."""

    error: ClientError
    what: str
    is_own: bool


class Batch:
    """The entries in one request, and the `external` variables among their inputs: other clients produce these."""

    def __init__(self, collected: Collected, entries: Sequence[Entry], external: Iterable[str]) -> None:
        self.entries = tuple(entries)
        self.external = tuple(external)
        self._collected = collected
        self._is_open = True
        self._has_entered = False

    def body(self) -> dict[str, object]:
        values = {entry.outputs[0]: entry.content for entry in self.entries if entry.field == "values"}
        calls, natives = ([entry.content for entry in self._in(field)] for field in ("calls", "natives"))
        given = {"values": values, "calls": calls, "natives": natives, "external": self.external}
        return {field: content for field, content in given.items() if content}

    @contextmanager
    def sent(self) -> Iterator[Batch]:
        """Send the request in this block. Without `accept` or a refusal in it, the entries will be sent again.

        An `AnswerError` before `enter` is a refusal. It gets the name of the function whose call was refused.
        """
        try:
            yield self
        except AnswerError as error:
            if self._is_open and not self._has_entered:
                self._is_open = False
                self._collected.refuse(self, error)
            raise
        finally:
            if self._is_open:
                self._collected.keep(self)

    def enter(self) -> None:
        """The gateway has taken the entries. It cancels their calls if the client leaves before the answer's end."""
        self._has_entered = True

    def accept(self) -> None:
        """The gateway has taken the entries, and its answer has ended."""
        if self._is_open:
            self._is_open = False
            self._collected.settle(self.entries)

    def at_fault(self, param: str | None) -> Entry | None:
        """The entry that an error's `param` names."""
        place = _PLACE.match(param or "")
        if place is None:
            return None
        if place["value"]:
            return next((entry for entry in self.entries if entry.outputs == (place["value"],)), None)
        entries, index = self._in(place["field"]), int(place["index"])
        return entries[index] if index < len(entries) else None

    def _in(self, field: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.field == field]


class Collected:
    """One session's entries. Several threads may use the object."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._new: dict[int, Entry] = {}  # by number
        self._producers: dict[str, Entry] = {}  # variable -> its entry, while that is not settled
        self._refused: dict[str, _Refusal] = {}
        self._external: set[str] = set()
        self._literals: dict[str, str] = {}  # text -> variable

    def set_value(self, name: str, value: str) -> None:
        """Set a variable. Raises `ClientError` if an entry sets or produces it already."""
        with self._lock:
            if name in self._producers:
                raise ClientError(f"{name} has a value already; a variable is set once")
            self._external.discard(name)
            self._add("values", f"variable {name}", (), (name,), value)

    def literal(self, text: str) -> str:
        """The variable of a text that is given to a call. Equal texts have one variable, so that calls share it."""
        with self._lock:
            name = self._literals.get(text)
            if name is None:
                name = self._literals[text] = unique("text")
                self.set_value(name, text)
            return name

    def names(self, texts: Iterable[Text]) -> list[str]:
        """The names of variables and of the variables of texts."""
        return [self.literal(text) if isinstance(text, str) else text.name for text in texts]

    def call(
        self,
        what: str,
        body: Mapping[str, object],
        inputs: Iterable[str],
        outputs: Sequence[str],
        field: Field = "calls",
    ) -> Entry | None:
        """Add a call or a native step. None if one of its inputs was refused: its outputs are then refused too."""
        inputs = tuple(dict.fromkeys(inputs))
        with self._lock:
            lost = next((self._refused[name] for name in inputs if name in self._refused), None)
            if lost is None:
                return self._add(field, what, inputs, tuple(outputs), body)
            self._refused.update(dict.fromkeys(outputs, lost._replace(is_own=False)))
            return None

    def expect(self, name: str) -> None:
        """Another client produces this variable, unless an entry does."""
        with self._lock:
            if name not in self._producers:
                self._external.add(name)

    def batches(self, gets: Iterable[str] = ()) -> list[Batch]:
        """The batches to send, one after the other, the last one with `gets`. The list has at least one batch.

        The batches have all new entries, and the entries under way that `gets` or the new entries need.
        """
        with self._lock:
            named = list(gets)
            needed = dict(self._new)
            todo = [*named, *(name for entry in needed.values() for name in entry.inputs)]
            while todo:
                entry = self._producers.get(todo.pop())
                if entry is not None and entry.number not in needed:
                    needed[entry.number] = entry
                    todo += entry.inputs
            self._new.clear()
            for entry in needed.values():
                entry.carriers += 1
                entry.was_sent = True
            parts = list(parted(entry for _, entry in sorted(needed.items()))) or [[]]
            return [self._batch(part, named if part is parts[-1] else ()) for part in parts]

    def unsent(self) -> list[str]:
        """The functions whose calls and native steps were never sent."""
        with self._lock:
            return [entry.what for entry in self._new.values() if entry.field != "values" and not entry.was_sent]

    def refusal(self, name: str) -> ClientError | None:
        """The error of a variable that will have no value because an entry was refused."""
        with self._lock:
            refusal = self._refused.get(name)
        if refusal is None or refusal.is_own:
            return None if refusal is None else refusal.error
        causes = [FailureCause(message=text) for text in (f"{refusal.what} was refused", str(refusal.error))]
        error = VariableFailedError(name, causes)
        error.__cause__ = refusal.error
        return error

    def check(self, name: str) -> None:
        """Raise the error of `refusal`, if there is one."""
        refusal = self.refusal(name)
        if refusal is not None:
            raise refusal

    def settle(self, entries: Iterable[Entry]) -> None:
        """The gateway has taken or refused these entries."""
        with self._lock:
            for entry in entries:
                entry.settled = True
                for name in entry.outputs:
                    if self._producers.get(name) is entry:
                        del self._producers[name]

    def keep(self, batch: Batch) -> None:
        """The gateway may not have the batch: its entries will be sent again."""
        with self._lock:
            for entry in batch.entries:
                entry.carriers -= 1
                if not entry.settled and entry.carriers == 0:
                    self._new[entry.number] = entry

    def refuse(self, batch: Batch, error: AnswerError) -> None:
        """The gateway has refused the batch.

        If the error names an entry, only that entry and what needs it are lost. Otherwise all of the batch is lost if
        the gateway would refuse it again.
        """
        with self._lock:
            fault = batch.at_fault(error.param)
            if fault is not None:
                error.name_function(fault.what)
                self._lose(fault, _Refusal(error, fault.what, is_own=True))
            elif error.status in _OF_THE_PROGRAM and not (error.param or "").startswith("gets"):
                for entry in reversed(batch.entries):  # the last first, so that each has this error as its own
                    self._lose(entry, _Refusal(error, entry.what, is_own=True))
            self.keep(batch)

    def _lose(self, entry: Entry, refusal: _Refusal) -> None:
        """Refuse an entry's outputs, and all entries that need them."""
        lost = {} if entry.settled else dict.fromkeys(entry.outputs, refusal)
        others = sorted(dict.fromkeys(self._producers.values()), key=lambda one: one.number)
        for one in others:
            if not lost.keys().isdisjoint(one.inputs) and one is not entry:
                lost.update(dict.fromkeys(one.outputs, refusal._replace(is_own=False)))
        for one in others:
            if not lost.keys().isdisjoint(one.outputs):
                self.settle([one])
                self._new.pop(one.number, None)
        self._refused.update(lost)
        self._literals = {text: name for text, name in self._literals.items() if name not in lost}

    def _add(
        self, field: Field, what: str, inputs: tuple[str, ...], outputs: tuple[str, ...], content: object
    ) -> Entry:
        self._count += 1
        entry = Entry(self._count, field, what, inputs, outputs, msgspec.Raw(msgspec.json.encode(content)))
        self._new[entry.number] = entry
        self._producers.update(dict.fromkeys(outputs, entry))
        return entry

    def _batch(self, entries: Sequence[Entry], gets: Iterable[str]) -> Batch:
        names = dict.fromkeys([*(name for entry in entries for name in entry.inputs), *gets])
        return Batch(self, entries, [name for name in names if name in self._external])


def unique(name: str) -> str:
    return f"{name[:_NAME_CHARACTERS]}_{uuid.uuid4().hex[:8]}"
