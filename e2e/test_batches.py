"""Files and batches by OpenAI's SDK, before embedded engines: alone, with workers, and when a gateway is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from e2e.sdk import sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher

CHAT: Final = "/v1/chat/completions"
TENANTS: list[Mapping[str, Any]] = [{"name": name, "api_keys": [name]} for name in ("blue", "red")]
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, *, custom_id: str | None = None, **body: Any) -> dict[str, Any]:
    asked = {"model": "demo", "messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 4}
    return {"custom_id": custom_id or f"line-{number}", "method": "POST", "url": CHAT, "body": {**asked, **body}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Launcher(tmp_path_factory.mktemp("batches")) as launch:
        engine = launch.engine("batches-1")
        made = Fleet(launch.gateway([engine], tenants=TENANTS), {engine.name: engine})
        made.start()
        yield made


@pytest.fixture
def blue(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with sync_client(fleet.gateway, api_key="blue") as client:
        yield client


def upload(client: openai.OpenAI, *lines: dict[str, Any]) -> Any:
    data = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("lines.jsonl", data), purpose="batch")


def create(client: openai.OpenAI, *lines: dict[str, Any], endpoint: Any = CHAT, **options: Any) -> Any:
    return client.batches.create(
        input_file_id=upload(client, *lines).id, endpoint=endpoint, completion_window="24h", **options
    )


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    eventually(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


def completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def answers(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_a_batch_answers_each_line_in_the_order_of_the_file(blue: openai.OpenAI) -> None:
    made = create(blue, *map(line, range(30)), metadata={"run": "one"})
    assert (made.status, made.metadata, made.endpoint) == ("validating", {"run": "one"}, CHAT)
    found = ended(blue, made.id)
    assert (found.status, found.model, found.error_file_id) == ("completed", "demo", None)
    assert (found.request_counts.total, found.request_counts.completed, found.request_counts.failed) == (30, 30, 0)
    told = answers(blue, found.output_file_id)
    assert [one["custom_id"] for one in told] == [f"line-{number}" for number in range(30)]
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in told)
    assert (
        found.usage.output_tokens == sum(one["response"]["body"]["usage"]["completion_tokens"] for one in told) == 120
    )
    assert found.in_progress_at <= found.finalizing_at <= found.completed_at


def test_a_line_that_an_engine_refuses_is_in_the_errors(blue: openai.OpenAI) -> None:
    found = ended(blue, create(blue, line(0), line(1, max_tokens=-1), line(2)).id)
    assert (found.status, found.request_counts.failed) == ("completed", 1)
    assert [one["custom_id"] for one in answers(blue, found.output_file_id)] == ["line-0", "line-2"]
    (refused,) = answers(blue, found.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"], refused["error"]) == ("line-1", 400, None)
    assert refused["response"]["body"]["error"]["message"]


def test_a_file_with_errors_fails_its_batch(blue: openai.OpenAI) -> None:
    found = ended(blue, create(blue, line(0), line(0), line(1, model="nobody"), line(2, stream=True)).id)
    assert (found.status, found.output_file_id, found.request_counts.total) == ("failed", None, 0)
    assert [(error.code, error.line) for error in found.errors.data] == [
        ("duplicate_custom_id", 2),
        ("model_mismatch", 3),
        ("stream_not_supported", 4),
    ]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
        ("/v1/embeddings", {"input": "Hello"}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}),
    ],
)
def test_endpoints(blue: openai.OpenAI, endpoint: Any, body: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"custom_id": "one", "method": "POST", "url": endpoint, "body": {"model": "demo", **body}}
    found = ended(blue, create(blue, asked, endpoint=endpoint).id)
    assert found.status == "completed"
    (told,) = answers(blue, found.output_file_id)
    assert told["response"]["status_code"] == 200
    assert found.usage.input_tokens > 0


def test_a_batch_that_is_cancelled_answers_what_it_has(blue: openai.OpenAI) -> None:
    made = create(blue, *[line(number, max_tokens=200) for number in range(900)])
    eventually(lambda: blue.batches.retrieve(made.id).status == "in_progress")
    assert blue.batches.cancel(made.id).status == "cancelling"
    found = ended(blue, made.id)
    assert found.status == "cancelled"
    told = [*(answers(blue, found.output_file_id) if found.output_file_id else []), *answers(blue, found.error_file_id)]
    assert sorted(one["custom_id"] for one in told) == sorted(f"line-{number}" for number in range(900))
    assert {one["error"]["code"] for one in answers(blue, found.error_file_id)} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        blue.batches.cancel(made.id)


def test_files(blue: openai.OpenAI) -> None:
    made = upload(blue, line(0))
    assert blue.files.retrieve(made.id) == made
    assert (made.filename, made.purpose, made.status) == ("lines.jsonl", "batch", "processed")
    assert made.expires_at - made.created_at == 30 * 86_400
    assert made.id in [one.id for one in blue.files.list(purpose="batch")]
    assert json.loads(blue.files.content(made.id).text) == line(0)
    part = blue.files.with_raw_response.content(made.id, extra_headers={"range": "bytes=2-5"})
    assert (part.status_code, part.content) == (206, json.dumps(line(0)).encode()[2:6])
    assert blue.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        blue.files.retrieve(made.id)


def test_lists_have_pages(blue: openai.OpenAI) -> None:
    made = [create(blue, line(number)).id for number in range(3)]
    latest = made[::-1]
    assert [one.id for one in blue.batches.list(limit=2)][:3] == latest
    assert [one.id for one in blue.batches.list(limit=100)][:3] == latest
    assert blue.batches.list(limit=1, after=latest[0]).data[0].id == latest[1]
    with pytest.raises(openai.BadRequestError, match="after: expected the id"):
        blue.batches.list(after="batch_\0")


def test_other_tenants_find_nothing(fleet: Fleet, blue: openai.OpenAI) -> None:
    made = create(blue, line(0))
    with sync_client(fleet.gateway, api_key="red") as red:
        for ask in (
            lambda: red.batches.retrieve(made.id),
            lambda: red.batches.cancel(made.id),
            lambda: red.files.retrieve(made.input_file_id),
            lambda: red.files.content(made.input_file_id),
            lambda: red.files.delete(made.input_file_id),
            lambda: red.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert not [one for one in red.batches.list() if one.id == made.id]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
def test_a_batch_that_cannot_be(blue: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    asked: dict[str, Any] = {"input_file_id": upload(blue, line(0)).id, "endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as error:
        blue.batches.create(**{**asked, **fields})
    assert error.value.param == param


def test_an_sdk_that_asks_again_gets_the_same_batch(fleet: Fleet, blue: openai.OpenAI) -> None:
    body = {"input_file_id": upload(blue, line(0)).id, "endpoint": CHAT, "completion_window": "24h"}

    def ask(retry: int) -> str:
        headers = {"authorization": "Bearer blue", "x-stainless-retry-count": f"{retry}"}
        batch_id: str = fleet.gateway.post("/v1/batches", json=body, headers=headers).json()["id"]
        return batch_id

    first = ask(0)
    assert ask(1) == first
    assert ask(0) != first


def test_online_calls_beside_lines_are_answered(blue: openai.OpenAI) -> None:
    made = create(blue, *[line(number, max_tokens=50) for number in range(60)])
    for _ in range(5):
        asked: Any = [{"role": "user", "content": "Now"}]
        assert blue.chat.completions.create(model="demo", messages=asked, max_tokens=4).choices
    assert ended(blue, made.id).request_counts.completed == 60


def test_tenants_take_turns(fleet: Fleet, blue: openai.OpenAI) -> None:
    many = create(blue, *[line(number, max_tokens=200) for number in range(900)])
    eventually(lambda: blue.batches.retrieve(many.id).status == "in_progress")
    with sync_client(fleet.gateway, api_key="red") as red:
        few = create(red, *map(line, range(20)))
        assert ended(red, few.id).request_counts.completed == 20
    assert blue.batches.cancel(many.id).status == "cancelling"
    ended(blue, many.id)


@pytest.mark.nightly  # most of a minute's window has to pass; tests/gateway/guests/batches/test_lateness.py decides
def test_a_batch_that_would_miss_its_window_waits_for_no_room(tmp_path: Path) -> None:
    """Beside an open answer, an engine without Plait's scheduler gets no line with a long prompt."""
    with Launcher(tmp_path) as launch:
        engine = launch.engine("late-1", time_scale=2, options=["--scheduler", "fcfs"])
        gateway = launch.gateway([engine], tenants=TENANTS)
        Fleet(gateway, {engine.name: engine}).start()
        with sync_client(gateway, api_key="blue") as client:
            asked: Any = [{"role": "user", "content": "Hello"}]
            with client.chat.completions.create(model="demo", messages=asked, max_tokens=4000, stream=True):
                long: Any = [{"role": "user", "content": "A long question. " * 1000}]
                lines = [line(number, messages=long) for number in range(5)]
                windows: list[Any] = ["24h", "1m"]
                patient, late = (
                    client.batches.create(
                        input_file_id=upload(client, *lines).id, endpoint=CHAT, completion_window=window
                    )
                    for window in windows
                )
                assert ended(client, late.id).request_counts.completed == 5
                assert completed(client, patient.id) == 0


def test_lines_count_as_batches_in_what_was_used(blue: openai.OpenAI) -> None:
    ended(blue, create(blue, line(0)).id)
    asked: Any = {"start_time": int(time.time()), "group_by": "batch"}
    found = blue.get("/organization/usage/completions", cast_to=dict[str, Any], options={"params": asked})
    assert any(result["batch"] and result["num_model_requests"] for result in found["data"][0]["results"])


def test_a_batch_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    with Launcher(tmp_path) as launch:
        engine = launch.engine("killed-1", time_scale=5)
        server = {"workers": 1}
        gateway = launch.gateway([engine], tenants=TENANTS, server=server, store={"path": str(folder / "store.db")})
        Fleet(gateway, {engine.name: engine}).start()
        with sync_client(gateway, api_key="blue", max_retries=20) as client:
            made = create(client, *[line(number, max_tokens=20) for number in range(200)])
            eventually(lambda: completed(client, made.id) > 20)
            gateway.kill()
            gateway.start()
            gateway.wait_until_ready()
            before = completed(client, made.id)
            found = ended(client, made.id)
            told = answers(client, found.output_file_id)
    assert before > 20
    assert (found.status, found.request_counts.completed) == ("completed", 200)
    assert [one["custom_id"] for one in told] == [f"line-{number}" for number in range(200)]


def test_workers_share_batches(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("shared-1")
        gateway: Server = launch.gateway([engine], tenants=TENANTS, server={"workers": 2})
        Fleet(gateway, {engine.name: engine}).start()
        with sync_client(gateway, api_key="blue") as client:
            made = [create(client, *map(line, range(5))).id for _ in range(4)]
            assert all(ended(client, one).request_counts.completed == 5 for one in made)
            assert set(made) <= {one.id for one in client.batches.list(limit=100)}


def command(file: Path, gateway: Server) -> list[str]:
    """`plait batch run` with a file."""
    words = ["-m", "plait.gateway.cli", "batch", "run", str(file), "--url", gateway.url, "--key", "blue"]
    return [sys.executable, *words]


def test_the_command_writes_the_answers(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps(line(number, max_tokens=-1 if number == 3 else 4)) for number in range(5)))
    done = subprocess.run(command(file, fleet.gateway), capture_output=True, text=True, check=False)
    assert (done.returncode, "4 answered, 1 failed" in done.stdout) == (1, True), done.stderr
    assert len((tmp_path / "lines.output.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "lines.errors.jsonl").read_text())["custom_id"] == "line-3"


def test_the_command_waits_for_a_gateway_that_is_away(tmp_path: Path) -> None:
    store, file = tmp_path / "store", tmp_path / "lines.jsonl"
    store.mkdir(mode=0o700)
    file.write_text("\n".join(json.dumps(line(number, max_tokens=20)) for number in range(200)))
    with Launcher(tmp_path) as launch:
        engine = launch.engine("away-1", time_scale=5)
        gateway = launch.gateway([engine], tenants=TENANTS, store={"path": str(store / "store.db")})
        Fleet(gateway, {engine.name: engine}).start()
        with subprocess.Popen(command(file, gateway), stderr=subprocess.PIPE, text=True) as running:
            with sync_client(gateway, api_key="blue", max_retries=20) as client:
                eventually(lambda: any(completed(client, one.id) > 20 for one in client.batches.list()))
            gateway.kill()
            assert running.stderr is not None
            assert "trying again" in running.stderr.readline()
            gateway.start()
        assert running.returncode == 0
    told = (tmp_path / "lines.output.jsonl").read_text().splitlines()
    assert [json.loads(one)["custom_id"] for one in told] == [f"line-{number}" for number in range(200)]
