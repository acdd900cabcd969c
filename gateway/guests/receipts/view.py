"""Receipts as JSON, for clients and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from plait.gateway.guests.receipts.receipt import WEIGHTS, Candidate, Choice, Move, Receipt

Fields = dict[str, Any]

DIGITS: Final = 6
"""Microseconds."""


def shown(receipt: Receipt, tenant_label: Callable[[str], str] | None = None) -> Fields:
    """A receipt for its tenant, or with `tenant_label` for operators.

    A tenant sees the parts of the cost only for the chosen engine, because another engine's cached tokens would show
    other tenants' prompts. Error messages are for operators only.
    """
    fields: Fields = {
        "object": "receipt",
        "request_id": receipt.request_id,
        "at": round(receipt.at, 3),
        "path": receipt.path,
        "model": receipt.model,
        "status": receipt.status,
        "outcome": receipt.outcome,
        "code": receipt.code,
        "finish_reason": receipt.finish_reason,
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
        "output_tokens": receipt.output_tokens,
        "slo": None if receipt.slo is None else dict(zip(("ttft_s", "tpot_s", "jct_s"), receipt.slo, strict=True)),
        "waits": [{"why": wait.why, "for_s": _s(wait.for_s)} for wait in receipt.waits],
        "moves": [_move(move) for move in receipt.moves],
        "attempts": [_choice(choice, is_operator=tenant_label is not None) for choice in receipt.choices],
        **_times(receipt),
        "trace_id": receipt.trace_id or None,
        "agent": receipt.agent or None,
        "parent_agent": receipt.parent or None,
        "program": receipt.program or None,
        "made_by": list(receipt.made_by) or None,
        "key": receipt.key or None,
        "cost": None if receipt.cost is None else receipt.cost / 1e9,
        "refusal": _refusal(receipt),
    }
    if tenant_label is not None:
        fields |= {"tenant": tenant_label(receipt.tenant), "message": receipt.message}
    return fields


def _move(move: Move) -> Fields:
    return {"from": move.from_engine, "to": move.to_engine, "at_s": _s(move.at_s), "gain_s": _s(move.gain_s)}


def _times(receipt: Receipt) -> Fields:
    """The times of the first and the last token, and how late the first one was."""
    late_s, last, after_s = receipt.late_s, receipt.choices[-1] if receipt.choices else None, None
    if late_s is not None and last is not None and receipt.first_s is not None and receipt.outcome == "ok":
        after_s = receipt.e2e_s - receipt.first_s - last.decode_s
    return {
        "expected_first_token_s": _s(receipt.expected_first_s),
        "first_token_s": _s(receipt.first_s),
        "late_s": {"first_token": _s(late_s), "after": _s(after_s)},
        "e2e_s": _s(receipt.e2e_s),
    }


def _refusal(receipt: Receipt) -> Fields | None:
    """The exceeded limit and `Retry-After`; None if the request was not refused."""
    limit = receipt.limit
    if limit is None and receipt.retry_after_s is None:
        return None
    name, most, used = (None, None, None) if limit is None else (limit.name, limit.most, limit.used)
    return {"limit": name, "most": most, "used": used, "retry_after_s": receipt.retry_after_s}


def _choice(choice: Choice, *, is_operator: bool) -> Fields:
    following = choice.next_best
    return {
        "engine": choice.engine,
        "rule": choice.rule,
        "placement": choice.reason,
        "placed_s": _s(choice.placed_s),
        "sent_s": _s(choice.sent_s),
        "failed": choice.ended_by or None,
        "predicted_cached_tokens": choice.cached_tokens,
        "estimated_cached_tokens": choice.estimated_tokens,
        "predicted_loaded_tokens": dict(choice.loaded) or None,
        "meets_slo": choice.meets_slo,
        "expected_decode_s": _s(choice.decode_s) if choice.decode_s else None,
        "engines": choice.engines or None,
        "cost_s": None if choice.chosen is None else _s(choice.chosen.cost_s),
        "margin_s": _s(choice.margin_s),
        "next_engine": None if following is None else following.engine,
        "others_cost_s": None,  # of earlier versions, whose clients may read it
        "candidates": [
            _candidate(one, is_whole=is_operator or one.engine == choice.engine) for one in choice.candidates
        ],
    }


def _candidate(one: Candidate, *, is_whole: bool) -> Fields:
    fields: Fields = {"engine": one.engine, "cost_s": _s(one.cost_s)}
    if is_whole:
        parts = {part: {"s": _s(seconds), "weight": WEIGHTS[part]} for part, seconds in one.parts_s.items() if seconds}
        fields |= {"cached_tokens": one.cached_tokens, "parts": parts}
    return fields


def _s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, DIGITS)
