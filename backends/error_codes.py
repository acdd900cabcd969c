"""Every code of an error that a client can get from Plait: what it means, and what to do.

An engine's own codes pass through and are not here. docs/errors.md is this table; `plait explain CODE` shows a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Again(Enum):
    """Whether the same request may be sent again."""

    AFTER = "later, after `Retry-After` if there is one"
    NOW = "at once"
    CHANGED = "not unchanged"
    TRANSIENT = "if the error is `transient`"


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """A code, the HTTP status that it comes with, and sentences for a user."""

    code: str
    status: int
    again: Again
    meaning: str
    do: str


AFTER, NOW, CHANGED, TRANSIENT = Again

REQUEST: Final = (
    ErrorCode("invalid_http", 400, CHANGED, "The request is not valid HTTP/1.1, or its `Host` or framing is not.",
              "Send it with an HTTP client; look at what a proxy in between does."),
    ErrorCode("pipelined", 400, AFTER, "More than eight requests wait on one connection for earlier answers.",
              "Wait for answers, or open more connections."),
    ErrorCode("too_many_headers", 431, CHANGED, "The request has more headers than `max_headers`.", "Send fewer."),
    ErrorCode("headers_too_large", 431, CHANGED, "Target and headers have more bytes than `max_header_bytes`.",
              "Send less, or raise the limit."),
    ErrorCode("request_timeout", 408, NOW, "Headers or body did not come in time.",
              "Look at the client's network; raise `header_timeout_s` or `body_timeout_s` for slow clients."),
    ErrorCode("no_websocket", 426, CHANGED, "The route is no WebSocket.", "Use HTTP, as clients then do."),
    ErrorCode("body_too_large", 413, CHANGED,
              "The body, decoded, has more bytes than `max_body_bytes`, or `max_multipart_bytes` if it has files.",
              "Send less, or raise the limit."),
    ErrorCode("unsupported_content_encoding", 415, CHANGED, "The body is compressed in a way that is not known here.",
              "Use what `Accept-Encoding` of the answer lists."),
    ErrorCode("malformed_encoding", 400, CHANGED, "The body is not compressed as its `Content-Encoding` says.",
              "Compress it as the header says, or send it plain."),
    ErrorCode("malformed_form", 400, CHANGED, "The body is no `multipart/form-data` with its boundary, or breaks off.",
              "Let the client make the form and its `Content-Type`."),
    ErrorCode("too_many_fields", 400, CHANGED, "The form has more than 1,000 fields.", "Send fewer."),
    ErrorCode("no_room_for_upload", 503, AFTER, "The gateway's disk takes no more of an upload.",
              "Send it again; look at the room in the folder for temporary files."),
    ErrorCode("invalid_annotation", 400, CHANGED,
              "A `plait-` header or a key of `plait` is unknown, invalid, contradicted, or has no meaning here.",
              "Write it as the message says, there or where it belongs."),
    ErrorCode("invalid_json", 400, CHANGED, "The body is not valid JSON in UTF-8.", "Mend it where the message says."),
    ErrorCode("json_too_deep", 400, CHANGED, "The body nests arrays and objects too deep.", "Make it flatter."),
    ErrorCode("json_too_many_values", 400, CHANGED, "The body has too many values.", "Send it in several requests."),
    ErrorCode("invalid_api_key", 401, CHANGED, "The API key is missing or unknown.",
              "Send `Authorization: Bearer KEY` with a key of the configuration, or one that was issued."),
    ErrorCode("key_expired", 401, CHANGED, "The API key was issued for a time that is over.",
              "Have another one issued."),
    ErrorCode("key_revoked", 401, CHANGED, "The API key was revoked.", "Have another one issued."),
    ErrorCode("model_not_allowed", 403, CHANGED, "The API key may not call the model.",
              "Call one of its `models`, or have them changed."),
    ErrorCode("not_found", 404, CHANGED, "There is no such path.", "See docs/routes.md; the base URL ends in `/v1`."),
    ErrorCode("method_not_allowed", 405, CHANGED, "The path is there, and takes another method.",
              "Use the method that docs/routes.md names."),
    ErrorCode("model_not_found", 404, CHANGED, "No engine of the fleet serves the model.",
              "Ask `GET /v1/models` for those that are served."),
    ErrorCode("no_such_route", 404, CHANGED, "No engine that serves the model has this route.",
              "Use another route, or an engine that has it."),
    ErrorCode("unsupported", 501, CHANGED, "The request is valid, but Plait does not support a part of it.",
              "Leave out what the message names."),
    ErrorCode("context_length_exceeded", 400, CHANGED, "The prompt, alone or with its output, exceeds the context.",
              "Shorten the prompt or lower `max_tokens`."),
    ErrorCode("prompt_without_spaces", 400, CHANGED, "A part of the prompt is too long without a place to cut it.",
              "Put spaces into it, or shorten it."),
    ErrorCode("template_timeout", 503, AFTER, "The machine had too little CPU time to render the chat's template.",
              "Send it again; give the gateway more CPU time."),
    ErrorCode("previous_response_not_found", 400, CHANGED, "The response that this one follows is not stored here.",
              "Send the conversation whole; store responses where gateways share a store."),
)  # fmt: skip

LIMITS: Final = (
    ErrorCode("calls_per_second", 429, AFTER, "The tenant's rate of calls is used up.",
              "Send fewer calls, or raise `calls_per_s` of the key."),
    ErrorCode("tokens_per_second", 429, AFTER, "The tenant's rate of tokens is used up.",
              "Send less, or raise `tokens_per_s` of the key."),
    ErrorCode("budget_exceeded", 429, AFTER, "A budget of the tenant or key is used up, or the rest of it is reserved.",
              "Send it after `Retry-After`, or raise the `budget`; see docs/accounts.md."),
    ErrorCode("waiting", 429, AFTER, "The call waited for an engine for `hold_s`. Its place is kept.",
              "Send it again with the same prompt, ask for a stream, or add engines."),
    ErrorCode("too_many_waiting", 429, AFTER, "As many calls wait for engines as may.",
              "Send it later; add engines, or raise `max_waiting`."),
    ErrorCode("overloaded", 429, AFTER, "More waits for the model than may, or the call has waited for `max_wait_s`.",
              "Send it later, or add engines."),
    ErrorCode("session_waiting", 429, AFTER, "The session waits until its context fits into the engines' caches.",
              "Send it again; its place is kept."),
    ErrorCode("gateway_busy", 429, AFTER, "Too many requests wait for a turn in the gateway.",
              "Send fewer at one time; start more workers or gateways."),
    ErrorCode("too_many_open_bytes", 429, AFTER, "The key's open requests have more bytes than `max_open_body_bytes`.",
              "Wait for answers, or raise the limit."),
    ErrorCode("too_many_open_requests", 429, AFTER, "Most connections are in use, many of them by this key.",
              "Send fewer at one time, or raise `max_connections`."),
    ErrorCode("too_many_waiting_prompts", 429, AFTER, "Too many bytes of long prompts wait to be tokenized.",
              "Send fewer long prompts at one time, or raise `max_waiting_prompt_bytes`."),
    ErrorCode("too_many_held_bytes", 429, AFTER, "The tenant's recorded answers have more bytes than may be held.",
              "Read answers, end sessions, or raise `max_held_bytes`."),
    ErrorCode("too_many_connections", 503, AFTER, "There are as many connections as may be, none unknown or idle.",
              "Use fewer, or raise `max_connections` and `ulimit -n`."),
    ErrorCode("too_many_watchers", 429, AFTER, "As many clients watch the gateway as may.", "Close a page."),
    ErrorCode("too_many_sessions", 429, AFTER, "The tenant has as many sessions as may be.", "End some."),
    ErrorCode("too_many_variables", 429, AFTER, "The tenant's sessions have as many variables as may be.",
              "End sessions."),
    ErrorCode("too_many_waiting_calls", 429, AFTER, "As many calls of the tenant wait for values as may.",
              "Set values, or cancel calls."),
)  # fmt: skip

ENGINES: Final = (
    ErrorCode("no_engine_available", 503, AFTER, "Engines serve the model, but none takes calls now.",
              "Look at `/ready` and `/admin/engines`: are they ejected, draining or starting?"),
    ErrorCode("engine_unreachable", 502, AFTER, "No connection to the engine came about, there or elsewhere.",
              "Look at the engine's address and process."),
    ErrorCode("engine_timeout", 504, AFTER, "The engine took the request and then said nothing for too long.",
              "Look at the engine; see docs/failures.md, hangs and silence."),
    ErrorCode("engine_error", 502, AFTER, "The connection was lost, or the engine's own error, whose status passes.",
              "Look at the engine's log."),
    ErrorCode("engine_garbled", 502, AFTER, "What the engine sent is no answer.",
              "Look at what listens at the engine's address."),
    ErrorCode("engine_broken", 502, AFTER, "The engine's answer has no ending.", "Look at the engine's log."),
    ErrorCode("engine_lost", 502, AFTER, "The gateway gave the engine up in the middle of the call.",
              "See docs/failures.md, how an engine goes out."),
    ErrorCode("engine_dead", 502, AFTER, "The core of a vLLM engine has died.", "Restart the engine."),
    ErrorCode("answer_too_large", 502, AFTER, "There is no room for an answer that has to be held whole.",
              "Ask for a stream, or raise `max_open_answer_bytes`."),
)  # fmt: skip

PROGRAMS: Final = (
    ErrorCode("session_not_found", 404, CHANGED, "The tenant has no such session.", "Make it, or check its id."),
    ErrorCode("session_ended", 410, CHANGED, "The session was deleted or has expired.", "Use a new session."),
    ErrorCode("session_closed", 409, CHANGED, "The session takes no more calls and values.", "Use a new session."),
    ErrorCode("call_not_found", 404, CHANGED, "The session has no such call.", "Check its id."),
    ErrorCode("unknown_variable", 400, CHANGED, "The program has no such variable.", "Check its name."),
    ErrorCode("inputs_missing", 409, CHANGED, "A native step's value came before all inputs had theirs.",
              "Get the inputs, then set the value."),
    ErrorCode("double_producer", 409, CHANGED, "Another call produces the variable already.", "Use another name."),
    ErrorCode("cycle", 409, CHANGED, "The call would wait for its own output.", "Break the circle."),
    ErrorCode("conflict", 409, CHANGED, "The request contradicts an earlier one.", "See the message."),
    ErrorCode("value_too_large", 413, CHANGED, "A value, or what the tenant's sessions hold, is above its limit.",
              "Send less, end sessions, or raise the limit."),
    ErrorCode("program_too_large", 413, CHANGED, "A program has more calls than one request may have.",
              "Send it in parts, in one session."),
    ErrorCode("invalid_transform", 400, CHANGED, "The specification of a transform is wrong.",
              "Mend it where the message says; see docs/transforms.md."),
    ErrorCode("transform_failed", 422, CHANGED, "A transform refused the answer's text, so the variable fails.",
              "Change the prompt or the transform."),
    ErrorCode("input_failed", 424, TRANSIENT, "An input of the call has failed; `causes` has the chain.",
              "See the last cause."),
    ErrorCode("variable_failed", 424, TRANSIENT, "The call that produces the variable has failed; `causes` says why.",
              "See the last cause."),
    ErrorCode("nobody_produces", 424, CHANGED, "Nobody produces the variable, and none has come in time.",
              "Send the call that produces it, or its value."),
    ErrorCode("not_computed", 424, CHANGED, "A native step was not computed within `hold_timeout_s`.",
              "Compute the step, and set its value in a new session."),
    ErrorCode("skipped", 424, CHANGED, "The call's condition does not hold, so it does not run.",
              "Expected where programs branch."),
    ErrorCode("cancelled", 424, TRANSIENT, "A client cancelled the call, or nobody waits for it any more.",
              "Expected where clients cancel."),
    ErrorCode("get_timeout", 408, NOW, "The variable did not come within the caller's time; it may still come.",
              "Get it again."),
    ErrorCode("text_changed", 502, NOW, "A retry generates another text than what was streamed so far.",
              "Get the variable again, from its beginning."),
)  # fmt: skip

GATEWAYS: Final = (
    ErrorCode("gateway_stopping", 503, AFTER, "The gateway stops before the request has its answer.",
              "Send it again: another gateway, or the next one here, takes it."),
    ErrorCode("gateway_unavailable", 503, AFTER, "The gateway that has the session or may have the response is silent.",
              "Send it again; its sessions are taken over if it stays away."),
    ErrorCode("gateway_given_up", 503, AFTER, "The others have given this gateway up.",
              "Send it again; look at the gateway's connection to the store."),
    ErrorCode("session_moved", 421, NOW, "Another gateway has the session. Only gateways are told so.",
              "Nothing: the gateway that forwarded it asks the other."),
    ErrorCode("clocks_differ", 503, AFTER, "A gateway's signature is too old, or of the future.",
              "Synchronise the machines' clocks."),
    ErrorCode("changed_body", 400, CHANGED, "A forwarded request has another body than its gateway has signed.",
              "Look for what rewrites bodies between gateways."),
    ErrorCode("recovering", 503, AFTER, "The sessions of an earlier gateway are not there yet.", "Send it again."),
    ErrorCode("store_failed", 503, AFTER, "The store cannot be read or written, so a durable session is not safe.",
              "Look at the disk or at PostgreSQL; see docs/durability.md."),
    ErrorCode("accounts_unavailable", 503, AFTER, "The store of keys and budgets does not answer; the call needs it.",
              "Look at the disk or at PostgreSQL; see docs/accounts.md."),
    ErrorCode("no_store", 400, CHANGED, "Keys are issued only where a store keeps them.",
              "Set `[store] path` or `url`."),
    ErrorCode("tenant_not_found", 404, CHANGED, "`[[tenants]]` has no tenant of this name.", "Add it, and reload."),
    ErrorCode("key_not_found", 404, CHANGED, "No key of this id was issued.", "Ask `GET /admin/keys`."),
    ErrorCode("too_many_files", 429, CHANGED, "The tenant keeps as many files, or as many bytes in them, as it may.",
              "Delete files, or give them an earlier end by `expires_after`."),
    ErrorCode("too_many_batches", 429, AFTER, "The tenant has as many batches that have not ended as it may.",
              "Wait for one to end, or cancel one."),
    ErrorCode("file_too_large", 400, CHANGED, "An uploaded file has more bytes than it may.", "Send it in parts."),
    ErrorCode("file_not_found", 404, CHANGED, "The tenant has no file of this id: its time may be over.",
              "Upload it again."),
    ErrorCode("file_in_use", 409, CHANGED, "A batch that has not ended reads the file.",
              "Wait for its end, or cancel it."),
    ErrorCode("batch_not_found", 404, CHANGED, "The tenant has no batch of this id.", "Ask `GET /v1/batches`."),
    ErrorCode("batch_ended", 409, CHANGED, "The batch has ended, so it cannot be cancelled.", "Ask for its files."),
    ErrorCode("range_not_satisfiable", 416, CHANGED, "`Range` asks for bytes that the file does not have.",
              "Ask for the file, which says how many it has."),
    ErrorCode("internal_error", 500, NOW, "A defect in Plait.", "Report it, with the log's traceback."),
    ErrorCode("engine_exists", 409, CHANGED, "There is an engine with this name or URL.", "Use another name."),
    ErrorCode("receipt_not_found", 404, CHANGED, "No receipt of this request id is kept for the tenant.",
              "See docs/explain.md; the log has the request's line."),
    ErrorCode("engine_not_found", 404, CHANGED, "There is no engine with this name.", "Ask `GET /admin/engines`."),
    ErrorCode("engine_busy", 409, AFTER, "The engine has calls, takes calls, or is being removed.", "Drain it first."),
)  # fmt: skip

GROUPS: Final = {
    "Requests": REQUEST,
    "Limits": LIMITS,
    "Engines": ENGINES,
    "Programs and sessions": PROGRAMS,
    "Gateways": GATEWAYS,
}
"""The rows by topic."""

CODES: Final = {row.code: row for group in GROUPS.values() for row in group}
