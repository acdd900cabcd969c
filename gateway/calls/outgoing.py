"""The body that an engine gets: the client's, except for the few fields that Plait adds or removes.

An engine with our plugin also gets the call's objectives and the cached tokens that Plait expects. If the route takes
token ids, and the engine's tokenizer is the gateway's, it gets those instead of text, so that a prompt is not tokenized
twice. Other engines get none of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from plait.backends.http.body import Body
from plait.backends.protocol.call_annotations import EngineAnnotations, is_annotation, to_parameters
from plait.backends.protocol.dialects import DIALECTS, ChatForm, Dialect
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request, whole_number
from plait.gateway.fleet.tokenizer_agreement import AGREED, Agreement
from plait.policy.types import Call, Placement

Fields = dict[str, msgspec.Raw]
FIELDS: Final = msgspec.json.Decoder(Fields)
"""Reads the fields of a body. It is made once: msgspec looks at such a type anew for each `decode` with it."""
_OBJECT: Final = msgspec.json.Decoder(Fields | None)

_PARAMETER_NAMES: Final = sorted({row.parameters for row in DIALECTS.values() if row.parameters is not None})

STREAM_INTERVAL: Final = 8
"""Tokens in an event of a stream that nobody reads as it comes. vLLM sends the first token at once all the same."""


def unhurried(request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
    """The same request for a stream that nobody reads as it comes: vLLM sends several tokens in an event of it."""
    if request.stream_interval is not None:
        return request
    return msgspec.structs.replace(request, stream_interval=STREAM_INTERVAL)


class EngineBody(Protocol):
    """What an engine gets as the body of a request. `original` is what the client sent."""

    @property
    def original(self) -> bytes: ...

    @property
    def withholds_usage(self) -> bool:
        """Whether the gateway asks for the stream's usage and the client did not."""

    def for_engine(
        self,
        kind: str | None,
        call: Call,
        placement: Placement,
        age_s: float,
        handle: str | None = None,
        *,
        agreement: Agreement = AGREED,
    ) -> Body:
        """The body for an engine of a `kind` with our plugin (None: without it).

        `age_s` is the time since the call's arrival. The engine knows the call by `handle` if its objectives may
        change. `agreement` says whether its tokenizer is the gateway's.
        """


class ForwardedBody(msgspec.Struct, frozen=True):
    """A body that engines get as it came, but for Plait's own field and for a model under another name (`renamed`).

    A `cache_salt` takes the place of the client's own. An `annotated` call's objectives go to engines of which all
    routes take them.
    """

    original: bytes
    renamed: str | None = None
    has_own_field: bool = False
    cache_salt: str | None = None
    annotated: bool = False
    withholds_usage: bool = False

    def for_engine(
        self,
        kind: str | None,
        call: Call,
        placement: Placement,
        age_s: float,
        handle: str | None = None,
        *,
        agreement: Agreement = AGREED,
    ) -> bytes:
        parameters = None if kind is None or not self.annotated else _parameters_of_all(DIALECTS[kind])
        if self.renamed is None and not self.has_own_field and self.cache_salt is None and parameters is None:
            return self.original
        fields = FIELDS.decode(self.original)
        fields.pop("plait", None)
        if self.renamed is not None:
            fields["model"] = _raw(self.renamed)
        if self.cache_salt is not None:
            fields["cache_salt"] = _raw(self.cache_salt)
        if parameters is not None:
            told = engine_annotations(call, placement, age_s, handle, agreement)
            fields[parameters] = _merged(fields.get(parameters), to_parameters(told))
        return msgspec.json.encode(fields)


class OutgoingBody(msgspec.Struct, frozen=True):
    """A request's body, and the changes to it that do not depend on the engine.

    `prompt_ids` are the prompts' token ids if an engine may compute those. Those of a chat are in this `form`; if it
    `is_plain`, in that of any engine. `cache_salt` separates the tenants' caches. With `renames`, the engine gets the
    request's model instead of the name in the body, such as an alias. `gateway` is the gateway's id. `fields` are those
    of the body; None if they were not needed yet.
    """

    original: bytes
    request: ChatRequest | CompletionRequest
    prompt_ids: Sequence[Sequence[int]] | None = None
    cache_salt: str | None = None
    renames: bool = False
    gateway: str | None = None
    is_plain: bool = True
    form: ChatForm = "sglang"
    fields: Mapping[str, msgspec.Raw] | None = None

    @property
    def withholds_usage(self) -> bool:
        """Whether the gateway asks for the stream's usage and the client did not."""
        options = self.request.stream_options
        return bool(self.request.stream) and not (options and options.include_usage)

    def for_engine(
        self,
        kind: str | None,
        call: Call,
        placement: Placement,
        age_s: float,
        handle: str | None = None,
        *,
        agreement: Agreement = AGREED,
    ) -> bytes:
        request = self.request
        salted = self.cache_salt != request.cache_salt
        speaks_for_us = _speaking_for_us(request) if request.vllm_xargs or request.custom_params else ()
        withholds_usage = bool(request.stream) and self.withholds_usage
        changes = withholds_usage or salted or self.renames or request.plait is not None or speaks_for_us
        if kind is None and not changes:
            return self.original
        fields = FIELDS.decode(self.original) if self.fields is None else {**self.fields}
        for name in speaks_for_us:
            fields[name] = _raw({key: raw for key, raw in _object(fields[name]).items() if not is_annotation(key)})
        fields.pop("plait", None)
        if withholds_usage:  # and what goes with each event of an engine that has been asked for it
            options = {**_object(fields.get("stream_options")), "include_usage": True}
            options.pop("continuous_usage_stats", None)
            fields["stream_options"] = _raw(options)
        if self.renames:
            fields["model"] = _raw(request.model)
        if salted:
            fields["cache_salt"] = _raw(self.cache_salt)
        if kind is not None:
            told = engine_annotations(call, placement, age_s, handle, agreement, gateway=self.gateway)
            fields |= self._in_dialect(DIALECTS[kind], fields, to_parameters(told), agreement)
        return msgspec.json.encode(fields)

    def _in_dialect(self, dialect: Dialect, fields: Fields, told: dict[str, Any], agreement: Agreement) -> Fields:
        """The fields that only this kind of engine gets, or gets otherwise than the client has written them."""
        request, own = self.request, self._ids(dialect, fields, agreement)
        if dialect.parameters is not None:
            own[dialect.parameters] = _merged(fields.get(dialect.parameters), told)
        if dialect.takes_stream_interval and request.stream_interval is not None:
            own["stream_interval"] = _raw(request.stream_interval)
        if dialect.priority_sign < 0 and (priority := whole_number(request.priority)) is not None:
            own["priority"] = _raw(-priority)
        return own

    def _ids(self, dialect: Dialect, fields: Fields, agreement: Agreement) -> Fields:
        """The field with the prompts' token ids; none where this engine takes no ids here, or would misread them.

        Ids that the client has sent stay.
        """
        if self.prompt_ids is None:
            return {}
        ids = self.prompt_ids[0] if len(self.prompt_ids) == 1 else self.prompt_ids
        if isinstance(self.request, CompletionRequest):
            if not agreement.prompts:
                return {}
            name = "prompt"
        else:
            given = dialect.chat_ids
            if given is None or given in fields or not (agreement.chats and self._is_in_form(dialect, agreement)):
                return {}
            name = given
        return {name: msgspec.Raw(msgspec.json.encode(ids, enc_hook=list))}  # ids may be an array

    def _is_in_form(self, dialect: Dialect, agreement: Agreement) -> bool:
        """Whether the engine gives the chat to its template as the gateway has."""
        return self.is_plain or (self.form == dialect.chat_form and agreement.prepares)


def _parameters_of_all(dialect: Dialect) -> str | None:
    """The field for annotations on routes beside completions and chats; None if they do not take it."""
    return dialect.parameters if dialect.annotates_all else None


def engine_annotations(
    call: Call,
    placement: Placement,
    age_s: float,
    handle: str | None = None,
    agreement: Agreement = AGREED,
    *,
    gateway: str | None = None,
) -> EngineAnnotations:
    """The annotations for an engine's scheduler. The call arrived `age_s` seconds ago.

    Without a TTFT or JCT, a call ages from now on: engines serve older calls first, which would undo the order of
    admission. One with a `handle` may get them later. The tokens of another tokenizer are no hint for its engine.
    """
    has_zero = handle is not None or (call.slo is not None and call.slo.has_zero)
    return EngineAnnotations(
        age_s=age_s if has_zero else 0.0,
        slo=call.slo,
        objective=call.objective,
        priority=call.priority,
        cached_tokens=placement.cached_tokens if agreement.problem is None else None,
        handle=handle,
        gateway=gateway,
    )


def _speaking_for_us(request: Request) -> list[str]:
    """The fields in which a client has set what only the gateway may tell engines."""
    given = ((name, getattr(request, name)) for name in _PARAMETER_NAMES)
    return [name for name, value in given if isinstance(value, dict) and any(map(is_annotation, value))]


def _merged(present: msgspec.Raw | None, more: dict[str, Any]) -> msgspec.Raw:
    """A JSON object with the keys of `more` added. The client's other keys stay."""
    return _raw({**_object(present), **more})


def _object(present: msgspec.Raw | None) -> Fields:
    return (None if present is None else _OBJECT.decode(present)) or {}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
