"""`plait batch run FILE`: uploads a file of lines, runs it as a batch, and writes the answers to files."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from plait.gateway.commands.asked_gateway import NoAnswerError

EACH_S, LONGEST_S = 1.0, 30.0
"""Between two looks at the batch. While the gateway does not answer, the pause doubles up to the longest one."""

REPEATED: Final = {"x-stainless-retry-count": "1"}
"""Of a create that may have been sent before, and then gets the same batch. A file of its own tells it from others."""

ENDED: Final = frozenset(("completed", "failed", "expired", "cancelled"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(required=True, dest="what", metavar="run")
    run_ = what.add_parser("run", help="run the lines of a file, and wait for the answers")
    run_.add_argument("file", type=Path, metavar="FILE", help="a line for each request, as OpenAI's batches have them")
    run_.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway (default: %(default)s)")
    run_.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: OPENAI_API_KEY")
    run_.add_argument("--window", default="24h", metavar="TIME", help="1m to 7d (default: %(default)s)")
    run_.add_argument("--output", type=Path, metavar="PATH", help="default: FILE with .output.jsonl")
    run_.add_argument("--errors", type=Path, metavar="PATH", help="default: FILE with .errors.jsonl")


def run(arguments: argparse.Namespace) -> None:
    """Run the batch; exits with 1 if a line has failed. Ctrl-C leaves it running.

    Raises ValueError if the gateway refuses, or does not answer before it has the file, and for a file that cannot be
    written.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    endpoint, file = _endpoint(arguments.file), arguments.file
    written = _written(file, arguments.output, arguments.errors)
    gateway = _Gateway(arguments.url, arguments.key)
    with file.open("rb") as lines:
        uploaded = gateway.ask("POST", "/v1/files", files={"file": lines}, data={"purpose": "batch"}, timeout=600.0)
    asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": arguments.window}
    batch = gateway.patiently(gateway.ask, "POST", "/v1/batches", json=asked, headers=REPEATED)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with Progress(*columns) as bar:
            shown = bar.add_task(batch["id"], total=None)
            while batch["status"] not in ENDED:
                time.sleep(EACH_S)
                batch = gateway.patiently(gateway.ask, "GET", f"/v1/batches/{batch['id']}")
                counts = batch["request_counts"]
                bar.update(shown, total=counts["total"] or None, completed=counts["completed"] + counts["failed"])
        for kind, path in written.items():
            if batch[f"{kind}_file_id"] is not None:
                gateway.patiently(gateway.save, f"/v1/files/{batch[f'{kind}_file_id']}/content", path)
            elif path.is_file():
                path.unlink()
                print(f"removed {path}, which was of another run")
    except KeyboardInterrupt:
        print(f"{batch['id']} is still {batch['status']}: ask for it, or cancel it, with an SDK.", file=sys.stderr)
        raise
    counts = batch["request_counts"]
    print(f"{batch['id']} is {batch['status']}: {counts['completed']} answered, {counts['failed']} failed.")
    for error in (batch["errors"] or {"data": []})["data"]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        print(f"{where}{error['code']}: {error['message']}", file=sys.stderr)
    if counts["failed"] or batch["status"] != "completed":
        sys.exit(1)


def _written(file: Path, output: Path | None, errors: Path | None) -> dict[str, Path]:
    """Where the answers go, by kind. Raises ValueError for a place that cannot be written or has something else."""
    written = {
        "output": output or file.with_suffix(".output.jsonl"),
        "error": errors or file.with_suffix(".errors.jsonl"),
    }
    taken = {file.resolve()}
    for path in written.values():
        if path.resolve() in taken or not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: expected a file of its own, in a folder that is there")
        if path.is_file() or not path.exists():  # both may go to the same device
            taken.add(path.resolve())
    return written


def _endpoint(file: Path) -> str:
    """The `url` of a file's first line. Raises ValueError for a file without one."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            return str(json.loads(next((line for line in lines if line.strip()), ""))["url"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{file}: expected lines of JSON with custom_id, method, url and body") from None


class _Gateway:
    """A client of a gateway for one tenant. Its requests raise `NoAnswerError`, and ValueError if they are refused."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=30.0, trust_env=False
        )

    def patiently(self, request: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a request returns once the gateway answers, which may be restarted or replaced meanwhile."""
        pause_s = EACH_S
        while True:
            try:
                return request(*args, **options)
            except NoAnswerError as error:
                if pause_s == EACH_S:
                    print(f"{error} (trying again)", file=sys.stderr)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)

    def ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._answered(method, path, **options) as answer:
            return msgspec.json.decode(answer.read(), type=dict[str, Any])

    def save(self, path: str, to: Path) -> None:
        """Download a file. An earlier one stays until the new one is whole."""
        is_device = to.exists() and not to.is_file()
        part = to if is_device else to.with_name(f"{to.name}.part")
        with self._answered("GET", path) as answer, part.open("wb") as written:
            for piece in answer.iter_bytes():
                written.write(piece)
        if not is_device:
            part.replace(to)
        print(f"wrote {to}")

    @contextmanager
    def _answered(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        url = self._client.base_url
        try:
            with self._client.stream(method, path, **options) as answer:
                if answer.is_error:
                    may_pass = answer.is_server_error or answer.status_code in {408, 429}
                    message = msgspec.json.decode(answer.read())["error"]["message"]
                    raise (NoAnswerError if may_pass else ValueError)(f"{url}: {message}")
                yield answer
        except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError) as error:
            raise NoAnswerError(f"{url} does not answer as a gateway does: {error}") from None
