"""What a chat's fields beside its messages do to the prompt, for each kind of engine.

A field is *inert* (without effect on the prompt), *rendered* (here, as that kind of engine renders it), or unknown. An
unknown field makes the gateway's prompt a guess, so the engine has to render the chat. A field that is missing in the
tables is unknown, so that a new field of an engine is never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from plait.backends.protocol.dialects import ChatForm
from plait.backends.protocol.openai import ChatRequest

_SAMPLING: Final = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "length_penalty", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "seed", "n",
        "best_of", "use_beam_search", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids",
        "stop_regex", "no_stop_trim", "include_stop_str_in_output", "ignore_eos", "bad_words", "allowed_token_ids",
        "thinking_token_budget", "repetition_detection", "custom_logit_processor",
    }
)  # fmt: skip
_GRAMMARS: Final = frozenset(
    {
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "guided_decoding_backend", "guided_whitespace_pattern", "json_schema", "regex", "ebnf", "structural_tag",
        "parallel_tool_calls",
    }
)  # fmt: skip
_ANSWERS: Final = frozenset(
    {
        "stream", "stream_options", "stream_interval", "echo", "skip_special_tokens", "spaces_between_special_tokens",
        "include_reasoning", "separate_reasoning", "stream_reasoning", "return_token_ids", "return_tokens_as_token_ids",
        "return_token_offsets", "return_prompt_text", "return_prompt_token_ids", "return_hidden_states",
        "return_routed_experts", "return_cached_tokens_details", "return_spec_tokens_details", "return_meta_info",
    }
)  # fmt: skip
_ACCOUNTS: Final = frozenset(
    {
        "model", "messages", "user", "priority", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "cache_salt", "extra_key", "request_id", "rid", "session_id",
        "plait", "vllm_xargs", "custom_params", "lora_path", "kv_transfer_params", "ec_transfer_params",
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "data_parallel_rank",
    }
)  # fmt: skip
INERT: Final = _SAMPLING | _GRAMMARS | _ANSWERS | _ACCOUNTS

RENDERED: Final[Mapping[ChatForm, frozenset[str]]] = {
    "vllm": frozenset(
        {
            "tools", "tool_choice", "chat_template", "chat_template_kwargs", "reasoning_effort", "documents",
            "add_generation_prompt", "continue_final_message",
        }
    ),
    "sglang": frozenset({"tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "reasoning"}),
}  # fmt: skip
_INERT_TOO: Final[Mapping[ChatForm, frozenset[str]]] = {"vllm": frozenset(), "sglang": frozenset({"documents"})}
_KNOWN: Final = {form: INERT | RENDERED[form] | _INERT_TOO[form] for form in RENDERED}

_EFFORTS: Final = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
"""The words that SGLang takes. SGLang's validators convert any other effort to a number."""

_TYPES: Final = re.compile(rb'"type":(?:"([^"]*)"|\[([^\]]*)\])')
_SCHEMA_TYPES: Final = frozenset(
    {b"object", b"string", b"number", b"integer", b"boolean", b"array", b"null", b"function", b""}
)  # fmt: skip

_PLAIN_ROLES: Final = frozenset({"system", "user", "assistant"})
_YES: Final = frozenset({"1", "true", "yes", "y", "on"})
_NULL: Final = b"null"


class Renderers(NamedTuple):
    """How the engines of a model that report render chats.

    `form` is SGLang's if all are SGLang. `is_mixed`: some are SGLang, some are not. `prepares`: every SGLang reports
    the digest of the gateway's own form of messages and tools. `drops_tools` says whether the other engines hide tools
    for `tool_choice: none`; None: some do, some do not.
    """

    form: ChatForm = "vllm"
    is_mixed: bool = False
    prepares: bool = False
    drops_tools: bool | None = False


AS_VLLM: Final = Renderers()
"""For a model without an engine that has reported."""


class RenderedFields(NamedTuple):
    """The tools and variables for the chat template, and the `form` of its messages.

    `is_exact`: each engine of the model renders the same prompt. `is_plain`: any engine with this chat template does,
    whatever form it gives to messages and tools.
    """

    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None
    is_exact: bool
    is_plain: bool
    form: ChatForm = "vllm"


UNCHANGED: Final = RenderedFields(None, None, is_exact=True, is_plain=False)
"""A prompt that is no chat, or a chat in vLLM's form whose fields are all inert."""


def rendered_fields(
    request: ChatRequest, given: Mapping[str, msgspec.Raw] | None, renderers: Renderers
) -> RenderedFields:
    """How engines render a chat's fields. `given` has the JSON of each field in the body; None: see `request` only.

    A field of null counts as not given.
    """
    known = _KNOWN[renderers.form]
    is_known = (
        given is None
        or given.keys() <= known
        or all(name in known or bytes(value) == _NULL for name, value in given.items())
    )
    render = _as_sglang if renderers.form == "sglang" else _as_vllm
    tools, variables, is_exact = render(request, renderers)
    is_plain = False  # only read where SGLang serves the model
    if renderers.form == "sglang" or renderers.is_mixed:
        is_changed = tools or variables or request.continue_final_message or not request.add_generation_prompt
        is_plain = is_known and not is_changed and are_plain(request.messages)
        is_exact = is_plain or (is_exact and renderers.prepares and not renderers.is_mixed)
    return RenderedFields(tools, variables, is_known and is_exact, is_plain, renderers.form)


def are_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages have a role and a text only, and the last is not the assistant's."""
    for message in messages:
        if len(message) != 2 or message.get("role") not in _PLAIN_ROLES or type(message.get("content")) is not str:
            return False
    return bool(messages) and messages[-1]["role"] != "assistant"


_Rendered = tuple[list[dict[str, Any]] | None, dict[str, Any] | None, bool]
"""Tools, variables of the template, and whether all fields are known."""


def _as_vllm(request: ChatRequest, renderers: Renderers) -> _Rendered:
    """Render as vLLM 0.25 to 0.33: a field of the body overrides the same option in `chat_template_kwargs`."""
    tools, variables, is_known = request.tools, request.chat_template_kwargs, True
    if tools and request.tool_choice == "none":
        is_known = renderers.drops_tools is not None
        tools = None if renderers.drops_tools else tools
    if request.reasoning_effort is not None:
        effort = request.reasoning_effort
        variables = {"enable_thinking": effort != "none", **(variables or {}), "reasoning_effort": effort}
    if request.documents is not None:
        variables = {**(variables or {}), "documents": request.documents}
    return tools, variables, is_known


def _as_sglang(request: ChatRequest, _renderers: Renderers) -> _Rendered:
    """Render as SGLang 0.5.13 to 0.5.23: an option in `chat_template_kwargs` overrides the same field of the body."""
    reasoning = request.reasoning if isinstance(request.reasoning, dict) else {}
    efforts = (reasoning.get("effort"), reasoning.get("reasoning_effort"), request.reasoning_effort)
    effort = next((one for one in efforts if one is not None), None)
    thinks = effort != "none" if effort is not None else _is_enabled(reasoning) or None
    variables = _without_null_effort(request.chat_template_kwargs)
    if thinks is not None:
        variables = {"thinking": thinks, "enable_thinking": thinks, **(variables or {})}
    if effort is not None:
        variables = {"reasoning_effort": effort, **(variables or {})}
    is_known = (
        _are_usual(request.tools)
        and (effort is None or (isinstance(effort, str) and effort in _EFFORTS))
        and not request.continue_final_message
        and request.messages[-1:] != []
        and request.messages[-1].get("role") != "assistant"
        and not any(message.get("tools") for message in request.messages)
    )
    return _chosen_tools(request), variables, is_known


def _without_null_effort(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    if variables is None or variables.get("reasoning_effort", "") is not None:
        return variables
    return {name: value for name, value in variables.items() if name != "reasoning_effort"}


def _are_usual(tools: list[dict[str, Any]] | None) -> bool:
    """Whether the schemas of tools only have JSON Schema's types. SGLang renames other types."""
    if not tools:
        return True
    for one, several in _TYPES.findall(msgspec.json.encode(tools)):
        if not {one, *several.replace(b'"', b"").split(b",")} <= _SCHEMA_TYPES:
            return False
    return True


def _is_enabled(reasoning: Mapping[str, Any]) -> bool:
    enabled = reasoning.get("enabled")
    enabled = reasoning.get("enable", False) if enabled is None else enabled
    return enabled.strip().lower() in _YES if isinstance(enabled, str) else bool(enabled)


def _chosen_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that SGLang gives to the template: none for `tool_choice: none`, a named one alone."""
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return None
    if not isinstance(choice, Mapping):
        return request.tools
    wanted = choice.get("function")
    name = wanted.get("name") if isinstance(wanted, Mapping) else None
    return [tool for tool in request.tools if _name(tool) == name] or None


def _name(tool: Mapping[str, Any]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None
