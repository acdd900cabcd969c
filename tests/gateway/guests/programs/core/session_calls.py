"""What the tests of sessions share: an executor, and owners and getters that write down what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.backends.errors import PlaitError
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.guests.programs.core.consequences import Prediction
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import GrowingText, HeldCall, Output, Promise, ReadyCall
from plait.gateway.guests.programs.core.session import Getter, Session
from plait.gateway.guests.programs.transforms import parse
from plait.gateway.timed_events import Event
from plait.policy.programs.needs import Mark

SECONDS_PER_TOKEN = 0.01


@dataclass(eq=False)
class Owner:
    """Remembers how a call went: `ready` and what was `refined` later, or the error that it was broken off with."""

    ready: ReadyCall | None = None
    error: PlaitError | None = None
    refined: list[Promise] = field(default_factory=list)

    def on_ready(self, ready: ReadyCall) -> None:
        assert (self.ready, self.error) == (None, None)
        self.ready = ready

    def on_refined(self, promise: Promise) -> None:
        assert self.ready is not None
        assert self.error is None
        self.refined.append(promise)

    def on_broken(self, error: PlaitError) -> None:
        assert self.error is None
        self.error = error


@dataclass(eq=False)
class Waiting:
    """A get and what it was told."""

    variable: str
    mark: Mark | None = None
    told: list[Any] = field(default_factory=list)
    deltas: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text = GrowingText()
        self._shown = 0
        self.getter = Getter(self.variable, self.told.append, self.told.append, self.mark, self._on_delta)

    def _on_delta(self, text: GrowingText) -> None:
        """Note the news of the text; None where it begins again."""
        if text is not self._text and self._shown:
            self.deltas.append(None)
        self._shown = self._shown if text is self._text else 0
        self._text = text
        if news := text.since(self._shown):
            self.deltas.append(news)
            self._shown += len(news)


def predicted_s(_model: str, prompt_tokens: int, _output_limit: int | None, *, in_group: bool = False) -> float:
    del in_group
    return prompt_tokens * SECONDS_PER_TOKEN


class Core:
    """An executor whose calls take `SECONDS_PER_TOKEN` a prompt token; they gather if `limits` say so."""

    def __init__(self, predicted_s: Prediction = predicted_s, **limits: Any) -> None:
        config = SessionsConfig(**{"gather_ms": 0, "gone_grace_s": 0, **limits})
        self._events: list[tuple[float, Event]] = []
        self.executor = Executor(config, predicted_s, self._at)

    def session(self, session_id: str = "s", tenant: str = "t", now_s: float = 0.0) -> Session:
        return self.executor.sessions.open(tenant, session_id, now_s)

    def add(
        self, call_id: str, inputs: str = "", outputs: Sequence[str] = (), now_s: float = 0.0, **more: Any
    ) -> HeldCall:
        """A call of session s; an output is `NAME` or `NAME|TRANSFORM`."""
        session = more.pop("session", None) or self.session(now_s=now_s)
        call = HeldCall(call_id, tuple(inputs.split()), tuple(map(_output, outputs)), Owner(), **more)
        self.executor.add(session, call, now_s)
        return call

    def run(self, call: HeldCall, *texts: str, now_s: float = 0.0) -> None:
        """A ready call runs and makes these."""
        self.executor.start(call, now_s)
        for text in texts:
            self.executor.generated(call, text)
            assert call.output is not None
            self.executor.produce(call, call.output.value(str(call.text)), now_s)
        if not texts:
            self.executor.finish(call, now_s)

    def elapse(self, now_s: float) -> None:
        """What is due by now happens."""
        due = [event for when_s, event in self._events if when_s <= now_s]
        self._events = [(when_s, event) for when_s, event in self._events if when_s > now_s]
        for event in due:
            event(now_s)

    def settle(self, now_s: float) -> None:
        """What is due by now happens, and so does what follows from it."""
        while any(when_s <= now_s for when_s, _ in self._events):
            self.elapse(now_s)

    def _at(self, when_s: float, event: Event) -> None:
        self._events.append((when_s, event))

    def get(self, variable: str, mark: Mark | None = None, now_s: float = 0.0) -> Waiting:
        waiting = Waiting(variable, mark)
        self.executor.variables.get(self.session(now_s=now_s), waiting.getter, now_s)
        return waiting


def _output(text: str) -> Output:
    name, _, transform = text.partition("|")
    return Output(name, parse(transform) if transform else None)


def owner(call: HeldCall) -> Owner:
    assert isinstance(call.owner, Owner)
    return call.owner


def error(call: HeldCall) -> PlaitError:
    found = owner(call).error
    assert found is not None, f"{call.call_id} is not broken"
    return found
