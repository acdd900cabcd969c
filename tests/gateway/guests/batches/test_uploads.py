"""Uploads go to the database as they come: within their bounds, and nothing is left of one that breaks off."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plait.gateway.guests.batches import routes
from plait.gateway.guests.batches.desk import PART_BYTES
from plait.gateway.guests.batches.guest import BatchesGuest
from tests.gateway.api.served_gateway import Reply, Served, request, serving

FORM = "content-type: multipart/form-data; boundary=b"


@asynccontextmanager
async def keeping() -> AsyncIterator[Served]:
    async with serving() as made:
        yield made
        await guest_of(made).stop()


def guest_of(made: Served) -> BatchesGuest:
    (guest,) = [one for one in made.gateway.guests if isinstance(one, BatchesGuest)]
    return guest


def form(data: bytes, **fields: str) -> bytes:
    given = {"purpose": "batch", **fields}
    head = b"--b\r\ncontent-disposition: form-data; name="
    parts = [b'%b"%b"\r\n\r\n%b\r\n' % (head, name.encode(), value.encode()) for name, value in given.items()]
    return b"".join([*parts, b'%b"file"; filename="a.jsonl"\r\n\r\n%b\r\n--b--\r\n' % (head, data)])


async def upload(made: Served, body: bytes, **options: Any) -> Reply:
    return Reply.of(await made.send(request(body, FORM, path="/v1/files", **options)))


async def held(made: Served) -> tuple[int, int]:
    """How many files the only tenant has, and their bytes."""
    guest, kernel = guest_of(made), made.gateway.kernel
    tenant = kernel.tenants.stored(kernel.keys.check({"headers": [(b"x-api-key", b"one")]}))
    return await guest._thread.run(guest._desk.held, tenant)


async def get(made: Served, path: str) -> Reply:
    return Reply.of(await made.send(request(b"", method="GET", path=path)))


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, 3 * PART_BYTES + 7])
async def test_a_file_comes_back_as_it_was(size: int) -> None:
    data = bytes(number % 251 for number in range(min(size, 70_000))) * (size // 70_000 + 1)
    async with keeping() as made:
        told = await upload(made, form(data[:size]))
        found = await get(made, f"/v1/files/{told.json['id']}/content")
    assert (told.json["bytes"], told.json["filename"]) == (size, "a.jsonl")
    assert found.body == data[:size]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after[seconds]": "60"}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "7200"}, "expires_after"),
        ({"expires_after[seconds]": "soon"}, "expires_after"),
    ],
)
async def test_what_a_form_may_not_say(fields: dict[str, str], param: str) -> None:
    async with keeping() as made:
        told = await upload(made, form(b"x", **fields))
    assert (told.status, told.json["error"]["param"]) == (400, param)


async def test_a_form_without_a_file() -> None:
    async with keeping() as made:
        told = await upload(made, b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n')
        assert (told.status, told.json["error"]["param"]) == (400, "file")
        assert (await upload(made, form(b"x")[:-6])).json["error"]["code"] == "malformed_form"


async def test_a_file_ends_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_FILE_BYTES", 2 * PART_BYTES)
    async with keeping() as made:
        told = await upload(made, form(b"x" * (2 * PART_BYTES + 1)))
        assert (told.status, told.json["error"]["code"]) == (400, "file_too_large")
        assert await held(made) == (0, 0)
        assert (await upload(made, form(b"x" * 100))).status == 200
        assert await held(made) == (1, 100)


async def test_a_tenant_keeps_so_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_KEPT", 1)
    async with keeping() as made:
        assert (await upload(made, form(b"x"))).status == 200
        told = await upload(made, form(b"x"))
    assert (told.status, told.json["error"]["code"]) == (429, "too_many_files")


async def test_uploads_at_the_same_time_keep_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = form(b"x" * 2 * PART_BYTES)
    monkeypatch.setattr(routes, "MOST_BYTES", 3 * len(sent))
    async with keeping() as made:
        told = await asyncio.gather(*(upload(made, sent) for _ in range(5)))
        count, size = await held(made)
    assert 1 <= [one.status for one in told].count(200) == count <= 3
    assert size == count * 2 * PART_BYTES
    assert {one.json["error"]["code"] for one in told if one.status != 200} == {"too_many_files"}


async def test_an_upload_counts_as_no_open_body() -> None:
    async with keeping() as made:
        assert (await upload(made, form(b"x" * 300_000))).status == 200, "more than max_body_bytes"
        (tenant,) = [made.gateway.kernel.keys.check({"headers": [(b"x-api-key", b"one")]})]
        assert made.gateway.kernel.bodies.bytes_of(tenant) == 0
