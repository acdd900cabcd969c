"""The grammars of both APIs' event streams, as the tables of `docs/translation.md` have them, and a reader.

A reader checks what a table cannot say, too: indexes, ids, and that what is told as done is what was told before.
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]

RESPONSES = {
    "start": {"created": "created"},
    "created": {"in_progress": "between"},
    "between": {
        "output_item.added message": "item",
        "output_item.added reasoning": "item",
        "output_item.added function_call": "function_call",
        "output_item.added custom_tool_call": "custom_tool_call",
        "output_item.added *": "call",
        "completed": "end",
        "incomplete": "end",
    },
    "item": {"content_part.added": "part", "reasoning_summary_part.added": "part", "output_item.done": "between"},
    "part": {"*.delta": "part", "*.done": "told"},
    "told": {"content_part.done": "item", "reasoning_summary_part.done": "item"},
    "function_call": {"function_call_arguments.delta": "function_call", "function_call_arguments.done": "call"},
    "custom_tool_call": {"custom_tool_call_input.delta": "custom_tool_call", "custom_tool_call_input.done": "call"},
    "call": {"output_item.done": "between"},
}
"""state -> event -> next state. A `keepalive` may come in each state but `start`; `failed` and `error` end each."""

PARTS = {
    "content_part.added": ("content", "content_index"),
    "reasoning_summary_part.added": ("summary", "summary_index"),
}
"""The event that begins a part -> the item's list of such parts, and the event's index in it."""

TEXTS = ("output_text.", "refusal.", "reasoning_text.", "reasoning_summary_text.")

MESSAGES = {
    "start": {"message_start": "between"},
    "between": {"content_block_start": "block", "message_delta": "ending"},
    "block": {"content_block_delta": "block", "content_block_stop": "between"},
    "ending": {"message_stop": "end"},
}
"""A `ping` may come in each state, and an `error` ends each."""

DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def events(written: bytes) -> list[Event]:
    """The data of the events; each has its name. Comments are left out."""
    read = []
    for event in written.decode().split("\n\n")[:-1]:
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        if lines:
            name, data = lines
            read.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {read[-1]['type']}"
    return read


def read_response(written: bytes) -> Event:
    """The response that a whole stream tells."""
    state, items, texts = "start", list[Event](), list[str]()
    last: Event = {}
    for number, event in enumerate(events(written)):
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if kind == "keepalive":
            assert state != "start"
            continue
        state, last = RESPONSES[state][_named(kind, event, RESPONSES[state])], event
        if kind in ("created", "in_progress"):
            assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        elif kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            texts = []
        elif "output_index" in event:
            assert event["output_index"] == len(items) - 1
            assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
            _grow(items, texts, kind, event)
    assert state == "end"
    assert last["response"]["output"] == items
    response: Event = last["response"]
    return response


def _grow(items: list[Event], texts: list[str], kind: str, event: Event) -> None:
    """An event of the last item. `texts` has the deltas of what is open in it."""
    item = items[-1]
    if kind.endswith(".delta"):
        texts.append(event["delta"])
    elif kind in PARTS:
        parts, index = PARTS[kind]
        assert event[index] == len(item[parts])
        item[parts].append(event["part"])
        texts.clear()
    elif kind.endswith("_part.done"):
        item[PARTS[kind.replace("done", "added")][0]][-1] = event["part"]
    elif kind == "output_item.done":
        assert (event["item"]["id"], event["item"]["type"]) == (item["id"], item["type"])
        assert [event["item"].get(parts) for parts, _ in PARTS.values()] == [
            item.get(parts) for parts, _ in PARTS.values()
        ]
        items[-1] = event["item"]
    else:
        [text] = [event[key] for key in ("text", "refusal", "arguments", "input") if key in event]
        assert text == "".join(texts)


def _named(kind: str, event: Event, known: dict[str, str]) -> str:
    """The table's name of an event."""
    if kind == "output_item.added":
        own = f"{kind} {event['item']['type']}"
        return own if own in known else f"{kind} *"
    if kind in known:
        return kind
    return f"*.{kind.rpartition('.')[2]}" if kind.startswith(TEXTS) else kind


def read_message(written: bytes) -> Event:
    """The message that a whole stream tells."""
    state, text = "start", ""
    message: Event = {}
    for event in events(written):
        kind = event["type"]
        if kind == "ping":
            continue
        state = MESSAGES[state][kind]
        if kind == "message_start":
            message = event["message"]
            assert (message["content"], message["stop_reason"]) == ([], None)
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            text = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][-1], event["delta"]
            assert event["index"] == len(message["content"]) - 1
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
                continue
            assert delta["type"] == DELTAS[block["type"]]
            assert not block.get("signature"), "the signature is last"
            text += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        elif kind == "content_block_stop":
            assert event["index"] == len(message["content"]) - 1
            _close(message["content"][-1], text)
        elif kind == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    assert state == "end"
    return message


def _close(block: Event, text: str) -> None:
    if block["type"] == "tool_use":
        assert block["name"]
        block["input"] = json.loads(text) if text else {}
        assert isinstance(block["input"], dict)
    else:
        block[block["type"]] = text
