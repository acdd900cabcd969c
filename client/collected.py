"""What a session has collected and the gateway does not have yet, and the batches in which it leaves. No I/O.

A session collects values, calls and native steps, each as it is sent, in parts that fit into a request.
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
"""The most calls and native steps of a request: what a gateway takes by default (`sessions.max_program_calls`)."""
BATCH_BYTES = 16 * 2**20
"""About the most bytes of a request: half of what a gateway takes by default (`server.max_body_bytes`)."""

Field = Literal["values", "calls", "natives"]
"""The field of a program that an entry is in."""


@dataclass(slots=True, eq=False)
class Entry:
    """A value that is set, a call, or a native step. `what` is for people. `content` is its JSON text, the same
    whenever it is sent.

    `carriers` counts the requests that are under way with it. It is `settled` once the gateway has taken or refused it.
    """

    number: int
    field: Field
    what: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    content: msgspec.Raw
    carriers: int = 0
    settled: bool = False
    was_sent: bool = False


def parted(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries in parts that fit into a request. An entry comes after those whose outputs it takes."""
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
"""Statuses that the same program would get again."""


class _Refusal(NamedTuple):
    """Why a variable will not come: its own entry was refused, or else the entry `what` upstream was."""

    error: ClientError
    what: str
    is_own: bool


class Batch:
    """The entries that travel in one request, and the variables among their inputs that others produce."""

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
        """Send the request in this block. What is neither accepted nor refused in it will be sent again.

        An `AnswerError` before it has entered is a refusal; it names the function whose call was refused.
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
        """The gateway has taken the entries. If its client leaves before the answer's end, it cancels their calls."""
        self._has_entered = True

    def accept(self) -> None:
        """The gateway has taken the entries, and its answer has come to its end."""
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
    """A session's entries from when the program makes them until the gateway has them. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._new: dict[int, Entry] = {}  # by number
        self._producers: dict[str, Entry] = {}  # of each variable whose entry is not settled
        self._refused: dict[str, _Refusal] = {}
        self._external: set[str] = set()
        self._literals: dict[str, str] = {}  # text -> variable

    def set_value(self, name: str, value: str) -> None:
        """Set a variable. Raises `ClientError` if this session's program sets or makes it already."""
        with self._lock:
            if name in self._producers:
                raise ClientError(f"{name} has a value already; a variable is set once")
            self._external.discard(name)
            self._add("values", f"variable {name}", (), (name,), value)

    def literal(self, text: str) -> str:
        """The variable of a text that a program gives to a call: one for each distinct text, so that calls share it."""
        with self._lock:
            name = self._literals.get(text)
            if name is None:
                name = self._literals[text] = unique("text")
                self.set_value(name, text)
            return name

    def names(self, texts: Iterable[Text]) -> list[str]:
        """The variables of texts. Equal texts are one variable, so that the gateway sees that calls share it."""
        return [self.literal(text) if isinstance(text, str) else text.name for text in texts]

    def call(
        self,
        what: str,
        body: Mapping[str, object],
        inputs: Iterable[str],
        outputs: Sequence[str],
        field: Field = "calls",
    ) -> Entry | None:
        """Add a call or a native step. If something that it needs was refused, its outputs fail and nothing will be
        sent: then the result is None.
        """
        inputs = tuple(dict.fromkeys(inputs))
        with self._lock:
            lost = next((self._refused[name] for name in inputs if name in self._refused), None)
            if lost is None:
                return self._add(field, what, inputs, tuple(outputs), body)
            self._refused.update(dict.fromkeys(outputs, lost._replace(is_own=False)))
            return None

    def expect(self, name: str) -> None:
        """Others produce this variable, unless the program does."""
        with self._lock:
            if name not in self._producers:
                self._external.add(name)

    def batches(self, gets: Iterable[str] = ()) -> list[Batch]:
        """What has to be sent before these variables can be got: at least one batch, to be sent one after the other.

        They have all that was not sent before. They also have what `gets` and the new calls need, if it is under way
        and not known to have arrived: requests may overtake each other, and a gateway takes each entry once.
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
        """The error of a variable that will not come because a call was refused."""
        with self._lock:
            refusal = self._refused.get(name)
        if refusal is None or refusal.is_own:
            return None if refusal is None else refusal.error
        causes = [FailureCause(message=text) for text in (f"{refusal.what} was refused", str(refusal.error))]
        error = VariableFailedError(name, causes)
        error.__cause__ = refusal.error
        return error

    def check(self, name: str) -> None:
        """Raise the error of a variable that will not come because a call was refused."""
        refusal = self.refusal(name)
        if refusal is not None:
            raise refusal

    def settle(self, entries: Iterable[Entry]) -> None:
        """The gateway has these entries."""
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
                for entry in reversed(batch.entries):  # each has this error itself, not because of one before it
                    self._lose(entry, _Refusal(error, entry.what, is_own=True))
            self.keep(batch)

    def _lose(self, entry: Entry, refusal: _Refusal) -> None:
        """Forget an entry, and what needs it."""
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
