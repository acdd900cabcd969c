"""A receipt in sentences, from its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from plait.backends.error_codes import CODES

Fields = Mapping[str, Any]

ABOUT_AS_GOOD: Final = 0.5
"""The next engine counts as about as good if the margin is below this part of the call's cost. In replays with a margin
below a tenth, the next engine was the better one half of the time (`python -m benchmarks margins`).
"""

LEAST_S: Final = 0.0005
"""Shorter times are left out."""

RULES: Final[Mapping[str, str]] = {
    "only_engine": "no other engine could take it",
    "least_delay": "it delays itself and others least there",
    "ttft": "a cheaper engine was expected to miss its TTFT or its JCT",
    "group": "its task group as a whole ends soonest so",
    "continues": "the call that it continues ran there",
    "hand_over": "an engine that drains hands its prefixes over",
    "after_failure": "the attempt before it had failed",
    "moved": "that engine had room sooner",
}
WAITS: Final[Mapping[str, str]] = {
    "slot": "for a free slot of its engine",
    "prompts": "because its engine had enough prompts to compute",
    "turn": "for its turn, behind others",
    "tenant_share": "because its tenant had more than its share",
    "session": "until its session's context fitted into the caches",
    "max_running": "for the end of another call of its tenant (max_running)",
    "rate": "for its tenant's rates (calls_per_s, tokens_per_s)",
    "store": "for the store, which was asked for its tenant's rates",
    "gateway": "for the gateway itself, which had too little CPU time or was stopped",
}
ENDS: Final[Mapping[str, str]] = {"running": "It has not ended.", "explained": "Nothing was sent."}
PARTS: Final[Mapping[str, str]] = {
    "queue": "waiting for prompts before it",
    "load": "bringing back what lower tiers of the cache have",
    "prefill": "computing its prompt",
    "later": "delaying prompts that come later",
    "decode": "its answer",
    "stall": "keeping other answers waiting",
    "slow": "making other answers slower",
    "evicted": "what the cache drops for it",
    "repaid": "what a copy of its prefix saves others",
}

TIERS: Final[Mapping[str, str]] = {"host": "host memory", "remote": "remote storage"}


def sentences(receipt: Fields) -> Iterator[str]:
    """What happened to a call, one sentence for each event, in order."""
    tokens = f" of {receipt['prompt_tokens']:,} prompt tokens" if receipt["prompt_tokens"] else ""
    model = f" for {receipt['model']}" if receipt["model"] else ""
    yield f"{receipt['request_id']}: a request to {receipt['path']}{model}{tokens}."
    if receipt.get("agent"):  # the log has none
        parent = receipt["parent_agent"]
        yield f"The agent {receipt['agent']} sent it{f', which {parent} has begun' if parent else ''}."
    for wait in receipt["waits"]:
        yield f"It waited {_s(wait['for_s'])} {WAITS.get(wait['why'], wait['why'])}."
    for move in receipt["moves"]:
        gain_s = move["gain_s"]
        why = "which takes no calls now" if gain_s is None else f"to cost {_s(gain_s)} less"
        yield f"After {_s(move['at_s'])} it went to {move['to']} from {move['from']}, {why}."
    for attempt in receipt["attempts"]:
        yield from _attempt(attempt)
    yield from _cached(receipt)
    yield from _end(receipt)


def _attempt(attempt: Fields) -> Iterator[str]:
    engines = f" of {attempt['engines']} engines" if attempt["engines"] and attempt["engines"] > 1 else ""
    rule = RULES.get(attempt["rule"], f"by the policy {attempt['rule']}")
    yield f"It was placed on {attempt['engine']}{engines}: {rule}."
    if attempt["cost_s"] is not None:
        yield from _costs(attempt)
    for tier, tokens in (attempt.get("predicted_loaded_tokens") or {}).items():
        yield f"{tokens:,} tokens of its prompt were to be brought back there from {TIERS.get(tier, tier)}."
    if attempt["meets_slo"] is not None:
        yield "Its times were expected to be met there." if attempt["meets_slo"] else "They were at risk there."
    if attempt["failed"]:
        yield f"{attempt['engine']} failed it: {attempt['failed']}."


def _costs(attempt: Fields) -> Iterator[str]:
    own = next((one for one in attempt["candidates"] if one["engine"] == attempt["engine"]), None)
    parts = {} if own is None else own.get("parts", {})
    weighed = {part: abs(one["s"] * one["weight"]) for part, one in parts.items() if abs(one["s"]) >= LEAST_S}
    largest = sorted(weighed, key=lambda part: -weighed[part])[:3]
    why = ", ".join(f"{_s(parts[part]['s'])} {PARTS[part]}" for part in largest)
    yield f"It cost {_s(attempt['cost_s'])} there{f' ({why})' if why else ''}."
    yield from better(attempt)


def better(attempt: Fields) -> Iterator[str]:
    """A sentence about the next engine; none without one."""
    margin_s, cost_s, following = attempt["margin_s"], attempt["cost_s"], attempt["next_engine"]
    if margin_s is None or following is None:
        return
    if margin_s <= -LEAST_S:
        yield f"{following} would have cost {_s(-margin_s)} less."
    elif margin_s < LEAST_S:
        yield f"{following} would have cost as much."
    elif margin_s < ABOUT_AS_GOOD * cost_s:
        yield f"{following} would have been about as good ({_s(margin_s)} more)."
    else:
        yield f"{following} would have cost {_s(margin_s)} more."


def _end(receipt: Fields) -> Iterator[str]:
    late = receipt["late_s"]
    if receipt["first_token_s"] is not None:
        said = f"The first token came after {_s(receipt['first_token_s'])}"
        if late["first_token"] is not None:
            said += f", {_s(abs(late['first_token']))} {'later' if late['first_token'] > 0 else 'sooner'} than expected"
        yield f"{said}."
    yield _outcome(receipt)
    refusal = receipt["refusal"]
    if refusal is not None and refusal["limit"] is not None:
        yield f"The limit {refusal['limit']} is {refusal['most']:g}; {refusal['used']:g} were used."
    if refusal is not None and refusal["retry_after_s"] is not None:
        yield f"It was told to come again in {_s(refusal['retry_after_s'])}."


def _outcome(receipt: Fields) -> str:
    outcome, code, status = receipt["outcome"], receipt["code"], receipt["status"]
    if outcome in ENDS:
        return ENDS[outcome]
    after = f"after {_s(receipt['e2e_s'])}"
    if outcome == "client_gone":
        return f"Its client left {after}."
    if outcome in {"failed", "defect"} and status < 400:
        return f"Its answer broke off {after}: {code}."
    if code is not None:
        known = CODES.get(code)
        return f"It was refused with {status} {code}{f': {known.meaning}' if known else ''}"
    if outcome == "refused":
        return f"Its engine refused it with {status} {after}."
    output = f" with {receipt['output_tokens']:,} tokens" if receipt["output_tokens"] else ""
    return f"It was answered with {status}{output} {after}."


def _cached(receipt: Fields) -> Iterator[str]:
    """A sentence about the cached tokens of the prompt; none if the engine did not report them."""
    cached, attempts = receipt.get("cached_tokens"), receipt["attempts"]
    if cached is not None and receipt["prompt_tokens"] and attempts:
        expected = attempts[-1]["predicted_cached_tokens"]
        said = "" if expected is None else f" ({expected:,} expected)"
        yield f"{cached:,} of {receipt['prompt_tokens']:,} tokens were cached{said}."


def _s(seconds: float) -> str:
    """Seconds to three digits."""
    return f"{seconds:.3g} s" if abs(seconds) < 100 else f"{seconds:.0f} s"
