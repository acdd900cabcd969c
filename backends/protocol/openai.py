"""The part of OpenAI's request bodies that Plait reads; every other field passes through to the engine untouched.

The gateway decodes a body only to place the call (`parse_request`), and leaves all other checks to the engine. The
embedded engine answers the body, so it checks all fields that it reads (`check_request`). A body that nests too deep or
has too many values is refused before it is decoded (`json_bounds`).
"""

from __future__ import annotations

import codecs
import difflib
import re
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.json_bounds import (
    MAX_CONTAINERS,
    MAX_JSON_LEVELS,
    MAX_STRINGS,
    MAX_VALUES,
    PART_BYTES,
    Excess,
    excess_of,
)

MAX_MODEL_CHARACTERS = 256
"""The longest name of a model. vLLM's longest names are paths, and a file's name has at most 255 bytes."""
ANY_MODEL = "default"
"""The name that SGLang's users send for whatever model is served."""
MAX_CHOICES = 128
"""The most choices (`n`) of one prompt, as in OpenAI's API."""
MAX_TEMPLATE_OPTIONS_BYTES = 16 * 1024
"""The most JSON in `chat_template_kwargs`, which has switches such as `enable_thinking`."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage` asks for a last event that carries the usage, `continuous_usage_stats` for one in each event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_FREE_CHOICES: Final = (None, "auto", "none")
"""Values of `tool_choice` that leave the answer's form to the model."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and text completions share; names and meanings are OpenAI's and vLLM's.

    The engine checks the fields of type Any. An empty `model` was not given. `prompt_field` names the prompt's field.
    """

    prompt_field: ClassVar[str] = "prompt"

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Any = None
    max_tokens: Any = None
    n: Any = None
    stop: Any = None
    seed: Any = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    custom_params: Any = None
    ignore_eos: bool | None = None
    plait: dict[str, Any] | None = None
    prompt_cache_key: Any = None
    priority: Any = None
    response_format: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    truncate_prompt_tokens: Any = None
    user: Any = None

    # Grammars: vLLM's, its former ones, and SGLang's.
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    # Annotations in the wrong place, which engines would ignore. No value of theirs is decoded.
    slo_ttft_ms: None = None
    slo_tpot_ms: None = None
    slo_jct_ms: None = None
    hyphened_ttft: None = msgspec.field(default=None, name="slo-ttft-ms")
    hyphened_tpot: None = msgspec.field(default=None, name="slo-tpot-ms")
    hyphened_jct: None = msgspec.field(default=None, name="slo-jct-ms")

    max_completion_tokens = cast("Any", None)  # a field of chats alone, which counts before `max_tokens`
    tool_choice = cast("Any", None)  # of chats alone, too

    @property
    def choices(self) -> int:
        """How many completions of each prompt are requested; 1 for an invalid number, which the engine will refuse."""
        count = None if self.n is None else whole_number(self.n)
        return count if count is not None and 1 <= count <= MAX_CHOICES else 1

    @property
    def output_limit(self) -> int | None:
        """The most tokens of a completion; None if the request sets no limit, or an invalid one."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        limit = given if type(given) is int else whole_number(given)  # nearly always, and no bool
        return limit if limit is not None and limit >= 1 else None

    @property
    def has_grammar(self) -> bool:
        """Whether the answer has to follow a grammar, which the engine may compile before the first token."""
        given = self.response_format
        if given is not None and not (isinstance(given, dict) and given.get("type") == "text"):
            return True
        if self.tool_choice not in _FREE_CHOICES:
            return True
        grammars = (
            self.structured_outputs, self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar,
            self.json_schema, self.regex, self.ebnf, self.structural_tag,
        )  # fmt: skip
        return grammars.count(None) < len(grammars)

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def single_prompt(self) -> bool:
        return True

    @property
    def wants_usage_event(self) -> bool:
        """Whether the stream must end with a usage event."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)


class ChatRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: Any = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    reasoning: Any = None
    documents: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/completions`: `prompt` is a text, token ids, or a list of either. It may be missing (prompt_embeds)."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Any = None
    add_special_tokens: bool = True

    @property
    def single_prompt(self) -> bool:
        """False for a list of two prompts or more."""
        return not isinstance(self.prompt, list) or len(self.prompt) < 2 or isinstance(self.prompt[0], int)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one, all texts or all token ids. Raises `CallerError` for anything else."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _are_tokens(prompt):
                return [prompt]
            if all(isinstance(item, str) for item in prompt) or all(_are_tokens(item) for item in prompt):
                return prompt
        raise CallerError(
            "'prompt' must be a string, a list of token ids, or a non-empty list of either", param="prompt"
        )


RequestT = TypeVar("RequestT", bound=Request)
BodyT = TypeVar("BodyT")

_DECODERS: dict[type[Request], msgspec.json.Decoder[Any]] = {}


def parse_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """Decode a body; raises `CallerError` that names the field at fault."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    request: RequestT = decode_body(body, decoder)
    if len(request.model) > MAX_MODEL_CHARACTERS:
        raise _long_model_name(request.model)
    if isinstance(request, ChatRequest) and request.chat_template_kwargs:
        _check_template_options(request.chat_template_kwargs)
    return request


def decode_body(body: bytes, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """A JSON body as the decoder's type; raises `CallerError` that names the field at fault."""
    excess = excess_of(body, MAX_JSON_LEVELS)
    if excess is not None:
        raise _too_much(excess)
    try:
        if not body.isascii():
            check_unicode(body)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = re.search(r"[\w-]+", path)
        missing = re.search(r"(?:missing required|unknown) field `([^`]{1,80})`", message)
        param = field.group() if field else missing.group(1) if missing else None
        if field and message.startswith("Expected `null`"):
            told = f"'{param}' is an annotation: put it into the body's 'plait' object"
            raise CallerError(told, param=param, code="invalid_annotation") from error
        told = f"{message}{f' (in {param})' if field else ''}{_hint(message, param or '', decoder)}"
        raise CallerError(told, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"The request body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise _too_much(Excess.LEVELS) from error


def _hint(message: str, field: str, decoder: msgspec.json.Decoder[Any]) -> str:
    """The most similar name for an unknown field, or the words that a field takes; else empty."""
    _, schemas = msgspec.json.schema_components([decoder.type])
    fields = {name: given for schema in schemas.values() for name, given in schema.get("properties", {}).items()}
    unknown = re.search(r"unknown field `([^`]{1,80})`", message)
    nearest = difflib.get_close_matches(unknown[1], fields, n=1) if unknown else []
    if nearest:
        return f"; did you mean `{nearest[0]}`?"
    given = fields.get(field, {})
    given = given.get("additionalProperties", given)  # of a table, whose values are at fault
    named = [schemas.get(one.get("$ref", "").rpartition("/")[2], one) for one in (given, *given.get("anyOf", ()))]
    words = [word for one in named for word in one.get("enum", ())]
    return f"; it takes {', '.join(map(str, words))}" if words and message.startswith("Invalid enum") else ""


def _too_much(excess: Excess) -> CallerError:
    if excess is Excess.LEVELS:
        text = f"nests arrays and objects more than {MAX_JSON_LEVELS} levels deep. Make it flatter."
    else:
        text = (
            f"has too many values. It may have {MAX_CONTAINERS:,} arrays and objects, {MAX_STRINGS:,} strings and "
            f"{MAX_VALUES:,} other values. Send the text in fewer parts, or in several requests."
        )
    return CallerError(f"The request body {text}", code=excess)


def check_request(request: Request) -> None:
    """Check a request as an engine does; raises `CallerError` that names the field at fault."""
    if request.n is not None:
        _check_whole("n", request.n, 1, MAX_CHOICES)
    limit = request.output_limit_field
    if getattr(request, limit) is not None:
        _check_whole(limit, getattr(request, limit), 1)
    if request.seed is not None:
        _check_whole("seed", request.seed, -(2**63))
    texts = request.stop if isinstance(request.stop, list) else [request.stop or ""]
    if not all(isinstance(text, str) for text in texts):
        raise CallerError("'stop' must be a string or a list of strings", param="stop")
    if isinstance(request, ChatRequest) and not request.messages:
        raise CallerError("'messages' must hold at least one message", param="messages")
    if request.stream_options is not None and not request.stream:
        raise CallerError("'stream_options' is only allowed with 'stream': true", param="stream_options")


def whole_number(value: object) -> int | None:
    """A JSON number without a fraction as an int; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value)


def _check_whole(field: str, value: object, least: int, most: int | None = None) -> None:
    number = whole_number(value)
    if number is None:
        raise CallerError(f"'{field}' must be a whole number", param=field)
    if number < least or (most is not None and number > most):
        accepted = f"at least {least}" if most is None else f"between {least} and {most}"
        raise CallerError(f"'{field}' must be {accepted}, not {number}", param=field)


def _long_model_name(model: str) -> CallerError:
    """The error for a name that no model has. Messages and logs repeat the name, so it must be short."""
    return CallerError(
        f"'model' has {len(model)} characters; a model's name has at most {MAX_MODEL_CHARACTERS}. "
        "GET /v1/models lists the models.",
        param="model",
    )


def _check_template_options(options: dict[str, Any]) -> None:
    size = len(msgspec.json.encode(options))
    if size > MAX_TEMPLATE_OPTIONS_BYTES:
        raise CallerError(
            f"'chat_template_kwargs' has {size} bytes; at most {MAX_TEMPLATE_OPTIONS_BYTES} are taken. "
            "Put long texts into 'messages'.",
            param="chat_template_kwargs",
        )


def _are_tokens(value: object) -> bool:
    """Whether `value` is a list of token ids, checked without a loop in Python: there may be a million."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32


def check_unicode(document: bytes | bytearray, part_bytes: int = PART_BYTES) -> None:
    """Raises `UnicodeDecodeError` for bytes that are not UTF-8, even in fields that a decoder skips."""
    if document.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(document), part_bytes):  # decoded at once, it could take four times its size
        decoder.decode(document[begin : begin + part_bytes])
    decoder.decode(b"", final=True)
