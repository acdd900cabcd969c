"""`plait explain`: what became of a request and why, what would be decided now, or what the code of an error means."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from plait.backends.error_codes import CODES
from plait.gateway.commands import add_address
from plait.gateway.guests.receipts.words import sentences

if TYPE_CHECKING:
    import argparse

Fields = Mapping[str, Any]

TYPES: Final = {"invalid_request_error": 400, "server_error": 500}
"""What the log and the metrics show of an error without a code, and its status."""

LIKE_A_CODE: Final = 0.8
"""A word that is so similar to a code, as `difflib` says, is no request's id."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID|CODE", nargs="?", help="a request's x-request-id, or an error's code")
    add_address(parser)
    parser.add_argument("--api-key", default=os.environ.get("PLAIT_API_KEY"), help="a tenant's, for its own requests")
    parser.add_argument("--log", type=Path, metavar="FILE", help="read the request's line there, and ask no gateway")
    parser.add_argument("--body", type=Path, metavar="FILE", help="what would be decided now for a call with this body")
    parser.add_argument("--path", default="/v1/chat/completions", help="of that call (default: %(default)s)")
    parser.add_argument("--without", metavar="ENGINE", help="as if this engine took no calls")
    parser.add_argument("--json", action="store_true", help="the receipt itself")


def run(arguments: argparse.Namespace) -> None:
    """Print the explanation. Raises ValueError for an unknown id or code, and if the gateway gives no receipt."""
    what = arguments.what
    if arguments.body is None and what is None:
        raise ValueError("give a request's id, an error's code, or --body FILE")
    is_code = what is not None and bool(difflib.get_close_matches(what, [*CODES, *TYPES], n=1, cutoff=LIKE_A_CODE))
    if arguments.body is None and arguments.log is None and (is_code or not (arguments.key or arguments.api_key)):
        print("\n".join(lines(what)))
        return
    receipt = _receipt(arguments)
    print(json.dumps(receipt, indent=2) if arguments.json else "\n".join(sentences(receipt)))


def _receipt(arguments: argparse.Namespace) -> Fields:
    if arguments.body is not None:
        try:
            body = json.loads(arguments.body.read_bytes())
        except ValueError as error:
            raise ValueError(f"{arguments.body} is no JSON: {error}") from error
        given = {"path": arguments.path, "body": body, "without": arguments.without}
        return _asked(arguments, "/admin/explain", "POST", given)
    if arguments.log is not None:
        return from_log(arguments.log, arguments.what)
    route = "/admin/receipts" if arguments.key else "/v1/receipts"
    return _asked(arguments, f"{route}/{quote(arguments.what, safe='')}")


def _asked(arguments: argparse.Namespace, path: str, method: str = "GET", body: object = None) -> Fields:
    from plait.gateway.commands.asked_gateway import AskedGateway  # noqa: PLC0415 - takes long to import

    key = arguments.key or (None if path.startswith("/admin") else arguments.api_key)
    return AskedGateway(arguments.url, key).ask(path, method, body)


def from_log(file: Path, request_id: str) -> Fields:
    """A receipt made of the latest line about a request in a JSON log. Raises ValueError if there is no line.

    Fields that the log does not have are None or empty.
    """
    found: Fields | None = None
    with file.open(encoding="utf-8", errors="replace") as rows:
        for row in rows:
            if request_id in row and (line := _line(row)).get("event") == "call" and line["request_id"] == request_id:
                found = line
    if found is None:
        raise ValueError(f"{file} has no line of a call {request_id}")
    attempt: Fields = {
        "engine": found.get("engine"), "rule": found.get("rule"), "engines": None,
        "cost_s": found.get("cost_s"), "margin_s": found.get("margin_s"), "next_engine": found.get("next_engine"),
        "candidates": [], "failed": None, "meets_slo": None,
        "predicted_cached_tokens": found.get("predicted_cached_tokens"),
    }  # fmt: skip
    asked = dict.fromkeys(("model", "prompt_tokens", "output_tokens", "code", "status", "outcome", "e2e_s", "path"))
    return asked | dict(found) | {
        "waits": [{"why": why, "for_s": for_s} for why, for_s in (found.get("waited_for") or {}).items()],
        "moves": [],
        "attempts": [attempt] if found.get("engine") else [],
        "first_token_s": found.get("ttft_s"),
        "late_s": {"first_token": None, "after": None},
        "refusal": None,
    }  # fmt: skip


def _line(row: str) -> Fields:
    try:
        line = json.loads(row)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def lines(code: str) -> list[str]:
    """The lines that explain an error code. Raises ValueError for an unknown code."""
    row = CODES.get(code)
    if code in TYPES:
        return [f"{code}: HTTP {TYPES[code]}", "  An error without a code. The message of the answer says what to do."]
    if row is None:
        near = difflib.get_close_matches(code, CODES, n=1)
        meant = f" Did you mean {near[0]}?" if near else " An engine's own codes pass through: see its documentation."
        raise ValueError(f"Plait has no error code {code!r}.{meant} A request's id needs --key, or --log FILE.")
    return [
        f"{row.code}: HTTP {row.status}",
        f"  {row.meaning}",
        f"  Send it again: {row.again.value.replace('`', '')}.",
        f"  {row.do}",
    ]
