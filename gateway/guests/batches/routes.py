"""The routes of files and batches, with OpenAI's objects."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from plait.backends.errors import CallerError, ConflictError, LimitError, NotFoundError, PlaitError
from plait.backends.protocol.client_bodies import mended
from plait.backends.protocol.openai import decode_body
from plait.gateway.admission.tenants import TenantIds
from plait.gateway.api.auth import KeyRing, key_of
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.asgi import header
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.desk import LAST_ID, PART_BYTES, UPLOAD_S, Desk, FileInUseError, FileRecord, id_at
from plait.gateway.guests.forms.multipart import FormReader
from plait.gateway.intake.body_encodings import decoder_of
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.tables import TablesError, TablesThread

FILES, BATCHES = "/v1/files", "/v1/batches"
PURPOSES: Final = ("batch",)
"""Those of uploads."""

ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
FIELDS: Final = frozenset((b"purpose", b"expires_after[anchor]", b"expires_after[seconds]"))
HOUR_S, DAY_S = 3600, 86_400
LONGEST_S: Final = 30 * DAY_S
WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([mhd])")
UNITS: Final = {"m": 60, "h": HOUR_S, "d": DAY_S}
MOST_FILES, MOST_BATCHES = 10_000, 100
"""The most objects of a list."""

MOST_FILE_BYTES: Final = 200 * 2**20
MOST_BYTES: Final = 10 * 2**30
"""Of all files of a tenant, answers of batches among them."""

MOST_KEPT: Final = 1000
"""The most files of a tenant."""

MOST_UNFINISHED: Final = 32
"""The most batches of a tenant that have not ended."""

AGAIN_S: Final = 600
"""A batch that an SDK asks for again within so many seconds, and `MOST_BATCHES`, is the same one."""

T = TypeVar("T")


class FilesUnavailableError(PlaitError, status=503, code="store_failed", quotes=False):
    """The database of files and batches does not answer, or its disk is full."""

    def __init__(self) -> None:
        super().__init__("Files cannot be read or written now. Send the request again.", retry_after_s=1.0)


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: str
    seconds: int


class GivenBatch(msgspec.Struct, frozen=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


_GIVEN: Final = msgspec.json.Decoder(GivenBatch)


class BatchRoutes:
    """The routes of this module. `endpoints` are those that a batch may be for.

    `wake` tells the runner of a batch, `sweep` that a file can be deleted.
    """

    def __init__(
        self,
        desk: Desk,
        thread: TablesThread,
        keys: KeyRing,
        bodies: OpenBodies,
        tenants: TenantIds,
        *,
        endpoints: Sequence[str],
        wake: Callable[[], None],
        sweep: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._thread = thread
        self._keys = keys
        self._bodies = bodies
        self._tenants = tenants
        self._endpoints = endpoints
        self._wake = wake
        self._sweep = sweep
        self.routes = [
            OwnRoute("GET", FILES, self._list_files, "The uploaded files"),
            OwnRoute("POST", FILES, self._upload, "Upload a file of lines for a batch"),
            OwnRoute("GET", f"{FILES}/{{file_id}}", self._file, "One file"),
            OwnRoute("DELETE", f"{FILES}/{{file_id}}", self._delete, "Delete a file"),
            OwnRoute("GET", f"{FILES}/{{file_id}}/content", self._content, "The contents of a file"),
            OwnRoute("GET", BATCHES, self._list_batches, "The batches"),
            OwnRoute(
                "POST", BATCHES, self._create, "Run the lines of a file",
                body=GivenBatch, example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions"},
            ),
            OwnRoute("GET", f"{BATCHES}/{{batch_id}}", self._batch, "One batch"),
            OwnRoute("POST", f"{BATCHES}/{{batch_id}}/cancel", self._cancel, "Cancel a batch"),
        ]  # fmt: skip

    # Files.

    async def _upload(self, request: Request) -> Response:
        """Write a file as it comes."""
        tenant, identity = self._tenant(request)
        reader = FormReader(header(request.scope["headers"], b"content-type") or "", FIELDS, b"file")
        file_id, written, part, held = f"file-{token_hex(12)}", 0, 0, bytearray()
        told, most, is_whole = header(request.scope["headers"], b"content-length") or "", MOST_FILE_BYTES, False
        is_encoded = decoder_of(request.scope["headers"]) is not None
        to_come = min(int(told), most) if told.isdecimal() and not is_encoded else most
        renewing = asyncio.create_task(self._renew(file_id), name="upload")
        try:
            count, size = await self._run(self._desk.begin_file, tenant, file_id, to_come, time.time())
            if count > MOST_KEPT or size > MOST_BYTES:
                said = f"This tenant may keep {MOST_KEPT} files and {MOST_BYTES} bytes."
                raise LimitError(said, code="too_many_files")
            with self._bodies.open(request.scope, identity) as body:
                async for piece in body.pieces(request.receive, request.scope["headers"], most + PART_BYTES):
                    self._bodies.remove(identity, len(piece))  # on disk soon: it does not count as open
                    body.size -= len(piece)
                    reader.feed(piece)
                    held += b"".join(reader.taken)
                    reader.taken.clear()
                    while len(held) >= PART_BYTES:
                        await self._run(self._desk.put_part, file_id, part, bytes(held[:PART_BYTES]))
                        written, part = written + PART_BYTES, part + 1
                        del held[:PART_BYTES]
                    if written + len(held) > most:
                        raise CallerError(f"A file has at most {most} bytes.", code="file_too_large", param="file")
            reader.end()
            record = self._record(reader, file_id, written + len(held))
            if not await self._run(self._desk.renew_file, file_id, time.time()):
                raise FilesUnavailableError
            await self._run(self._desk.put_file, tenant, record, [(part, bytes(held))])
            is_whole = True
        finally:
            renewing.cancel()
            if not is_whole:
                with suppress(FilesUnavailableError):
                    await self._run(self._desk.drop, file_id)
                    self._sweep()
        return _json(_shown(record))

    async def _renew(self, file_id: str) -> None:
        """Renew an upload until this is cancelled, however slow its client is."""
        while True:
            await asyncio.sleep(UPLOAD_S / 5)
            with suppress(FilesUnavailableError):
                await self._run(self._desk.renew_file, file_id, time.time())

    def _record(self, reader: FormReader, file_id: str, size: int) -> FileRecord:
        given = {name: field.value for name, field in reader.found.items()}
        if reader.filename is None:
            raise CallerError("'file' is missing: send the lines as a file of the form.", param="file")
        if given.get("purpose") not in PURPOSES:
            raise CallerError(f"purpose: expected {', '.join(PURPOSES)}.", param="purpose")
        anchor, seconds = given.get("expires_after[anchor]", "created_at"), given.get("expires_after[seconds]")
        if seconds is not None and not seconds.isdecimal():
            raise CallerError("expires_after: expected a number of seconds.", param="expires_after")
        for_s = _kept_s(ExpiresAfter(anchor, LONGEST_S if seconds is None else int(seconds[:9])))
        now = int(time.time())
        return FileRecord(file_id, reader.filename or "upload", "batch", now, now + for_s, size)

    async def _list_files(self, request: Request) -> Response:
        tenant, _ = self._tenant(request)
        asked, found = request.query_params, await self._run(self._desk.files, tenant)
        found = [one for one in found if asked.get("purpose") in (None, one.purpose)]
        if asked.get("order", "desc") not in {"asc", "desc"}:
            raise CallerError("order: expected asc or desc.", param="order")
        found.sort(key=lambda one: (one.created_at, one.id), reverse=asked.get("order", "desc") == "desc")
        limit, after, ids = _limit(request, MOST_FILES, MOST_FILES), asked.get("after"), [one.id for one in found]
        if after is not None and after not in ids:
            raise _not_listed()
        rest = found if after is None else found[ids.index(after) + 1 :]
        return _list(list(map(_shown, rest[:limit])), has_more=len(rest) > limit)

    async def _file(self, request: Request) -> Response:
        return _json(_shown(await self._found(request)))

    async def _delete(self, request: Request) -> Response:
        tenant, _ = self._tenant(request)
        file_id = request.path_params["file_id"]
        try:
            was_there = bool(ID.fullmatch(file_id)) and await self._run(self._desk.delete_file, tenant, file_id)
        except FileInUseError:
            raise ConflictError("A batch that has not ended reads this file.", code="file_in_use") from None
        if not was_there:
            raise _no_file()
        self._sweep()
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        record = await self._found(request)
        begin, end = _range(request, record.bytes)
        is_part = (begin, end) != (0, record.bytes)
        if is_part and begin >= end:
            error = CallerError(f"The file has {record.bytes} bytes.", code="range_not_satisfiable")
            return Response(error.body(), 416, {"content-range": f"bytes */{record.bytes}"}, "application/json")
        headers = {"content-length": f"{end - begin}", "accept-ranges": "bytes"}
        if is_part:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{record.bytes}"
        pieces = self._pieces(record.id, begin, end)
        return StreamingResponse(pieces, 206 if is_part else 200, headers, "application/octet-stream")

    async def _pieces(self, file_id: str, begin: int, end: int) -> AsyncIterator[bytes]:
        for at in range(begin, end, PART_BYTES):
            piece = await self._run(self._desk.read, file_id, at, min(end, at + PART_BYTES))
            if not piece:  # it was deleted meanwhile
                raise _no_file()
            yield piece

    async def _found(self, request: Request) -> FileRecord:
        tenant, _ = self._tenant(request)
        file_id = request.path_params["file_id"]
        record = await self._run(self._desk.file, tenant, file_id) if ID.fullmatch(file_id) else None
        if record is None:
            raise _no_file()
        return record

    # Batches.

    async def _create(self, request: Request) -> Response:
        tenant, identity = self._tenant(request)
        with self._bodies.open(request.scope, identity) as opened:
            raw = await opened.read(request.receive, request.scope["headers"])
        given = mended(decode_body, raw, _GIVEN)[0]
        self._check(given)
        window, expires = WINDOW.fullmatch(given.completion_window), given.output_expires_after
        for_s = 0 if window is None else int(window[1]) * UNITS[window[2]]
        if not 60 <= for_s <= 7 * DAY_S:
            raise CallerError("completion_window: expected 24h, or a time from 1m to 7d.", param="completion_window")
        now_s = time.time()
        now, batch_id = int(now_s), id_at(now_s) + token_hex(6)
        batch = Batch(
            batch_id, tenant, identity, key_of(request.scope), given.endpoint, given.input_file_id,
            given.completion_window, now, now + for_s, metadata=given.metadata,
            output_expires_in_s=LONGEST_S if expires is None else _kept_s(expires, "output_expires_after"),
        )  # fmt: skip
        if (header(request.scope["headers"], b"x-stainless-retry-count") or "0") != "0":
            for before in await self._run(self._desk.batches, tenant, MOST_BATCHES, LAST_ID, id_at(now - AGAIN_S)):
                if before.is_same(batch, AGAIN_S):
                    return _json(before.shown())
        is_id = ID.fullmatch(given.input_file_id)
        is_added = await self._run(self._desk.add, batch, MOST_UNFINISHED) if is_id else None
        if is_added is None:
            raise _no_file("input_file_id")
        if not is_added:
            said = f"This tenant may have {MOST_UNFINISHED} batches that have not ended."
            raise LimitError(said, code="too_many_batches")
        self._wake()
        return _json(batch.shown())

    def _check(self, given: GivenBatch) -> None:
        if given.endpoint not in self._endpoints:
            raise CallerError(f"endpoint: expected one of {', '.join(self._endpoints)}.", param="endpoint")
        metadata = given.metadata or {}
        if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
            raise CallerError("metadata: expected 16 pairs of 64 and 512 characters at most.", param="metadata")

    async def _list_batches(self, request: Request) -> Response:
        tenant, _ = self._tenant(request)
        limit, after = _limit(request, 20, MOST_BATCHES), request.query_params.get("after")
        if after is not None and await self._known(tenant, after) is None:
            raise _not_listed()
        found = await self._run(self._desk.batches, tenant, limit + 1, after or LAST_ID)
        return _list([one.shown() for one in found[:limit]], has_more=len(found) > limit)

    async def _batch(self, request: Request) -> Response:
        return _json((await self._found_batch(request)).shown())

    async def _cancel(self, request: Request) -> Response:
        batch = await self._found_batch(request)
        if batch.status not in {"validating", "in_progress", "cancelling"}:
            raise ConflictError(f"The batch is {batch.status} and cannot be cancelled.", code="batch_ended")
        await self._run(self._desk.cancel, batch.tenant, batch.id, int(time.time()))
        self._wake()
        return _json((await self._found_batch(request)).shown())

    async def _found_batch(self, request: Request) -> Batch:
        tenant, _ = self._tenant(request)
        batch = await self._known(tenant, request.path_params["batch_id"])
        if batch is None:
            raise NotFoundError("No such batch.", code="batch_not_found")
        return batch

    async def _known(self, tenant: str, batch_id: str) -> Batch | None:
        return await self._run(self._desk.batch, tenant, batch_id) if ID.fullmatch(batch_id) else None

    def _tenant(self, request: Request) -> tuple[str, str]:
        """What is stored of the tenant, and its identity."""
        identity = self._keys.check(request.scope)
        return self._tenants.stored(identity), identity

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        try:
            return await self._thread.run(work, *args)
        except TablesError:
            raise FilesUnavailableError from None


def _shown(record: FileRecord) -> dict[str, Any]:
    """OpenAI's object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def _kept_s(expires: ExpiresAfter, param: str = "expires_after") -> int:
    if expires.anchor != "created_at" or not HOUR_S <= expires.seconds <= LONGEST_S:
        said = f"Expected the anchor created_at, and {HOUR_S} to {LONGEST_S} seconds."
        raise CallerError(f"{param}: {said}", param=param)
    return expires.seconds


def _range(request: Request, size: int) -> tuple[int, int]:
    """The bytes that are asked for, if there are any; all of them without one valid range (RFC 9110, 14)."""
    found = re.fullmatch(r"bytes=([0-9]{0,15})-([0-9]{0,15})", request.headers.get("range", ""))
    first, last = found.groups() if found is not None else ("", "")
    if not (first or last) or (first and last and int(last) < int(first)):
        return 0, size
    begin = int(first) if first else max(0, size - int(last))
    return begin, min(size, int(last) + 1) if first and last else size


def _limit(request: Request, usual: int, most: int) -> int:
    """How many objects of a list are asked for."""
    limit = request.query_params.get("limit", f"{usual}")
    if len(limit) > 5 or not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise CallerError(f"limit: expected a number from 1 to {most}.", param="limit")
    return int(limit)


def _not_listed() -> CallerError:
    return CallerError("after: expected the id of an object in the list.", param="after")


def _list(data: list[dict[str, Any]], *, has_more: bool) -> Response:
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return _json({"object": "list", "data": data, **ends, "has_more": has_more})


def _no_file(param: str | None = None) -> NotFoundError:
    return NotFoundError("No such file.", code="file_not_found", param=param)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
