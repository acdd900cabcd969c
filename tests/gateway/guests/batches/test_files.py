"""Files that are read in part, that go while a batch is made of them, and uploads that break off."""

import asyncio
import gzip
import json
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from plait.gateway.guests.batches import routes
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.desk import PART_BYTES, Desk
from tests.gateway.api.served_gateway import Reply, Served, request
from tests.gateway.guests.batches.test_uploads import FORM, form, get, guest_of, held, keeping, upload
from tests.waiting import WITHIN_S


async def uploaded(made: Served, data: bytes) -> str:
    file_id: str = (await upload(made, form(data))).json["id"]
    return file_id


async def content(made: Served, file_id: str, asked: str) -> Reply:
    path = f"/v1/files/{file_id}/content"
    return Reply.of(await made.send(request(b"", f"range: {asked}", method="GET", path=path)))


async def until_held(made: Served, files: int) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while (await held(made))[0] != files:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("asked", "told"),
    [("bytes=2-4", "2-4"), ("bytes=7-", "7-9"), ("bytes=-3", "7-9"), ("bytes=8-99", "8-9"), ("bytes=-99", "0-9")],
)
async def test_a_range_is_answered_with_a_part(asked: str, told: str) -> None:
    async with keeping() as made:
        found = await content(made, await uploaded(made, b"0123456789"), asked)
    begin, _, last = told.partition("-")
    if told == "0-9":
        assert (found.status, found.body) == (200, b"0123456789")
    else:
        assert (found.status, found.headers["content-range"]) == (206, f"bytes {told}/10")
        assert found.body == b"0123456789"[int(begin) : int(last) + 1]


@pytest.mark.parametrize(("size", "asked"), [(10, "bytes=10-"), (10, "bytes=10-11"), (10, "bytes=-0")])
async def test_a_range_behind_the_end_is_refused(size: int, asked: str) -> None:
    """RFC 9110, 15.5.17."""
    async with keeping() as made:
        found = await content(made, await uploaded(made, b"x" * size), asked)
    assert (found.status, found.headers["content-range"]) == (416, f"bytes */{size}")
    assert found.json["error"]["code"] == "range_not_satisfiable"


@pytest.mark.parametrize("asked", ["bytes=5-2", "bytes=0-1,3-4", "bytes=-", "bytes=a-b", "lines=0-1", "bytes"])
async def test_a_range_that_is_none_is_ignored(asked: str) -> None:
    """RFC 9110, 14.1.1 and 14.2. Several ranges are ignored, too."""
    async with keeping() as made:
        found = await content(made, await uploaded(made, b"0123456789"), asked)
    assert (found.status, found.body, "content-range" in found.headers) == (200, b"0123456789", False)


async def test_a_batch_needs_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that goes just before the batch is there."""
    async with keeping() as made:
        file_id, add = await uploaded(made, b"{}"), Desk.add

        def late(desk: Desk, batch: Batch, most: int) -> Any:
            assert desk.delete_file(batch.tenant, batch.input_file_id) is (batch.input_file_id == other)
            return add(desk, batch, most)

        async def create(input_file_id: str) -> Reply:
            asked = json.dumps({"input_file_id": input_file_id, "endpoint": "/v1/chat/completions"}).encode()
            kind = "content-type: application/json"
            return Reply.of(await made.send(request(asked, kind, path="/v1/batches")))

        assert (await create(file_id)).status == 200
        other = await uploaded(made, b"{}")
        monkeypatch.setattr(Desk, "add", late)
        for missing in (other, "file-none", "file\u0000", ""):
            told = await create(missing)
            assert (told.status, told.json["error"]["param"]) == (404, "input_file_id"), missing
        assert len((await get(made, "/v1/batches")).json["data"]) == 1


async def test_a_slow_upload_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another gateway deletes what is old meanwhile."""
    monkeypatch.setattr(routes, "UPLOAD_S", 0.02)
    renewed = asyncio.Event()
    renew = Desk.renew_file

    def renew_file(desk: Desk, file_id: str, now_s: float) -> bool:
        loop.call_soon_threadsafe(renewed.set)
        return renew(desk, file_id, now_s)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(Desk, "renew_file", renew_file)
    async with keeping() as made:
        sent, guest = request(form(b"x" * PART_BYTES), FORM, path="/v1/files"), guest_of(made)
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(sent[:-20])
        for _ in range(2):
            renewed.clear()
            await asyncio.wait_for(renewed.wait(), WITHIN_S)
        writer.write(sent[-20:])
        told = Reply.of(await asyncio.wait_for(reader.read(), WITHIN_S))
        writer.close()
        assert told.status == 200
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "upload"]
        assert not await guest._thread.run(guest._desk.expire, 0.0)


async def test_an_upload_that_others_have_given_up_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway has not reached the database for long, and some parts are gone."""
    monkeypatch.setattr(Desk, "renew_file", lambda *_: False)
    async with keeping() as made:
        told = await upload(made, form(b"x"))
        assert (told.status, told.json["error"]["code"]) == (503, "store_failed")
        assert await held(made) == (0, 0)


async def test_an_upload_that_breaks_off_counts_no_longer() -> None:
    sent = request(form(b"x" * 3 * PART_BYTES), FORM, path="/v1/files")
    async with keeping() as made:
        _, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(sent[:-100])
        await until_held(made, 1)
        writer.close()
        await until_held(made, 0)


async def test_an_upload_counts_with_its_decoded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 4 * PART_BYTES
    monkeypatch.setattr(routes, "MOST_FILE_BYTES", most)
    monkeypatch.setattr(routes, "MOST_BYTES", 3 * most)

    async def send(made: Served, size: int) -> Reply:
        body = gzip.compress(form(b"x" * size))
        return Reply.of(await made.send(request(body, FORM, "content-encoding: gzip", path="/v1/files")))

    async with keeping() as made:
        told = await send(made, 2 * most)
        assert (told.status, told.json["error"]["code"]) == (400, "file_too_large")
        assert await held(made) == (0, 0)
        sent = await asyncio.gather(*(send(made, most) for _ in range(6)))
        assert {one.status for one in sent} <= {200, 429}
        count, size = await held(made)
    assert 1 <= [one.status for one in sent].count(200) == count <= 3
    assert size == count * most


async def test_a_file_that_is_deleted_while_it_is_read_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = Desk.read, list[int]()

    def until_deleted(desk: Desk, file_id: str, begin: int, end: int) -> bytes:
        asked.append(begin)
        return read(desk, file_id, begin, end) if len(asked) == 1 else b""

    monkeypatch.setattr(Desk, "read", until_deleted)
    async with keeping() as made:
        path = f"/v1/files/{await uploaded(made, b'x' * 2 * PART_BYTES)}/content"
        with capture_logs() as lines:
            sent = await made.send(request(b"", method="GET", path=path))
    assert sent.partition(b"\r\n\r\n")[2] == b"x" * PART_BYTES
    assert [(one["event"], one["code"]) for one in lines] == [("request refused", "file_not_found")]
