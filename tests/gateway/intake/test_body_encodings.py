"""Compressed bodies: what comes out is what went in, however it is cut, and never more than is taken."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from plait.backends.errors import BodyTooLargeError, CallerError, EncodingNotSupportedError
from plait.gateway.intake.body_encodings import MOST_MEMBERS, PIECE_BYTES, BodyDecoder, decoder_of
from plait.gateway.intake.open_bodies import OpenBodies, OpenBody

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MIB = 2**20


def bare_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(data) + made.flush()


FORMS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-Gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("identity, deflate", bare_deflate),
    "zstd": ("zstd", zstd.compress),
    "two gzip members": ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
    "two zstd frames": ("zstd", lambda data: zstd.compress(data[:7]) + zstd.compress(data[7:])),
}

long = st.builds(lambda part, times: part * times, st.binary(max_size=3), st.integers(0, 200_000))
datas = st.one_of(st.binary(max_size=300), long)


def decoder(encoding: str) -> BodyDecoder:
    found = decoder_of([(b"content-encoding", encoding.encode())])
    assert found is not None
    return found


def decode(decoding: BodyDecoder, *pieces: bytes) -> list[bytes]:
    found = [piece for given in pieces for piece in decoding.feed(given)]
    decoding.end()
    return found


@pytest.mark.parametrize("form", FORMS)
@given(data=datas, cuts=st.lists(st.integers(0, 400), max_size=5).map(sorted))
def test_what_comes_out_is_what_went_in(form: str, data: bytes, cuts: list[int]) -> None:
    encoding, encode = FORMS[form]
    encoded, decoding = encode(data), decoder(encoding)
    pieces = [encoded[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    found = decode(decoding, *pieces)
    assert b"".join(found) == data
    assert max(map(len, found), default=0) <= PIECE_BYTES


@pytest.mark.parametrize("form", FORMS)
def test_a_body_that_breaks_off_or_is_something_else_is_refused(form: str) -> None:
    encoding, encode = FORMS[form]
    for sent in (encode(b"some text")[:-2], b"\x07" + encode(b"some text"), encode(b"some text") + b"{more of it}"):
        with pytest.raises(CallerError, match="as its Content-Encoding says") as refused:
            decode(decoder(encoding), sent)
        assert refused.value.status == 400


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "gzip, zstd", "compress", "*"])
def test_another_encoding_is_refused_with_those_that_are_taken(encoding: str) -> None:
    with pytest.raises(EncodingNotSupportedError, match="gzip, deflate, zstd") as refused:
        decoder_of([(b"content-encoding", encoding.encode())])
    assert refused.value.status == 415


def test_no_encoding_is_no_decoder() -> None:
    assert decoder_of([(b"content-type", b"x")]) is None
    assert decoder_of([(b"content-encoding", b"identity")]) is None


@pytest.mark.parametrize("form", FORMS)
async def test_a_bomb_stops_at_the_bound(form: str) -> None:
    encoding, encode = FORMS[form]
    sent, most = encode(bytes(64 * MIB)), MIB
    bodies, counted = OpenBodies(most, 4 * MIB), list[int]()
    real_add = bodies.add

    def add(tenant: str, size: int, requests: int = 0) -> None:
        real_add(tenant, size, requests)
        counted.append(bodies.bytes_of(tenant))

    bodies.add = add  # type: ignore[method-assign]

    async def receive() -> Message:
        return {"type": "http.request", "body": sent}

    with OpenBody(bodies, "a") as body, pytest.raises(BodyTooLargeError):
        await body.read(receive, [(b"content-encoding", encoding.encode())])
    assert max(counted) <= most
    assert bodies.bytes_of("a") == 0


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_members_of_which_nothing_comes_are_bounded(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    empty = encode(b"")
    assert decode(decoder(encoding), empty * MOST_MEMBERS) == []
    with pytest.raises(CallerError, match="as its Content-Encoding says"):
        decode(decoder(encoding), empty * (MOST_MEMBERS + 1))


async def test_a_stream_of_which_nothing_comes_out_ends_at_the_bound() -> None:
    sent = gzip.compress(b"")

    async def receive() -> Message:
        return {"type": "http.request", "body": sent, "more_body": True}

    with OpenBody(OpenBodies(1_000, MIB), "a") as body, pytest.raises(BodyTooLargeError):
        await body.read(receive, [(b"content-encoding", b"gzip")])
