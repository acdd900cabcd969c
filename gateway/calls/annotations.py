"""A call's annotations beyond OpenAI's fields: `plait-...` headers, or the same names in the body's `plait`.

A header has a hyphen where the body has an underscore: `plait-slo-ttft-ms` is `slo_ttft_ms`.

Every annotation is optional. An unknown name, an invalid value, or a header that contradicts the body is refused, never
ignored. The annotation `when` is a condition on a variable's value, such as `verdict == "yes"`: the call runs only if
the condition holds. A call without annotations may still name its conversation (`intake/agents.py`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from plait.backends.errors import CallerError
from plait.gateway.asgi import NAME, Headers
from plait.gateway.calls.condition import ACCEPTED, Condition, read_condition
from plait.gateway.ids import SESSION_ID, VARIABLE_NAME
from plait.policy.types import NO_SLO, Objective, Slo

_HEADER_PREFIX = "plait-"
_BODY_PREFIX = "plait."
# The names of llm-d and of the Kubernetes inference gateway before it. Others with these prefixes are ignored.
_ALIASES = {b"x-slo-ttft-ms": "slo_ttft_ms", b"x-slo-tpot-ms": "slo_tpot_ms"}
_ALIASES |= {name.replace(b"x-", b"x-llm-d-"): key for name, key in _ALIASES.items()}
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_PRIORITIES = range(-(2**31), 2**31)
TIERS: Mapping[str, Objective] = {"priority": Objective.LATENCY, "flex": Objective.THROUGHPUT}
"""By OpenAI's `service_tier`: the objective of a call. Others are none."""
_MILLISECONDS = "a number of milliseconds above 0"

_OF_SESSIONS = frozenset(("session", "durable"))
_OF_CALLS = frozenset(("session", "slo_ttft_ms", "slo_tpot_ms", "slo_jct_ms", "objective", "priority"))
CALL_OF_PROGRAM, PROGRAM_WITH_GETS = "a call of /v1/programs", "/v1/programs with gets"
TAKEN: Mapping[str, frozenset[str]] = {
    "/v1/sessions": _OF_SESSIONS | {"session_objective"},
    "/v1/variables": _OF_SESSIONS,
    "/v1/get": _OF_SESSIONS | _OF_CALLS - {"priority"},
    "/v1/submit": _OF_SESSIONS | _OF_CALLS | {"session_objective"},
    "/v1/programs": _OF_SESSIONS | {"session_objective"},
    PROGRAM_WITH_GETS: _OF_SESSIONS | {"session_objective", "slo_jct_ms", "objective"},
    CALL_OF_PROGRAM: _OF_CALLS,
}
"""By route of sessions: the annotations that mean something there."""

_ELSEWHERE = {
    "session": "names a session and the body none: put it into the body",
    **dict.fromkeys(
        ("slo_ttft_ms", "slo_tpot_ms", "priority"), "belongs to a call: put it into the call's 'plait' object"
    ),
    "slo_jct_ms": "belongs to a call, a get, or a program with gets",
    "objective": "belongs to a call, a get, or a program with gets; a session has plait-session-objective",
    "session_objective": "belongs to /v1/sessions, a program or a call of the session",
    "durable": "belongs to the request that makes the session",
    **dict.fromkeys(("inputs", "output"), "belongs to a completion; a submitted call has 'placeholders'"),
    "when": "belongs to a completion; 'when' is a field of a submitted call",
    "receipt": "belongs to a completion; /v1/receipts/ID has that of any call",
}
"""By annotation: where it belongs."""

Given = tuple[str, str, object]
"""An annotation as a client gives it: the place, the key and the value."""


class OutputVariable(msgspec.Struct, frozen=True):
    """The semantic variable that gets a call's text."""

    name: str
    transform: str | None = None
    """The specification as the client wrote it, not parsed yet."""
    must_be_whole: bool = False
    """Whether a text that was cut at the output limit fails the variable (`truncated=fail`)."""


class Annotations(msgspec.Struct, frozen=True):
    """One call's annotations. An annotation that the client does not give has its default."""

    session: str | None = None
    """The id of the session whose variables the call uses."""
    inputs: tuple[str, ...] = ()
    """Names of the variables that the call waits for."""
    output: OutputVariable | None = None
    when: Condition | None = None
    """The call is skipped unless this condition holds."""
    slo: Slo = NO_SLO
    """The promised limits of TTFT, TPOT and JCT, in seconds."""
    objective: Objective | None = None
    """The objective of the call alone."""
    session_objective: Objective | None = None
    """The objective of all variables that the session produces."""
    priority: int = 0
    """Lower runs first."""
    durable: bool | None = None
    """Whether a session that this call makes outlives the gateway."""
    receipt: bool = False
    """Whether the answer includes the reasons for the placement."""

    @property
    def mark(self) -> Slo | Objective | None:
        """The criterion of a get with these annotations; None if they state none."""
        return self.objective if self.slo == NO_SLO else self.slo

    def unless_marked(self, objective: Objective) -> Annotations:
        """The same with this objective, unless they state an objective or a promise."""
        return self if self.mark is not None else msgspec.structs.replace(self, objective=objective)

    @property
    def is_label(self) -> bool:
        """Whether the call only names a session, and uses none of its variables and objectives."""
        return not (self.inputs or self.output or self.when or self.session_objective)


NO_ANNOTATIONS = Annotations()


def read_annotations(
    headers: Headers, body_annotations: Mapping[str, object] | None, tier: object = None
) -> Annotations:
    """The annotations of a request; the shared `NO_ANNOTATIONS` when it has none.

    `headers` are ASGI's, with lower-case names. `body_annotations` is the body's `plait` object; a null in it means not
    given. `tier` is OpenAI's `service_tier`, which counts if they state neither objective nor promise. The same
    annotation may come from several places if they agree. Raises `CallerError`, whose `param` is the header
    (`plait-priority`) or the place in the body (`plait.priority`).
    """
    objective = TIERS.get(tier) if isinstance(tier, str) else None
    names = b"\n".join(map(NAME, headers))
    # Not `in`, which first takes its operand for a number, and so raises and catches a TypeError.
    if names.find(b"plait-") < 0 and names.find(b"-slo-") < 0 and not body_annotations:
        return NO_ANNOTATIONS if objective is None else Annotations(objective=objective)
    found = _annotations([*_from_headers(headers), *_from_body(body_annotations or {})])
    return found if objective is None else found.unless_marked(objective)


def of_route(
    route: str, headers: Headers, *fields: Given, body_annotations: Mapping[str, object] | None = None
) -> Annotations:
    """The annotations of a request on a route of sessions, which has to take each of them (`TAKEN`).

    `fields` are those that the body states in fields of its own; a value of None is not given. They have to agree with
    the annotations, and are in the result only if there are annotations. Raises `CallerError` as `read_annotations`.
    """
    given = [*_from_headers(headers), *_from_body(body_annotations or {})]
    if not given:
        return NO_ANNOTATIONS
    own = [field for field in fields if field[2] is not None]
    taken = TAKEN.get(route, _OF_SESSIONS) - ({"session"} - {key for _, key, _ in own})
    for place, key, _ in given:
        if key not in taken:
            raise _wrong(f"{place} {_ELSEWHERE[key]}", place)
    found, place = _annotations([*given, *own]), given[0][0]
    if found.objective is Objective.THROUGHPUT and found.slo != NO_SLO and "priority" not in taken:
        raise _wrong("what is wanted for throughput has no limits of times; give one of them", place)
    return found


def _annotations(given: Sequence[Given]) -> Annotations:
    values = _merged(given)
    if not values:
        return NO_ANNOTATIONS
    slo = Slo(*(values.pop(key, None) for key in ("slo_ttft_ms", "slo_tpot_ms", "slo_jct_ms")))
    return Annotations(slo=slo, **values)


def _wrong(message: str, place: str) -> CallerError:
    return CallerError(message, param=place, code="invalid_annotation")


def promised_output(headers: Headers, body_annotations: Mapping[str, object] | None) -> tuple[str, str] | None:
    """The session and the output variable of a refused request; None unless both are valid.

    The variable then fails, so that calls and clients that wait for it get the error.
    """
    given: dict[str, object] = dict(body_annotations or {})
    for raw_name, raw_value in headers:
        if raw_name.startswith(b"plait-"):
            given[raw_name.decode("latin-1").removeprefix(_HEADER_PREFIX)] = raw_value.decode("latin-1")
    session, output = given.get("session"), given.get("output")
    name = output.partition(";")[0].strip() if isinstance(output, str) else ""
    if not isinstance(session, str) or not SESSION_ID.fits(session.strip()) or not VARIABLE_NAME.fits(name):
        return None
    return session.strip(), name


def _from_headers(headers: Headers) -> Iterator[Given]:
    """For each annotation: the header's name, the key, the text."""
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if raw_name.startswith(b"plait-"):
            key = _HEADER_KEYS.get(name)
            if key is None:
                raise _unknown(name, _HEADER_PREFIX, _HEADER_KEYS)
            yield name, key, value
        elif raw_name in _ALIASES:
            yield name, _ALIASES[raw_name], value


def _from_body(body: Mapping[str, object]) -> Iterator[Given]:
    """For each annotation: the place in the body, the key, the JSON value. A client may write a key with hyphens."""
    for given, value in body.items():
        place, key = _BODY_PREFIX + given, given.replace("-", "_")
        if key not in _READERS:
            raise _unknown(place, _BODY_PREFIX, [_BODY_PREFIX + known for known in _READERS])
        if value is not None:
            yield place, key, value


def _unknown(place: str, prefix: str, known: Iterable[str]) -> CallerError:
    keys = [name.removeprefix(prefix) for name in known]
    nearest = difflib.get_close_matches(place.removeprefix(prefix)[:64], keys, n=1)
    all_known = ", ".join(prefix + key for key in keys)
    hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"the known annotations are {all_known}"
    return _wrong(f"unknown annotation {_shown(place)}; {hint}", json.dumps(place)[1:-1][:80])


def _merged(given: Sequence[Given]) -> dict[str, Any]:
    """Each key's value. Raises `CallerError` if two places disagree."""
    values: dict[str, Any] = {}
    first: dict[str, tuple[str, object]] = {}
    for place, key, raw in given:
        value = read_value(place, key, raw)
        if key not in first:
            first[key] = place, raw
            values[key] = value
        elif values[key] != value:
            other, other_raw = first[key]
            message = f"{other} is {_shown(other_raw)} but {place} is {_shown(raw)}; give one of them, or equal values"
            raise _wrong(message, other)
    return values


def read_value(place: str, key: str, raw: object) -> Any:
    """The value of the annotation `key`, as a client wrote it at `place`. Raises `CallerError`."""
    read, accepted = _READERS[key]
    value = read(raw.strip() if isinstance(raw, str) else raw)
    if value is None:
        raise _wrong(f"{place} is {_shown(raw)}; it must be {accepted}", place)
    return value


def _session(raw: object) -> str | None:
    return raw if SESSION_ID.fits(raw) else None


def _inputs(raw: object) -> tuple[str, ...] | None:
    """Reads variable names. Keeps their order and drops repetitions."""
    names = [name.strip() for name in raw.split(",")] if isinstance(raw, str) else raw
    if not isinstance(names, list | tuple):
        return None
    if not all(map(VARIABLE_NAME.fits, names)):
        return None
    return tuple(dict.fromkeys(names))


def _output(raw: object) -> OutputVariable | None:
    """Reads `name`, then `; truncated=fail` and `; transform=text`, each at most once.

    The transform comes last, because its text is all of the rest, semicolons included.
    """
    if not isinstance(raw, str):
        return None
    name, semicolon, rest = raw.partition(";")
    must_be_whole, transform = False, None
    while semicolon and transform is None:
        attribute, _, value = rest.partition("=")
        if attribute.strip() == "transform":
            transform = value.strip()
            if not transform:
                return None
        else:
            parameter, semicolon, rest = rest.partition(";")
            what, _, policy = (part.strip() for part in parameter.partition("="))
            if what != "truncated" or policy not in {"fail", "keep"} or must_be_whole:
                return None
            must_be_whole = policy == "fail"
    if not VARIABLE_NAME.fits(name.rstrip()):
        return None
    return OutputVariable(name.rstrip(), transform, must_be_whole)


def _objective(raw: object) -> Objective | None:
    return next((objective for objective in Objective if objective == raw), None)


def _seconds(raw: object) -> float | None:
    """Reads milliseconds, as text or a number, and converts them to seconds."""
    value = float(raw) if isinstance(raw, str) and _NUMBER.fullmatch(raw) else raw
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        seconds = value / 1000
    except OverflowError:  # an integer too large for a float
        return None
    return seconds if 0 < seconds < float("inf") else None


def _bool(raw: object) -> bool | None:
    """Reads true or false, as text or as JSON has them."""
    return raw if isinstance(raw, bool) else {"true": True, "false": False}.get(raw) if isinstance(raw, str) else None


def _priority(raw: object) -> int | None:
    value = int(raw) if isinstance(raw, str) and _INTEGER.fullmatch(raw) else raw
    return value if isinstance(value, int) and not isinstance(value, bool) and value in _PRIORITIES else None


# For each key: a function that reads a stripped text or a JSON value (it returns None for an invalid one), and the
# accepted form, for the error message.
_READERS: dict[str, tuple[Callable[[object], Any], str]] = {
    "session": (_session, SESSION_ID.rule),
    "inputs": (_inputs, f"variable names separated by commas (each {VARIABLE_NAME.rule})"),
    "output": (_output, f"a variable name ({VARIABLE_NAME.rule}), or NAME; truncated=fail; transform=TRANSFORM"),
    "when": (read_condition, ACCEPTED),
    "objective": (_objective, "latency or throughput"),
    "session_objective": (_objective, "latency or throughput"),
    "slo_ttft_ms": (_seconds, _MILLISECONDS),
    "slo_tpot_ms": (_seconds, _MILLISECONDS),
    "slo_jct_ms": (_seconds, _MILLISECONDS),
    "priority": (_priority, "an integer from -2147483648 to 2147483647"),
    "durable": (_bool, "true or false"),
    "receipt": (_bool, "true or false"),
}
_HEADER_KEYS = {_HEADER_PREFIX + key.replace("_", "-"): key for key in _READERS}


def _shown(value: object) -> str:
    """A caller's value as an error message shows it: short and ASCII."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 80 else f"{value[:80]}...")
    if isinstance(value, int | float):
        # Python refuses to write very long integers in decimal.
        return json.dumps(value) if isinstance(value, float) or value.bit_length() <= 64 else "a huge integer"
    return "an array" if isinstance(value, list | tuple) else "an object"
