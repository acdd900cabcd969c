"""Recipes of CONTRIBUTING, each followed in a copy of the project and used by the command that it names."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from e2e.ports import free_ports
from e2e.recipes.copied_tree import CopiedTree, get, until

GUESTS = "GUESTS: Final[Mapping[str, Callable[[Config], bool]]] = {\n"
NEWEST_FIRST = '''"""A scheduler that lets the newest call go first."""

from __future__ import annotations

from collections.abc import Sequence

from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan


class NewestFirst:
    """First come, last served."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The next iteration."""
        return Fcfs().plan(now_s, waiting[::-1], running, facts)
'''

NEWEST_IMPORT = "from plait.policy.scheduling.newest_first import NewestFirst\n"
GREETING = '''"""The route that greets."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from plait.gateway.api.own_route import OwnRoute
from plait.gateway.doors import Guest, House


class GreetingGuest(Guest):
    """Greets whoever has a key."""

    def __init__(self, house: House) -> None:
        self._keys = house.kernel.keys
        self.routes = [OwnRoute("GET", "/v1/greeting", self._greet, "A greeting")]

    async def _greet(self, request: Request) -> Response:
        self._keys.check(request.scope)
        return JSONResponse({"greeting": "hello"})
'''

CLOSED_SESSIONS = '''"""Refuses the calls of a session."""

from __future__ import annotations

from plait.backends.errors import CallerError, PlaitError
from plait.gateway.api.call_api import Answer, AskedCompletion
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.doors import Guest, House


class ClosedSessions:
    """A step before a call."""

    async def take(self, asked: AskedCompletion) -> Answer | None:
        if asked.annotations.session == "closed":
            raise CallerError("This session takes no calls.")
        return None

    def refused(self, incoming: Incoming, error: PlaitError) -> None: ...


class ClosingGuest(Guest):
    def __init__(self, house: House) -> None:
        self.before = [ClosedSessions()]
'''

TOY_ROW = """
    Dialect(kind="toy", title="Toy", parameters="extras", launcher=Launcher("toy", "toy arguments")),"""
TOY = '''"""An engine of its own kind, which says what it was sent, with its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec

from plait.backends.protocol.cache_state import CacheState, KvState

REPORT = CacheState(
    kind="toy", engine="toy", epoch="1", cursor=0, model="m", block_tokens=16, granularity_tokens=64, snapshot=True,
    stored=[], removed=[], kv=KvState(100, 100, 0),
)
ANSWERS = {
    "/v1/models": msgspec.json.encode({"object": "list", "data": [{"id": "m"}]}),
    "/cache_state": msgspec.msgpack.encode(REPORT),
}


class Toy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path.partition("?")[0])
        self.say(404 if answer is None else 200, answer or b"")

    def do_POST(self) -> None:
        fields = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
        choice = {"index": 0, "text": " ".join(sorted(fields)), "finish_reason": "stop"}
        self.say(200, msgspec.json.encode({"object": "text_completion", "model": "m", "choices": [choice]}))

    def say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(arguments: Sequence[str]) -> None:
    """Serve on the port that stands behind the dashes."""
    HTTPServer(("127.0.0.1", int(arguments[-1])), Toy).serve_forever()
'''


def test_an_engine_adapter(tmp_path: Path) -> None:
    copy = CopiedTree(tmp_path, "An engine adapter")
    copy.add("backends/toy/__init__.py", "")
    copy.add("backends/toy/launch.py", TOY)
    copy.insert("backends/protocol/dialects.py", "DIALECTS: Final = _by_kind(", TOY_ROW)
    copy.check("tests/test_architecture.py", "-k", "engine_folder or in_its_own_folder or compared")
    (port,) = free_ports(1)
    engine = f"http://127.0.0.1:{port}"
    with copy.started("plait NAME -- ARGUMENTS", str(port), name="toy"), copy.served(engine) as url:
        until(lambda: "extras" in get(f"{url}/v1/completions", {"model": "m", "prompt": "Hello"}))
        assert "does not report which tokenizer it has" in get(f"{url}/ready")


def test_a_local_scheduler(tmp_path: Path) -> None:
    copy = CopiedTree(tmp_path, "A local scheduler")
    copy.add("policy/scheduling/newest_first.py", NEWEST_FIRST)
    schedulers = "policy/scheduling/local_scheduler.py"
    copy.insert(schedulers, "LocalScheduler]] = {\n", '    "newest_first": NewestFirst,\n')
    copy.insert(schedulers, "import Fcfs, HitRatio, LongestPrefix\n", NEWEST_IMPORT)
    costs = copy.run("python -m benchmarks plan_cost --schedulers NAME", "--plans", "2", name="newest_first")
    assert [line.split()[0] for line in costs.splitlines()].count("newest_first") == 2
    measured = "python -m benchmarks local_scheduler --quick --schedulers slo,NAME"
    table = copy.run(measured, "--calls", "3", "--jobs", "1", name="newest_first")
    assert table.startswith("skipped: no ") or "\n| newest_first " in table


def test_a_route(tmp_path: Path) -> None:
    copy = CopiedTree(tmp_path, "A route")
    copy.add("gateway/guests/greeting/guest.py", GREETING)
    copy.insert("gateway/app.py", GUESTS, '    "greeting": always,\n')
    copy.insert("docs/routes.md", "/openapi.json`, `/` | here |\n", "| `GET /v1/greeting` | here |\n")
    copy.check("tests/gateway/api/test_about.py::test_the_document_has_every_route_that_answers")
    with copy.served() as url:
        assert json.loads(get(f"{url}/v1/greeting")) == {"greeting": "hello"}
        assert json.loads(get(f"{url}/openapi.json"))["paths"]["/v1/greeting"]["get"]["summary"] == "A greeting"


def test_a_guest(tmp_path: Path) -> None:
    copy = CopiedTree(tmp_path, "A guest")
    copy.add("gateway/guests/closing/guest.py", CLOSED_SESSIONS)
    copy.insert("gateway/app.py", GUESTS, '    "closing": always,\n')
    with copy.served() as url:
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        with httpx.Client(base_url=url, trust_env=False) as client:
            closed, other = (
                client.post("/v1/chat/completions", json=asked, headers={"plait-session": name})
                for name in ("closed", "other")
            )
    assert (closed.status_code, closed.json()["error"]["message"]) == (400, "This session takes no calls.")
    assert other.status_code in {404, 503}, "the engine is not there"


def test_a_metric(tmp_path: Path) -> None:
    copy = CopiedTree(tmp_path, "A metric")
    copy.insert(
        "gateway/calls/metrics.py",
        '        text = "Placements of calls that left their engines, by reason"\n',
        '        self._greetings = counter("greetings", "Calls that begin with a greeting", "model")\n',
    )
    with copy.served() as url:
        assert "# TYPE plait_greetings_total counter" in get(f"{url}/metrics")


def test_a_setting(tmp_path: Path) -> None:
    copy = CopiedTree(tmp_path, "A setting")
    field = '\n    greets: bool = True\n    """Answer greetings. Set it where people begin with one."""\n'
    copy.insert("gateway/config/sections.py", 'where one-off prompts are longer, e.g. of RAG."""\n', field)
    compared = "tests/gateway/config/test_sections.py::test_the_example_is_made_from_the_sections"
    with pytest.raises(AssertionError, match="test_the_example_is_made_from_the_sections"):
        copy.check(compared)
    copy.run("python -m tests.example_config")
    copy.check(compared)
    copy.run("plait check-config --config config.example.toml")
