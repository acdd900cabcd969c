"""What coding agents send: histories with items that no chat has, their own tools, and what they get back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseOutputItem
from pydantic import TypeAdapter

from plait.backends.errors import ContextLengthError
from plait.backends.protocol.api_errors import MESSAGE_ERRORS, RESPONSE_ERRORS
from plait.backends.protocol.context_overflow import overflow_error
from plait.backends.translation.translation import TRANSLATIONS
from tests.backends.translation.chat_answers import message, stream, whole
from tests.backends.translation.event_grammars import events, read_response

RESPONSES, ANTHROPIC = TRANSLATIONS["/v1/responses"], TRANSLATIONS["/v1/messages"]
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
HI = {"role": "user", "content": "hi"}


def response_chat(*items: Any, **fields: Any) -> dict[str, Any]:
    return RESPONSES.to_chat({"model": "m", "input": list(items) or "hi", **fields})


def message_chat(*given: Any, **fields: Any) -> dict[str, Any]:
    return ANTHROPIC.to_chat({"model": "m", "max_tokens": 9, "messages": list(given) or [HI], **fields})


def names(chat: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in chat.get("tools", ())]


def roles(chat: dict[str, Any]) -> list[str]:
    return [said["role"] for said in chat["messages"]]


# Responses: tools.

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start:"},
}
SPACE = {"type": "namespace", "name": "m", "description": "d", "tools": [FUNCTION, PATCH]}


@pytest.mark.parametrize(
    ("tool", "name", "arguments", "item"),
    [
        (FUNCTION, "look", '{"a":1}', {"type": "function_call", "name": "look", "arguments": '{"a":1}'}),
        (PATCH, "apply_patch", '{"input":"x"}', {"type": "custom_tool_call", "name": "apply_patch", "input": "x"}),
        (PATCH, "apply_patch", "*** Begin", {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin"}),
        (SPACE, "m__look", "", {"type": "function_call", "namespace": "m", "name": "look", "arguments": "{}"}),
        (
            SPACE, "m__apply_patch", '{"input":"x"}',
            {"type": "custom_tool_call", "namespace": "m", "name": "apply_patch", "input": "x"},
        ),
        (
            {"type": "local_shell"}, "local_shell", '{"command":["ls"],"timeout_ms":5}',
            {"type": "local_shell_call", "action": {
                "type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5, "user": None, "working_directory": None,
            }},
        ),
        (
            {"type": "shell"}, "shell", '{"commands":["ls"]}',
            {"type": "shell_call", "environment": None,
             "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}},
        ),
        (
            {"type": "apply_patch"}, "apply_patch", '{"type":"delete_file","path":"a"}',
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        ),
        (
            {"type": "tool_search", "execution": "client"}, "tool_search", '{"query":"q"}',
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}},
        ),
    ],
)  # fmt: skip
def test_a_tool_is_a_function_to_the_engine_and_comes_back_as_itself(
    tool: dict[str, Any], name: str, arguments: str, item: dict[str, Any]
) -> None:
    fields = {"model": "m", "input": "hi", "tools": [tool]}
    assert name in names(RESPONSES.to_chat(fields))
    said = message(calls=[(name, arguments)])
    made = json.loads(RESPONSES.answer(fields).whole(whole(said, "tool_calls")))
    [told] = made["output"]
    assert {key: value for key, value in told.items() if key not in ("id", "status", "call_id")} == item
    assert (told["status"], told["call_id"]) == ("completed", "call_0")
    assert ITEM.validate_python(told).type == item["type"]
    streamed = read_response(RESPONSES.answer(fields).feed(b"".join(stream(said, "tool_calls"))))["output"]
    assert [{**one, "id": ""} for one in streamed] == [{**told, "id": ""}]
    result = f"{told['type']}_output".replace("search_call", "search")
    back = response_chat(HI, told, {"type": result, "call_id": "call_0", "output": "o"}, tools=[tool])
    assert roles(back) == ["user", "assistant", "tool"]
    [call] = back["messages"][1]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_0", name)


def test_names_that_meet_stay_apart() -> None:
    tools = [{**FUNCTION, "name": "m__look"}, SPACE, {"type": "apply_patch"}, PATCH]
    chat = response_chat(tools=tools, tool_choice={"type": "function", "name": "look", "namespace": "m"})
    assert names(chat) == ["m__look", "m__look_2", "m__apply_patch", "apply_patch", "apply_patch_2"]
    assert chat["tool_choice"]["function"]["name"] == "m__look_2"


def test_the_model_is_told_the_grammar_of_a_custom_tool() -> None:
    assert "start:" in response_chat(tools=[PATCH])["tools"][0]["function"]["description"]


def test_tools_that_the_vendor_runs_are_left_out() -> None:
    hosted = [{"type": kind} for kind in ("web_search", "image_generation", "mcp", "tool_search")]
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    fields = {"model": "m", "input": "hi", "tools": [FUNCTION, *hosted, container], "tool_choice": "required"}
    assert names(RESPONSES.to_chat(fields)) == ["look"]
    assert RESPONSES.ignored(fields) == [
        "tools[1]:web_search", "tools[2]:image_generation", "tools[3]:mcp", "tools[4]:tool_search", "tools[5]:shell",
    ]  # fmt: skip
    assert "tools" not in response_chat(tools=hosted)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION, {"type": "web_search"}]}
    assert names(response_chat(tools=[FUNCTION, *hosted], tool_choice=allowed)) == ["look"]


def test_tools_that_a_search_has_found_are_there() -> None:
    call = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}}
    found = {"type": "tool_search_output", "call_id": "c", "tools": [SPACE]}
    more = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}
    chat = response_chat(HI, call, more, found)
    assert names(chat) == ["look", "m__look", "m__apply_patch"]
    assert roles(chat) == ["user", "assistant", "tool"]


def test_a_tool_that_the_model_has_made_up_is_a_function() -> None:
    answer = RESPONSES.answer({"model": "m", "input": "hi", "tools": [SPACE]})
    made = Response.model_validate_json(answer.whole(whole(message(calls=[("jump", "{}")]), "tool_calls")))
    assert (made.output[0].type, getattr(made.output[0], "name", None)) == ("function_call", "jump")


# Responses: histories.


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "cats"}},
        {"type": "mcp_call", "id": "c", "name": "cats", "arguments": "{}", "output": "o"},
        {"type": "of_tomorrow", "content": [{"cats": 1}]},
    ],
)
def test_an_item_that_no_chat_has_is_a_note_of_the_assistants(item: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "o"}
    for items in ([HI, item, call, result], [HI, call, item, result]):
        chat = response_chat(*items)
        assert roles(chat) == ["user", "assistant", "tool"]
        assert "cats" in chat["messages"][1]["content"]


def test_items_that_say_nothing_are_left_out() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    reference = {"type": "item_reference", "id": "rs_2"}
    listed = {"type": "mcp_list_tools", "id": "l", "tools": []}
    assert response_chat(HI, thought, reference, listed)["messages"] == [HI]
    assert "not stored" in response_chat(HI, {"type": "item_reference", "id": "msg_1"})["messages"][1]["content"]


def test_a_summary_stands_for_the_thought() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    [_, said] = response_chat(HI, thought, {"role": "assistant", "content": "a"})["messages"]
    assert said["reasoning_content"] == "hm"


def test_a_result_that_names_the_item_finds_its_call() -> None:
    call = {"type": "local_shell_call", "id": "l1", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}
    chat = response_chat(HI, call, {"type": "local_shell_call_output", "id": "l1", "output": "o"})
    assert chat["messages"][2] == {"role": "tool", "tool_call_id": "c", "content": "o"}


def test_files_are_notes() -> None:
    parts = [{"type": "input_file", "filename": "a.pdf", "file_data": "data:x"}, {"type": "input_text", "text": "?"}]
    said = response_chat({"role": "user", "content": parts})["messages"][0]["content"]
    assert said[0]["text"] == '[input_file: {"filename":"a.pdf"}]'


# Both: the order of messages.


def test_what_the_system_says_first_is_one_message() -> None:
    developer = [{"type": "input_text", "text": "D"}]
    chat = response_chat(
        {"role": "developer", "content": developer}, {"role": "system", "content": "S"}, HI, instructions="I"
    )
    assert chat["messages"] == [{"role": "system", "content": "I\n\nD\n\nS"}, HI]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_the_system_says_later_never_parts_a_call_from_its_result(role: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "o"}
    chat = response_chat(HI, call, {"role": role, "content": "S"}, result, HI)
    assert roles(chat) == ["user", "assistant", "tool", "user"]
    assert chat["messages"][3]["content"] == "<system-reminder>\nS\n</system-reminder>\n\nhi"


def test_a_system_message_amid_a_message_api_history() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "o"}]}
    system = {"role": "system", "content": "skills"}
    assert roles(message_chat(HI, use, system, result, system="S")) == ["system", "user", "assistant", "tool", "user"]
    chat = message_chat(HI, system, system="S")
    assert roles(chat) == ["system", "user"]
    assert "skills" in chat["messages"][1]["content"]
    longer = message_chat(HI, system, use, result, system="S")
    assert longer["messages"][:2] == chat["messages"], "what was cached stays"


def test_parallel_results_of_ids_that_come_again_are_behind_their_calls() -> None:
    def turn(*ids: str) -> list[dict[str, Any]]:
        calls = [{"type": "function_call", "call_id": one, "name": "look", "arguments": "{}"} for one in ids]
        results = [{"type": "function_call_output", "call_id": one, "output": one} for one in reversed(ids)]
        return [*calls, results[0], {"role": "developer", "content": "S"}, *results[1:]]

    chat = response_chat(HI, *turn("a", "b"), *turn("a", "b"))
    assert roles(chat) == ["user", "assistant", "tool", "tool", "user", "assistant", "tool", "tool", "user"]


# Messages.

PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"type": "document", "title": "T", "source": PDF}, "application/pdf"),
        ({"type": "document", "source": {"type": "url", "url": "http://x/a.pdf"}}, "http://x/a.pdf"),
        ({"type": "document", "source": {"type": "file", "file_id": "f7"}}, "f7"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
        ({"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "d29yZHM="}}, "words"),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "Gr\u00fc\u00dfe"}},
            "read",
        ),
        ({"type": "document", "source": {"type": "content", "content": "words"}}, "words"),
        (
            {
                "type": "search_result",
                "title": "T",
                "source": "http://x",
                "content": [{"type": "text", "text": "words"}],
            },
            "words",
        ),
        ({"type": "tool_reference", "tool_name": "Grep"}, "Grep"),
        ({"type": "image", "source": {"type": "file", "file_id": "f7"}}, "f7"),
        ({"type": "container_upload", "file_id": "f7"}, "f7"),
        ({"type": "of_tomorrow", "said": "words"}, "words"),
    ],
)
def test_a_block_that_no_chat_has_is_text_in_its_place(block: dict[str, Any], told: str) -> None:
    inside = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "read"}, block]}
    for content in ([block], [inside]):
        [said] = message_chat({"role": "user", "content": content})["messages"]
        assert told in json.dumps(said)
        assert "AA==" not in json.dumps(said)


def test_server_tools_in_the_history_are_notes_of_the_assistants() -> None:
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "cats"}}
    found = {"type": "web_search_result", "title": "Cats", "url": "http://x", "encrypted_content": "secret"}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]}
    answer = {"role": "assistant", "content": [use, result, {"type": "text", "text": "There."}]}
    [_, said, _] = message_chat(HI, answer, HI)["messages"]
    told = json.dumps(said["content"])
    assert "cats" in told
    assert "http://x" in told
    assert "secret" not in told


def test_anthropics_own_tools() -> None:
    own = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    fields = {"model": "m", "max_tokens": 9, "messages": [HI], "tools": own, "mcp_servers": [{"name": "s"}]}
    assert names(ANTHROPIC.to_chat(fields)) == ["bash", "str_replace_based_edit_tool"]
    assert ANTHROPIC.ignored(fields) == ["tools[2]:web_search_20250305", "tools[3]:mcp_toolset", "mcp_servers"]


def test_a_context_overflow_in_a_stream() -> None:
    said = "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens"
    event = b"data: " + json.dumps({"error": {"message": said, "code": 400}}).encode() + b"\n\n"
    begun = stream(message("a"))[0]
    [*_, raised] = events(ANTHROPIC.answer({}).feed(begun + event))
    assert raised["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 9000 tokens > 8192 maximum",
    }
    [*_, failed, error] = events(RESPONSES.answer({}).feed(begun + event))
    assert failed["response"]["error"]["code"] == error["code"] == error["error"]["code"] == "context_length_exceeded"


def test_an_output_limit_without_room_is_not_a_prompt_that_is_too_long() -> None:
    said = (
        "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is 40960 "
        "tokens and your request has 12200 input tokens (32000 > 40960 - 12200)."
    )
    less = "input length and `max_tokens` exceed context limit: 12200 + 32000 > 40960"
    counted = ContextLengthError("no", prompt_tokens=12_200, output_tokens=32_000, context_tokens=40_960)
    too_long = ContextLengthError("no", prompt_tokens=50_000, output_tokens=32_000, context_tokens=40_960)
    event = b"data: " + json.dumps({"error": {"message": said, "code": 400}}).encode() + b"\n\n"
    [raised] = events(ANTHROPIC.answer({}).feed(event))
    for error in (
        raised,
        json.loads(MESSAGE_ERRORS.body(counted)),
        json.loads(MESSAGE_ERRORS.body(overflow_error(said))),
    ):
        assert error["error"] == {"type": "invalid_request_error", "message": less}
    assert "prompt is too long: 50000 tokens > 40960" in json.loads(MESSAGE_ERRORS.body(too_long))["error"]["message"]
    [failed] = events(RESPONSES.answer({}).feed(event))
    for error in (
        failed,
        json.loads(RESPONSE_ERRORS.body(counted)),
        json.loads(RESPONSE_ERRORS.body(overflow_error(said))),
    ):
        assert (error["error"]["code"], error["error"]["param"]) == ("integer_above_max_value", "max_output_tokens")
    assert json.loads(RESPONSE_ERRORS.body(too_long))["error"]["code"] == "context_length_exceeded"
