"""`plait batch run`: its file, and a gateway that goes away. A run is in `e2e/test_batches.py`."""

import os
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from plait.gateway.cli import main
from plait.gateway.commands import batch

LINE = '{"custom_id": "one", "method": "POST", "url": "/v1/embeddings", "body": {}}'
ANSWERS = b'{"custom_id": "one"}\n'
CONTENT = "/v1/files/file-out/content"


class Broken(httpx.SyncByteStream):
    """A body that breaks off."""

    def __iter__(self) -> Iterator[bytes]:
        yield ANSWERS[:5]
        raise httpx.ReadError("the connection was reset")


class Script:
    """A gateway that answers the looks at its batch, and then the downloads, with these in turn.

    An answer is a status, the batch's status, a body that is no JSON, or an error of the connection.
    """

    def __init__(self, looks: list[Any], downloads: list[Any]) -> None:
        self.looks = looks
        self.downloads = downloads
        self.pauses_s: list[float] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path.startswith("/v1/")
        if request.url.path == "/v1/files":
            return httpx.Response(200, json={"id": "file-in"})
        if request.method == "POST":
            return httpx.Response(200, json=shown("validating"))
        told = (self.downloads if request.url.path == CONTENT else self.looks).pop(0)
        if isinstance(told, BaseException):
            raise told
        if isinstance(told, int):
            return httpx.Response(told, json={"error": {"message": f"No, {told}."}})
        if isinstance(told, httpx.Response):
            return told
        return httpx.Response(200, json=shown(told))


def shown(status: str) -> dict[str, Any]:
    counts = {"total": 1, "completed": 1, "failed": 0}
    files = {"output_file_id": "file-out", "error_file_id": None}
    return {"id": "batch_1", "status": status, "request_counts": counts, "errors": None, **files}


def broken() -> httpx.Response:
    return httpx.Response(200, stream=Broken())


def whole() -> httpx.Response:
    return httpx.Response(200, content=ANSWERS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "lines.jsonl"
    made.write_text(LINE)
    return made


def run(script: Script, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status."""
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(script.answer)))
    monkeypatch.setattr(time, "sleep", script.pauses_s.append)
    return main(["batch", "run", *map(str, arguments)])


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"custom_id": "one"}', "\u00ff"])
def test_a_file_has_lines_of_requests(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(text, encoding="latin-1")
    assert main(["batch", "run", str(file)]) == 2
    assert "expected lines of JSON with custom_id, method, url and body" in capsys.readouterr().err


def test_the_gateway_has_to_answer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "run", str(file), "--url=http://127.0.0.1:1"]) == 2
    assert "does not answer as a gateway does" in capsys.readouterr().err


def test_a_gateway_that_is_away_is_asked_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = [httpx.ConnectError("refused"), 503, 429, httpx.Response(502, text="<html>"), httpx.ReadTimeout("silent")]
    script = Script(["in_progress", *away, 503, "in_progress", 503, "completed"], [503, whole()])
    assert run(script, monkeypatch, file) == 0
    assert file.with_suffix(".output.jsonl").read_bytes() == ANSWERS
    look = batch.EACH_S
    assert script.pauses_s == [look, look, 1.0, 2.0, 4.0, 8.0, 16.0, batch.LONGEST_S, look, 1.0, 1.0]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3, "each time that it goes away"
    assert told[0].endswith("refused (trying again)")
    assert told[1].endswith("No, 503. (trying again)")


@pytest.mark.parametrize("status", [401, 404])
def test_a_refusal_ends_the_command(
    status: int, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Script([503, status], []), monkeypatch, file) == 2
    assert f"No, {status}." in capsys.readouterr().err


def test_an_earlier_output_stays_until_the_new_one_is_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = file.with_suffix(".output.jsonl")
    output.write_text("earlier")
    assert run(Script(["completed"], [503, broken(), 404]), monkeypatch, file) == 2
    assert output.read_text() == "earlier"
    assert run(Script(["completed"], [broken(), whole()]), monkeypatch, file) == 0
    assert output.read_bytes() == ANSWERS
    assert sorted(one.name for one in file.parent.iterdir()) == ["lines.jsonl", "lines.output.jsonl"]


def test_errors_of_an_earlier_run_go(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = file.with_suffix(".errors.jsonl")
    errors.write_text("earlier")
    assert run(Script(["completed"], [whole()]), monkeypatch, file, "--url", "http://127.0.0.1:1/v1") == 0
    assert not errors.exists()


@pytest.mark.parametrize("output", ["lines.jsonl", "not_there/out.jsonl", "lines.errors.jsonl"])
def test_a_place_to_which_nothing_can_be_written_is_refused_before_the_batch(
    output: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    assert run(Script([], []), monkeypatch, file, "--output", output) == 2
    assert "expected a file of its own, in a folder that is there" in capsys.readouterr().err
    assert file.read_text() == LINE


def test_answers_may_be_for_nobody(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = "--output", os.devnull, "--errors", os.devnull
    assert run(Script(["completed"], [whole()]), monkeypatch, file, *nobody) == 0
    assert [one.name for one in file.parent.iterdir()] == ["lines.jsonl"]


def test_an_output_may_be_a_pipe(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = file.with_name("pipe")
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run(Script(["completed"], [whole()]), monkeypatch, file, "--output", pipe) == 0
    assert (os.read(reading, 100), stat.S_ISFIFO(pipe.stat().st_mode)) == (ANSWERS, True)
    os.close(reading)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (
            Script(["in_progress", 503, KeyboardInterrupt()], []),
            "in_progress",
        ),
        (
            Script(["completed"], [503, KeyboardInterrupt()]),
            "completed",
        ),
    ],
)
def test_ctrl_c_leaves_the_batch(
    script: Script, status: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, file) == 130
    assert f"batch_1 is still {status}: ask for it, or cancel it, with an SDK." in capsys.readouterr().err
