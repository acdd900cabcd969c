"""Translates a request to `/v1/responses`, whose input is made of items, to one to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from plait.backends.protocol.message_content import content_text
from plait.backends.translation.chat_history import content_of, note, ordered, text_part
from plait.backends.translation.fields import (
    Json,
    a_limit,
    a_list,
    a_text,
    an_object_or_none,
    objects,
    one_or_parts,
    streamed,
    unsupported,
    without_nones,
    wrong,
)
from plait.backends.translation.responses_tools import (
    CALL_ITEMS,
    TOOL_KINDS,
    ResponseTools,
    output_of,
    tool_fields,
)

ROLES = frozenset({"user", "assistant", "system", "developer"})


def messages_of(value: object, tools: ResponseTools) -> list[Json]:
    """The messages for `input`, a text or a list of items. Raises CallerError.

    Consecutive texts and calls of the assistant become one message, as in chat completions.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", "must be a text or a non-empty list of items")
    messages = _Messages(tools)
    for item, where in objects(value, "input"):
        messages.add(item, where)
    return messages.messages


class _Messages:
    """The messages so far. `_thought` is the reasoning for the next message or call."""

    def __init__(self, tools: ResponseTools) -> None:
        self.messages: list[Json] = []
        self._tools = tools
        self._thought = ""
        self._call_ids: dict[str, str] = {}  # by the call item's id, which some results name instead

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            raise wrong(f"{where}.type", "must be a string")
        if kind == "message":
            self._message(item, where)
        elif kind in CALL_ITEMS:
            self._call(item, where)
        elif kind in _RESULTS:
            self._result(item, where)
        elif kind == "reasoning":
            self._thought += _thought(item, where)
        elif kind == "item_reference":
            if not str(item.get("id")).startswith("rs_"):  # reasoning may be left out without a note
                self._note("[an item that is not stored any more]")
        elif kind not in _SILENT:
            self._note(note(kind, item))

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}")
        content, place = item.get("content"), f"{where}.content"
        message = {"role": role, "content": _content(content_of(content) if role == "assistant" else content, place)}
        if role == "assistant":
            self._think(message)
        self._thought = ""
        self.messages.append(message)

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        kind = CALL_ITEMS[item["type"]]
        name, namespace = kind, item.get("namespace")
        if TOOL_KINDS[kind].has_name:
            name = a_text(item.get("name"), f"{where}.name")
        function = {
            "name": self._tools.flat(kind, name, namespace if isinstance(namespace, str) else None),
            "arguments": TOOL_KINDS[kind].arguments(item, where),
        }
        call_id = a_text(item.get("call_id") or item.get("id"), f"{where}.call_id")
        self._call_ids[str(item.get("id"))] = call_id
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, item: Mapping[str, Any], where: str) -> None:
        self._thought = ""
        call_id = item.get("call_id") or self._call_ids.get(str(item.get("id"))) or item.get("id")
        content = output_of(item, where, _content)
        if call_id is None and item["type"] == "tool_search_output":
            return  # the result of a search that the vendor ran
        self.messages.append({"role": "tool", "tool_call_id": a_text(call_id, f"{where}.call_id"), "content": content})

    def _note(self, text: str) -> None:
        message = self._assistant()
        said = message["content"]
        message["content"] = [*said, text_part(text)] if isinstance(said, list) else f"{said}\n{text}" if said else text

    def _assistant(self) -> Json:
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._thought:
            last = {"role": "assistant", "content": None}
            self._think(last)
            self.messages.append(last)
        return last

    def _think(self, message: Json) -> None:
        if self._thought:
            message["reasoning_content"] = self._thought
        self._thought = ""


_RESULTS: Final = frozenset((
    "function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
    "apply_patch_call_output", "tool_search_output",
))  # fmt: skip
_SILENT: Final = frozenset(("additional_tools", "mcp_list_tools", "compaction_trigger"))
"""Items without a meaning for the model."""


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item, or its summary; none if it is encrypted."""
    for key in ("content", "summary"):
        texts = [part.get("text") for part, _ in objects(item.get(key), f"{where}.{key}")]
        if said := "".join(text for text in texts if isinstance(text, str)):
            return said
    return ""


def _content(content: object, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    a_list(content, where)
    return one_or_parts([part for item, place in objects(content, where) for part in _parts(item, place)])


def _parts(part: Mapping[str, Any], where: str) -> Iterator[Json]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        yield text_part(a_text(part.get("text"), f"{where}.text"))
    elif kind == "refusal":
        yield text_part(content_text(part.get("refusal")))
    elif kind == "input_image" and part.get("image_url") is not None:
        url = a_text(part["image_url"], f"{where}.image_url")
        yield {"type": "image_url", "image_url": without_nones(url=url, detail=part.get("detail"))}
    elif kind == "input_audio":
        yield {"type": "input_audio", "input_audio": part.get("input_audio")}
    elif isinstance(kind, str):
        yield text_part(note(kind, part))
    else:
        raise wrong(f"{where}.type", "must be a string")


# Fields that are translated, echoed in the answer, or meaningless for an engine. All other fields are passed on.
_OWN_FIELDS: Final = frozenset({
    "access_programs", "background", "context_management", "conversation", "image", "include", "input", "instructions",
    "max_output_tokens", "max_tool_calls", "metadata", "moderation", "parallel_tool_calls", "previous_response_id",
    "prompt", "prompt_cache_options", "prompt_cache_retention", "reasoning", "store", "stream", "stream_options",
    "text", "tool_choice", "tools", "top_logprobs", "truncation",
})  # fmt: skip
_REFUSED: Final = {
    "conversation": "a stored conversation",
    "moderation": "moderation",
    "prompt": "a stored prompt",
}
LOGPROBS: Final = "message.output_text.logprobs"


def wants_logprobs(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("top_logprobs")) or LOGPROBS in a_list(fields.get("include") or [], "include")


def chat_request(fields: Mapping[str, Any]) -> Json:
    """The fields of a chat-completions body. Raises CallerError for fields that it cannot express.

    `previous_response_id` is left out. Put the items of that response, and of those before it, into `input` first.
    """
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise unsupported(name, what)
    options = dict(an_object_or_none(fields.get("stream_options"), "stream_options"))
    options.pop("include_obfuscation", None)
    chat = without_nones(**{name: value for name, value in fields.items() if name not in _OWN_FIELDS})
    tools = ResponseTools(fields)
    chat["messages"] = _messages(fields, tools)
    chat |= tool_fields(fields, tools) | _format(fields) | _limits(fields) | streamed(fields, options)
    return chat


def _messages(fields: Mapping[str, Any], tools: ResponseTools) -> list[Json]:
    messages = messages_of(fields.get("input"), tools)
    instructions = fields.get("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": a_text(instructions, "instructions")})
    if not messages:  # items that say nothing are left out
        raise wrong("input", "has no content")
    return ordered(messages)


def _format(fields: Mapping[str, Any]) -> Json:
    """`text.format`, as `response_format`."""
    wanted = an_object_or_none(an_object_or_none(fields.get("text"), "text").get("format"), "text.format")
    kind = wanted.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema":
        raise unsupported("text.format", f"the format {kind!r}")
    schema = without_nones(**{key: wanted.get(key) for key in ("name", "description", "schema", "strict")})
    return {"response_format": {"type": kind, "json_schema": schema}}


def _limits(fields: Mapping[str, Any]) -> Json:
    limit, effort = (
        fields.get("max_output_tokens"),
        an_object_or_none(fields.get("reasoning"), "reasoning").get("effort"),
    )
    chat = without_nones(
        max_tokens=None if limit is None else a_limit(limit, "max_output_tokens"), reasoning_effort=effort
    )
    if wants_logprobs(fields):
        chat |= {"logprobs": True} | without_nones(top_logprobs=fields.get("top_logprobs"))
    return chat
