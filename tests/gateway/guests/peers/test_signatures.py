"""What gateways sign: nothing of it can be changed, used for another gateway, or used later."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.gateway.guests.peers.signatures import LIFE_S, PEER_HEADER, PeerKey, Said, SignedForAnotherTimeError
from plait.gateway.intake.agents import SESSION_HEADERS
from plait.gateway.others import Checked, Forwarded

KEY = PeerKey("the-key-of-all-gateways")
NOW_S = 1_900_000_000.0
URLS = st.sampled_from(["http://10.0.0.1:8000", "http://10.0.0.2:8000"]) | st.text(max_size=20)
WORDS = st.from_regex(r"[!-~]{0,8}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="?#"), max_size=8)

READ_HEADERS = [
    b"plait-session", b"plait-output", b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"authorization", b"content-type",
    b"content-encoding", *sorted(SESSION_HEADERS),
]  # fmt: skip
HEADERS = st.lists(st.tuples(st.sampled_from(READ_HEADERS), st.binary(max_size=3)), max_size=3)

Row = tuple[int, str, str]
ROWS = st.tuples(st.integers(0, 2**62), URLS, st.text(max_size=8))


@given(ROWS)
def test_a_row_that_was_signed_says_when(row: Row) -> None:
    assert KEY.row_signed_s(KEY.sign_row(*row, NOW_S), *row) == NOW_S


@given(ROWS, ROWS, st.integers(1, 10**6))
def test_a_row_with_anything_changed_is_not_signed(row: Row, other: Row, seconds: int) -> None:
    signature = KEY.sign_row(*row, NOW_S)
    for place, value in enumerate(other):
        if value != row[place]:
            changed: Any = (*row[:place], value, *row[place + 1 :])
            assert KEY.row_signed_s(signature, *changed) is None
    assert KEY.row_signed_s(f"{NOW_S + seconds:.0f} {signature.partition(' ')[2]}", *row) is None
    assert PeerKey("another").row_signed_s(signature, *row) is None


@pytest.mark.parametrize("signature", ["", " ", "1900000000", "1900000000 ", "x y", "\u0661 \u00e9", "-1 0", "1e3 0"])
def test_what_is_no_signature_signs_nothing(signature: str) -> None:
    assert KEY.row_signed_s(signature, 1, "http://a", "1") is None


@st.composite
def requests(draw: st.DrawFn) -> Forwarded:
    query = draw(WORDS)
    target = quote("/" + draw(TEXT)) + (f"?{query}" if query else "")
    checked = Checked(
        draw(st.sampled_from(["api_keys", "admin_key"])), draw(st.from_regex(r"[0-9a-f]{0,4}", fullmatch=True))
    )
    port = draw(st.none() | st.integers(1, 65_535))
    return Forwarded(
        draw(st.sampled_from(["GET", "POST"])), target, draw(HEADERS), checked, draw(st.binary(max_size=8)), port
    )


def arrived(request: Forwarded) -> dict[str, Any]:
    """The scope of a request, as a server makes it."""
    path, _, query = request.target.partition("?")
    query_string = query.encode("latin-1")
    return {"method": request.method, "path": unquote(path), "query_string": query_string, "headers": request.headers}


def read(header: tuple[bytes, bytes], request: Forwarded, to: str = "http://b", later_s: float = 0.0) -> Said | None:
    return KEY.read_request(header[1], arrived(request), to, NOW_S + later_s)


@given(requests())
def test_what_is_said_of_a_request_is_read_by_the_gateway_that_it_is_for(request: Forwarded) -> None:
    header = KEY.sign_request(request, "http://b", NOW_S)
    said = read(header, request)
    assert header[0] == PEER_HEADER
    assert said is not None
    assert (said.checked, said.port) == (request.checked, request.port or 0)
    assert read(header, request, to="http://c") is None
    assert PeerKey("another").read_request(header[1], arrived(request), "http://b", NOW_S) is None


@given(requests(), requests())
def test_a_signature_is_of_no_use_for_another_request(request: Forwarded, other: Forwarded) -> None:
    header = KEY.sign_request(request, "http://b", NOW_S)
    for name in ("method", "target"):
        changed = request._replace(**{name: getattr(other, name)})
        if arrived(changed) != arrived(request):
            assert read(header, changed) is None
    if request.body != other.body:
        said = read(header, request)
        assert said is not None
        again = read(KEY.sign_request(other, "http://b", NOW_S), other)
        assert again is not None
        assert said.body_sha256 != again.body_sha256


@given(requests(), HEADERS, st.sampled_from(READ_HEADERS))
def test_a_signature_is_of_no_use_for_other_annotations(
    request: Forwarded, others: list[tuple[bytes, bytes]], name: bytes
) -> None:
    header = KEY.sign_request(request, "http://b", NOW_S)
    assert read(header, request._replace(headers=[*request.headers, (name, b"added")])) is None
    if sorted(others) != sorted(request.headers):
        assert read(header, request._replace(headers=others)) is None


def test_headers_of_proxies_between_gateways_are_not_signed() -> None:
    request = Forwarded("GET", "/", [(b"plait-session", b"s"), (b"content-type", b"x")], Checked("api_keys", "t"))
    header = KEY.sign_request(request, "http://b", NOW_S)
    hop = [(b"host", b"b"), (b"x-request-id", b"1"), (b"traceparent", b"2"), header]
    assert read(header, request._replace(headers=[*hop, *reversed(request.headers)])) is not None


@given(requests(), st.integers(0, 5), st.binary(min_size=1, max_size=4))
def test_a_header_with_anything_changed_is_not_signed(request: Forwarded, place: int, word: bytes) -> None:
    name, value = KEY.sign_request(request, "http://b", NOW_S)
    words = value.split(b" ")
    assume(words[place] != word)
    words[place] = word
    assert read((name, b" ".join(words)), request) is None


@pytest.mark.parametrize("later_s", [-LIFE_S - 2, LIFE_S + 1, 10 * LIFE_S])
def test_a_request_is_not_signed_for_another_time(later_s: float) -> None:
    request = Forwarded("GET", "/", (), Checked("api_keys", "t"))
    header = KEY.sign_request(request, "http://b", NOW_S)
    assert read(header, request, later_s=LIFE_S - 1) is not None
    with pytest.raises(SignedForAnotherTimeError) as raised:
        read(header, request, later_s=later_s)
    assert (raised.value.status, raised.value.code, raised.value.by_s) == (503, "clocks_differ", later_s)


def test_a_key_shows_nothing_of_itself() -> None:
    assert "the-key" not in repr(KEY)
    signed = KEY.sign_request(Forwarded("GET", "/", (), Checked("api_keys", "t")), "http://b", NOW_S)[1]
    assert b"the-key" not in signed
    assert KEY.answer(signed) not in {b"", signed, PeerKey("another").answer(signed)}
