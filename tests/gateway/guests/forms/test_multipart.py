"""Forms with files: the fields are those that engines see, wherever the network cuts, and the bytes stay."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser

from plait.backends.errors import CallerError, NoRoomForUploadError
from plait.backends.http.body import SLICE_BYTES
from plait.gateway.guests.forms.multipart import MOST_PARTS, MOST_VALUE_BYTES, FormReader
from plait.gateway.guests.forms.multipart_body import Form, MultipartBody
from plait.gateway.guests.forms.uploads import MEMORY_BYTES, Upload

BOUNDARY = b"a-b"
TYPE = "multipart/form-data; boundary=a-b"
NAMES = frozenset((b"model",))
LOOK_ALIKES = [b"\r\n--a-b", b"\r\n--a-", b"\r\n--a-bc", b"\r\n-", b"\r\n", b"--a-b--", b"\r", b"--a-b\r\n", b"x"]
Part = tuple[str, str | None, bytes]


def part(name: str, value: bytes, filename: str | None = None) -> Part:
    return name, filename, value


def form(*parts: Part, ends: bool = True) -> bytes:
    made = b""
    for name, filename, value in parts:
        made += b'--a-b\r\ncontent-disposition: form-data; name="%b"' % name.encode()
        made += b"" if filename is None else b'; filename="%b"\r\ncontent-type: audio/wav' % filename.encode()
        made += b"\r\n\r\n" + value + b"\r\n"
    return made + (b"--a-b--\r\n" if ends else b"")


def read(data: bytes, *cuts: int, kind: str = TYPE) -> FormReader:
    reader = FormReader(kind, NAMES)
    for begin, end in pairwise([0, *sorted(cuts), len(data)]):
        reader.feed(data[begin:end])
    reader.end()
    return reader


async def as_engines_do(data: bytes) -> Any:
    """What Starlette makes of it, as in vLLM and SGLang."""

    async def stream() -> Any:
        yield data

    parser = MultiPartParser(Headers({"content-type": TYPE}), stream())
    try:
        return (await parser.parse()).get("model")
    finally:
        for file in parser._files_to_close_on_error:
            file.close()


BEGINS_A_BOUNDARY = "\r\n-"
FILES = st.lists(st.sampled_from(LOOK_ALIKES), max_size=6).map(b"".join)


@given(
    file=FILES,
    model=st.sampled_from(["m", "a/b-7B", BEGINS_A_BOUNDARY, BEGINS_A_BOUNDARY + "m", "\u00fc"]),
    first=st.booleans(),
    cuts=st.data(),
)
async def test_the_fields_are_those_of_engines_wherever_it_is_cut(
    file: bytes, model: str, first: bool, cuts: st.DataObject
) -> None:
    parts = [part("model", model.encode()), part("file", b"." + file, "a.wav"), part("language", b"en")]
    data = form(*(parts if first else parts[1:] + parts[:1]))
    places = cuts.draw(st.lists(st.integers(0, len(data)), max_size=12))
    try:
        expected = await as_engines_do(data)
    except Exception:  # noqa: BLE001 - some look-alikes are boundaries
        with suppress(CallerError):  # else the engine says what is wrong
            read(data, *places)
        return
    try:
        found = read(data, *places).found
    except CallerError:
        assert model == BEGINS_A_BOUNDARY, "it may look like a boundary to its end, and is no name of a model"
        return
    if expected is None:  # behind an end that the file has brought
        assert not found
        return
    assert found["model"].value == expected
    at, value = found["model"].at, model.encode()
    assert data[at : at + len(value)] == value
    upload = Upload()
    await upload.add(data)
    renamed = MultipartBody(Form(upload, found["model"]), "other").for_engine(None)
    assert not isinstance(renamed, bytes)
    assert b"".join(renamed.slices()) == data[:at] + b"other" + data[at + len(value) :]
    assert len(renamed) == len(data) - len(value) + 5


def test_each_byte_may_come_alone() -> None:
    data = form(part("file", b"\r\n--a-\r\n--a-c", "a"), part("model", b"m"))
    assert read(data, *range(len(data))).found["model"].value == "m"
    with pytest.raises(CallerError, match="last boundary"):
        read(data[:-4], *range(len(data) - 4))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (form(part("model", b"m"), part("model", b"n")), "'model' is there twice"),
        (form(part("plait[priority]", b"1")), "annotations are headers"),
        (form(part("plait", b"{}")), "annotations are headers"),
        (form(part("model", b"m" * (MOST_VALUE_BYTES + 1))), "bytes"),
        (form(part("model", b"\xff")), "UTF-8"),
        (form(part("model", b"m"), ends=False), "last boundary"),
        (form(*[part("a", b"")] * (MOST_PARTS + 1)), "fields"),
        (b'--a-b\r\ncontent-disposition: form-data; x="%b"; name="model"\r\n\r\nm\r\n' % (b"x" * 2_000), "too long"),
        (b"--a-b\r\n" + b'content-disposition: form-data; name="model"\r\n' * 2 + b"\r\nm\r\n", "two names"),
        (b"", "last boundary"),
        (b"no form", "form"),
        (b"--a-b\r\n" + b"x: y\r\n" * 100, "form"),
        (b"--a-b\r\nx: " + b"y" * 100_000, "form"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(data: bytes, says: str) -> None:
    with pytest.raises(CallerError, match=says):
        read(data)


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'b' * 999}"]
)
def test_another_type_is_no_form(kind: str) -> None:
    with pytest.raises(CallerError, match="form"):
        read(b"", kind=kind)


def test_an_empty_value_is_none() -> None:
    assert not read(form(part("model", b""), part("file", b"x", "a"))).found


def test_a_file_of_that_name_is_no_field() -> None:
    assert not read(form(part("model", b"m", "model.txt"))).found


@pytest.mark.parametrize("size", [0, 1, MEMORY_BYTES, MEMORY_BYTES + 1, 5 * MEMORY_BYTES + 7])
async def test_an_upload_gives_its_bytes_as_often_as_they_are_asked_for(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    with Upload() as upload:
        for at in range(0, size, 100_003):
            await upload.add(data[at : at + 100_003])
        await upload.end()
        assert len(upload) == size
        for _ in range(2):
            pieces = list(upload.slices())
            assert b"".join(pieces) == data
            assert all(len(piece) <= SLICE_BYTES for piece in pieces)
        assert (upload._file is None) == (size <= MEMORY_BYTES)


async def test_a_long_upload_is_not_in_memory() -> None:
    piece = bytes(64 * 1024)
    tracemalloc.start()
    try:
        with Upload() as upload:
            for _ in range(32 * 16):
                await upload.add(piece)
            await upload.end()
            for _ in upload.slices():
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MEMORY_BYTES


async def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **_options: object) -> Iterator[bytes]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plait.gateway.guests.forms.uploads.TemporaryFile", full)
    with Upload() as upload, pytest.raises(NoRoomForUploadError):
        await upload.add(bytes(MEMORY_BYTES + 1))
