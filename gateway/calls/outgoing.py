"""The body that an engine gets: the client's bytes, unless a field must be added, removed or replaced.

An engine with Plait's adapter also gets the call's objectives and the number of prompt tokens that Plait expects to be
cached there. If its tokenizer is the gateway's and the route takes token ids, the ids replace the text, so that the
prompt is not tokenized twice. Other engines get none of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from plait.backends.http.body import Body
from plait.backends.protocol.call_annotations import EngineAnnotations, is_annotation, to_parameters
from plait.backends.protocol.dialects import DIALECTS, ChatForm, Dialect
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, Request, whole_number
from plait.gateway.answers.refusals import RefusedFields, nearest_effort
from plait.gateway.fleet.tokenizer_agreement import AGREED, Agreement
from plait.policy.types import Call, Placement

Fields = dict[str, msgspec.Raw]
FIELDS: Final = msgspec.json.Decoder(Fields)
"""Splits a body into fields without decoding their values. Made once: `msgspec.json.decode` would inspect the type
each time."""
_OBJECT: Final = msgspec.json.Decoder(Fields | None)

_PARAMETER_NAMES: Final = sorted({row.parameters for row in DIALECTS.values() if row.parameters is not None})

STREAM_INTERVAL: Final = 8
"""Tokens in an event of a stream that no client reads token by token. vLLM still sends the first token at once."""


def unhurried(request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
    """The request for a stream that no client reads by token. Fewer events cost less CPU. Only vLLM has the option."""
    if request.stream_interval is not None:
        return request
    return msgspec.structs.replace(request, stream_interval=STREAM_INTERVAL)


class Recipient(msgspec.Struct, frozen=True):
    """The engine that gets a body, and the call as it was placed there."""

    kind: str | None
    """Its adapter's: `vllm`, `sglang`, ...; None: the engine has no adapter."""

    call: Call
    placement: Placement

    age_s: float
    """The time since the call's arrival."""

    handle: str | None = None
    """Names the call to the engine if its objectives may change."""

    agreement: Agreement = AGREED
    """For which requests the engine's tokenizer is the gateway's."""


class EngineBody(Protocol):
    """Makes the body for each engine that a call is sent to. `original` is what the client sent."""

    @property
    def original(self) -> bytes: ...

    @property
    def withholds_usage(self) -> bool:
        """Whether the gateway asks for the stream's usage although the client did not."""

    @property
    def own_fields(self) -> Mapping[str, object]:
        """The fields that the gateway itself wrote and an engine may lack, with their values."""

    def for_engine(self, to: Recipient) -> Body: ...


class OtherBody(Protocol):
    """A body that is no JSON, as its `Preparer` has read it."""

    @property
    def guessed_tokens(self) -> int:
        """The prompt's tokens, by which the call is placed."""

    def renamed(self, model: str | None) -> EngineBody:
        """The body for engines, with another name of its model; None: with its own."""


class ForwardedBody(msgspec.Struct, frozen=True):
    """The body of a route that the gateway does not interpret. Only these fields are changed."""

    original: bytes

    renamed: str | None = None
    """Replaces `model`, such as an alias; None: no change."""

    has_own_field: bool = False
    """Whether the body has a field `plait`, which is removed."""

    cache_salt: str | None = None
    """Replaces `cache_salt`; None: no change."""

    annotated: bool = False
    """Whether the call has objectives. Engines get them if their dialect takes them on every route."""

    withholds_usage: bool = False
    own_fields: Mapping[str, object] = {}

    def for_engine(self, to: Recipient) -> bytes:
        parameters = None if to.kind is None or not self.annotated else _parameters_of_all(DIALECTS[to.kind])
        if self.renamed is None and not self.has_own_field and self.cache_salt is None and parameters is None:
            return self.original
        fields = FIELDS.decode(self.original)
        fields.pop("plait", None)
        if self.renamed is not None:
            fields["model"] = _raw(self.renamed)
        if self.cache_salt is not None:
            fields["cache_salt"] = _raw(self.cache_salt)
        if parameters is not None:
            fields[parameters] = _merged(fields.get(parameters), to_parameters(engine_annotations(to)))
        return msgspec.json.encode(fields)


class OutgoingBody(msgspec.Struct, frozen=True):
    """The body of a chat or text completion, and the changes to it that are the same for each engine."""

    original: bytes
    """The client's bytes."""

    request: ChatRequest | CompletionRequest
    """The parsed body, with the name that the engine has for the model."""

    prompt_ids: Sequence[Sequence[int]] | None = None
    """The token ids of each prompt; None: the engine tokenizes the text itself."""

    cache_salt: str | None = None
    """The salt to send. It separates the tenants' caches."""

    renames: bool = False
    """Whether the engine gets `request.model` instead of the name in the body, such as an alias."""

    gateway: str | None = None
    """The gateway's id, for engines that several gateways share."""

    is_plain: bool = True
    """Whether the ids of a chat are the same in each engine's form."""

    form: ChatForm = "sglang"
    """The kind of engine whose preparation of a chat for the template gave `prompt_ids`."""

    fields: Mapping[str, msgspec.Raw] | None = None
    """`original` split into fields; None if nothing has needed them yet."""

    is_translated: bool = False
    """Whether the gateway has made the chat from a request of another API."""

    @property
    def own_fields(self) -> Mapping[str, object]:
        """The fields that the gateway itself wrote and an engine may lack, with their values."""
        options = self.request.stream_options
        own: dict[str, object] = {}
        if self.request.stream and (self.is_translated or options is None):
            own["stream_options"] = options
        if self.is_translated and isinstance(self.request, ChatRequest):
            own["reasoning_effort"] = self.request.reasoning_effort
        return own

    @property
    def withholds_usage(self) -> bool:
        """Whether the gateway asks for the stream's usage although the client did not."""
        options = self.request.stream_options
        return bool(self.request.stream) and not (options and options.include_usage)

    def for_engine(self, to: Recipient) -> bytes:
        request = self.request
        salted = self.cache_salt != request.cache_salt
        speaks_for_us = _speaking_for_us(request) if request.vllm_xargs or request.custom_params else ()
        withholds_usage = bool(request.stream) and self.withholds_usage
        changes = withholds_usage or salted or self.renames or request.plait is not None or speaks_for_us
        if to.kind is None and not changes:
            return self.original
        fields = FIELDS.decode(self.original) if self.fields is None else {**self.fields}
        for name in speaks_for_us:
            fields[name] = _raw({key: raw for key, raw in _object(fields[name]).items() if not is_annotation(key)})
        fields.pop("plait", None)
        if withholds_usage:  # continuous_usage_stats would put a usage into each event, which is not withheld
            options = {**_object(fields.get("stream_options")), "include_usage": True}
            options.pop("continuous_usage_stats", None)
            fields["stream_options"] = _raw(options)
        if self.renames:
            fields["model"] = _raw(request.model)
        if salted:
            fields["cache_salt"] = _raw(self.cache_salt)
        if to.kind is not None:
            told = engine_annotations(to, gateway=self.gateway)
            fields |= self._in_dialect(DIALECTS[to.kind], fields, to_parameters(told), to.agreement)
        return msgspec.json.encode(fields)

    def _in_dialect(self, dialect: Dialect, fields: Fields, told: dict[str, Any], agreement: Agreement) -> Fields:
        """The fields that this kind of engine gets in its own form."""
        request, own = self.request, self._ids(dialect, fields, agreement)
        if dialect.parameters is not None:
            own[dialect.parameters] = _merged(fields.get(dialect.parameters), told)
        if dialect.takes_stream_interval and request.stream_interval is not None:
            own["stream_interval"] = _raw(request.stream_interval)
        if dialect.priority_sign < 0 and (priority := whole_number(request.priority)) is not None:
            own["priority"] = _raw(-priority)
        return own

    def _ids(self, dialect: Dialect, fields: Fields, agreement: Agreement) -> Fields:
        """The field with the prompts' token ids. Empty if the engine takes no ids here, or its tokenizer differs.

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
        """Whether the engine prepares the chat for its template as the gateway did."""
        return self.is_plain or (self.form == dialect.chat_form and agreement.prepares)


def without_refused(body: bytes, own: Mapping[str, object], refused: RefusedFields) -> bytes:
    """The body for an engine that has refused some fields: without those of the gateway's `own`, or in its words."""
    names = own.keys() & refused.keys()
    if not names:
        return body
    fields = FIELDS.decode(body)
    for name in names & fields.keys():
        word = nearest_effort(own[name], refused[name])
        if word is None:
            del fields[name]
        else:
            fields[name] = _raw(word)
    return msgspec.json.encode(fields)


def _parameters_of_all(dialect: Dialect) -> str | None:
    """The field for annotations on routes other than chat and text completions; None if these routes have none."""
    return dialect.parameters if dialect.annotates_all else None


def engine_annotations(to: Recipient, *, gateway: str | None = None) -> EngineAnnotations:
    """The annotations for an engine's scheduler.

    A call without TTFT and JCT gets age 0: engines serve older calls first, which would undo the order of admission. A
    call with a `handle` keeps its age, because it may get a TTFT or JCT later. `cached_tokens` is left out if the
    engine's tokenizer differs: the gateway's count is in other tokens.
    """
    call = to.call
    has_zero = to.handle is not None or (call.slo is not None and call.slo.has_zero)
    return EngineAnnotations(
        age_s=to.age_s if has_zero else 0.0,
        slo=call.slo,
        objective=call.objective,
        priority=call.priority,
        cached_tokens=to.placement.cached_tokens if to.agreement.problem is None else None,
        handle=to.handle,
        gateway=gateway,
        is_line=call.is_line,
    )


def _speaking_for_us(request: Request) -> list[str]:
    """The fields in which a client has put annotations that only the gateway may send to engines."""
    given = ((name, getattr(request, name)) for name in _PARAMETER_NAMES)
    return [name for name, value in given if isinstance(value, dict) and any(map(is_annotation, value))]


def _merged(present: msgspec.Raw | None, more: dict[str, Any]) -> msgspec.Raw:
    """A JSON object with the keys of `more` added. The client's other keys stay."""
    return _raw({**_object(present), **more})


def _object(present: msgspec.Raw | None) -> Fields:
    return (None if present is None else _OBJECT.decode(present)) or {}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
