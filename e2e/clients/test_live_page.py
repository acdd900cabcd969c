"""The live view's page in headless Chromium, at a gateway with calls."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from e2e.clients.browser import Page, browser, chromium
from e2e.clients.environment import NODE_MODULES
from e2e.ports import free_ports
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from plait.backends.profiles import load_profile
from plait.lab.simulation.endless_load import running_load
from plait.lab.simulation.processes import FleetPlan, running_fleet
from tests.waiting import WITHIN_S

KEY = "a-key-for-operators"
CALLS_PER_S = 12.0

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
)


class Served(NamedTuple):
    """A gateway's address and its process."""

    url: str
    gateway_id: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    port = free_ports(5)[0]
    kv_tokens = load_profile("a6000-mistral-7b").kv.tokens
    plan = FleetPlan(port=port, engine_port=port + 1, kv_tokens=kv_tokens, admin_key=KEY)
    with running_fleet(plan) as gateway_id, running_load(plan.url, plan.model, CALLS_PER_S):
        yield Served(plan.url, gateway_id)


@pytest.fixture
def page() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core, which checks a page by the rules of WCAG and its own."""
    script = NODE_MODULES / "axe-core" / "axe.min.js"
    if not script.exists():
        pytest.skip("there is no axe-core: make clients-environment")
    return script.read_text(encoding="utf-8")


def violations(page: Page, axe: str) -> list[dict[str, Any]]:
    """What axe-core finds against a page as it is, in light and dark colours."""
    found: list[dict[str, Any]] = []
    for scheme in ("light", "dark"):
        page.colours(scheme)
        page.look(0.5)  # transitions end
        page.evaluate(f"{axe}\n; window.found = null; axe.run().then((result) => {{ window.found = result; }}); 0")
        result = page.eventually(
            "window.found && JSON.stringify(window.found.violations.map((one) => "
            "({id: one.id, help: one.help, where: one.nodes.map((node) => node.html)})))"
        )
        found += [{"scheme": scheme, **one} for one in json.loads(result)]
    return found


def test_it_has_no_barrier_and_the_keyboard_reaches_it(served: Served, page: Page, axe: str) -> None:
    page.open(served.url)
    page.eventually(f"!{is_hidden('ask')}")
    assert "server.admin_key" in page.evaluate("document.body.innerText"), "it says where the key is"
    assert violations(page, axe) == []

    page.evaluate(f"document.getElementById('key').value = '{KEY}'; document.querySelector('#ask button').click()")
    page.eventually("document.querySelectorAll('#calls tbody tr').length >= 5")
    page.eventually("document.querySelectorAll('#prefixes tbody tr').length >= 1")
    assert page.evaluate("document.activeElement.id") == "live", "what was focused is hidden"
    assert violations(page, axe) == []
    focusable = "[...document.querySelectorAll('[tabindex=\"0\"]')].filter((one) => one.checkVisibility())"
    assert page.evaluate(f"{focusable}.map((one) => one.id)") == ["live", "engines"]
    page.evaluate(f"{ENDED}.click()")
    page.eventually(SENTENCES)
    assert violations(page, axe) == []
    assert page.complaints == []


def is_hidden(name: str) -> str:
    return f"document.getElementById('{name}').hidden"


def test_without_a_key_it_asks_and_shows_nothing(served: Served, page: Page) -> None:
    page.open(served.url)
    page.eventually(f"!{is_hidden('ask')}")
    page.look(1.5)
    assert page.evaluate(is_hidden("live"))
    assert page.evaluate("document.querySelectorAll('#engines li, #calls tbody tr, #prefixes tbody tr').length") == 0
    assert not any("/admin/live" in url for url in page.requested)
    assert page.complaints == []

    page.evaluate("document.getElementById('key').value = 'wrong'; document.querySelector('#ask button').click()")
    page.eventually("document.getElementById('why').textContent.includes('does not take')")
    assert page.evaluate(is_hidden("live"))
    page.evaluate(f"document.getElementById('key').value = '{KEY}'; document.querySelector('#ask button').click()")
    page.eventually("document.querySelectorAll('#engines li').length === 4")
    assert not page.evaluate(is_hidden("live"))


def test_with_the_key_it_shows_engines_prefixes_and_calls(served: Served, page: Page) -> None:
    page.open(f"{served.url}/#key={KEY}")
    page.eventually("document.querySelectorAll('#engines li').length === 4")
    page.eventually("document.querySelectorAll('#prefixes tbody tr').length >= 3")
    page.eventually("document.querySelectorAll('#calls tbody tr').length >= 20")
    page.eventually("parseFloat(document.getElementById('calls_per_s').textContent) > 3")
    page.eventually("parseFloat(document.getElementById('hit_rate').textContent) > 20")
    shown = page.evaluate("document.body.innerText")
    assert all(part in shown for part in ("engine-0", "engine-3", "exploit", "ok 200", "TTFT"))
    assert page.evaluate("[...document.querySelectorAll('#calls tr.failed')].length") == 0
    assert page.evaluate("location.href") == f"{served.url}/admin/", "the key stays in the address"
    page.look(3)
    assert page.evaluate("document.querySelectorAll('#calls tbody tr').length") <= 40
    assert page.evaluate("document.body.scrollHeight <= innerHeight"), "all of it fits"
    assert page.complaints == []
    assert {urlsplit(url).netloc for url in page.requested} == {urlsplit(served.url).netloc}, "it asks other hosts"

    page.call("Page.reload")
    page.eventually("document.querySelectorAll('#calls tbody tr').length >= 5")


IS_OPEN = "document.getElementById('opened').open"
SENTENCES = "[...document.querySelectorAll('#sentences li')].map((line) => line.textContent)"
ENDED = "document.querySelector('#calls tbody tr:not(.running) button:enabled')"


def press(page: Page, key: str, code: int, text: str = "") -> None:
    for kind in ("keyDown", "keyUp"):
        given = {"text": text} if text and kind == "keyDown" else {}
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **given)


def assert_it_says_what_came_of_a_call(page: Page) -> None:
    page.eventually(SENTENCES, lambda lines: lines and any("It was answered with 200" in line for line in lines))
    first = page.evaluate("document.querySelector('#facts dd').textContent")
    assert re.fullmatch(r"[\d,]+ \([\d,]+ expected\) of [\d,]+ tokens", first)
    lines = page.evaluate(SENTENCES)
    assert any(line.startswith("It was placed on engine-") for line in lines)


def test_a_call_opens_by_key(served: Served, page: Page) -> None:
    page.open(f"{served.url}/#key={KEY}")
    page.eventually("document.querySelectorAll('#calls tbody tr').length >= 20")
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as of a window in front: focus has its events
    page.eventually(f"{ENDED}?.focus(), document.activeElement.matches('#calls button')")
    page.eventually("document.getElementById('left_out').textContent.startsWith('still')")
    shown = page.evaluate("document.querySelector('#calls tbody').innerText")
    index = "[...document.querySelectorAll('#calls tbody tr')].indexOf(document.activeElement.closest('tr'))"
    place = page.evaluate(index)
    press(page, "ArrowDown", 40)
    assert page.evaluate(index) == place + 1
    page.look(1.5)
    assert page.evaluate("document.querySelector('#calls tbody').innerText") == shown, "rows move below the focus"

    press(page, "Enter", 13, "\r")
    assert_it_says_what_came_of_a_call(page)
    assert page.evaluate("document.activeElement.id") == "close"
    press(page, "Escape", 27)
    page.eventually(f"!{IS_OPEN}")
    assert page.evaluate(index) == place + 1, "the focus is where it was"
    assert page.complaints == []


def test_a_call_opens_by_click_and_so_do_the_worst(served: Served, page: Page) -> None:
    page.open(f"{served.url}/#key={KEY}")
    page.eventually(f"{ENDED} !== null")
    page.evaluate(f"{ENDED}.closest('tr').lastElementChild.click()")
    assert_it_says_what_came_of_a_call(page)
    page.evaluate("document.getElementById('close').click()")

    page.eventually(f"document.querySelector('#calls tr.running button')?.click(), {IS_OPEN}")
    assert_it_says_what_came_of_a_call(page)  # at its end
    page.evaluate("document.getElementById('close').click()")

    page.evaluate("document.querySelector('#views [value=late]').click()")
    page.eventually("document.getElementById('left_out').textContent.startsWith('of the kept receipts')")
    rows = "document.querySelectorAll('#calls tbody tr')"
    count = page.evaluate(f"{rows}.length")
    assert 1 <= count <= 10
    late = page.evaluate(f"[...{rows}].map((row) => row.call.late_s)")
    assert late == sorted(late, reverse=True)
    assert page.evaluate(f"{rows}[0].children[9].textContent").endswith(" late")
    page.evaluate(f"{rows}[0].querySelector('button').click()")
    assert_it_says_what_came_of_a_call(page)
    page.evaluate("document.getElementById('close').click()")

    for state, said in {"ended": "No receipt of this request id is kept", "running": "It has not ended."}.items():
        call = {"id": "no-such", "number": 0, "at": 0, "model": "demo", "prompt_tokens": 5, "state": state}
        page.evaluate(f"{rows}[0].call = {json.dumps(call)}; {rows}[0].click()")
        assert page.eventually(SENTENCES, lambda lines: lines and len(lines) == 1)[0].startswith(said)
        page.evaluate("document.getElementById('close').click()")

    page.evaluate("document.querySelector('#views [value=\"\"]').click()")
    page.eventually(f"{rows}.length > 10")


def draft(variable: str, *inputs: str) -> dict[str, Any]:
    """A call of a program that makes a variable of others."""
    taken = [{"name": name, "semantic_var_id": name} for name in inputs]
    made = {"name": variable, "in_out": True, "semantic_var_id": variable}
    text = " ".join(f"{{{{{name}}}}}" for name in (*inputs, variable))
    return {"model": "demo", "prompt": f"Go on: {text}", "max_tokens": 40, "placeholders": [*taken, made]}


def test_a_call_of_a_program_shows_the_others(served: Served, page: Page, axe: str) -> None:
    page.open(f"{served.url}/#key={KEY}")
    page.eventually("document.getElementById('state').textContent === 'live'")
    calls = [draft("a"), draft("b", "a"), draft("c", "a"), draft("d", "b", "c")]
    program = {"session": "essay", "calls": calls, "gets": {"d": None}}
    answer = httpx.post(f"{served.url}/v1/programs", json=program, trust_env=False, timeout=WITHIN_S)
    assert answer.status_code == 200, answer.text
    ended = "({ call }) => call.program && call.state === 'ended'"
    first = f"[...document.querySelectorAll('#calls tbody tr')].find({ended})"
    page.eventually(f"{first}?.querySelector('button').click(), {IS_OPEN}")
    page.eventually("document.querySelectorAll('#program li:not(.running)').length === 4")
    lines = page.eventually("document.querySelector('#program path').getAttribute('d').match(/M/g)?.length")
    assert lines == 4
    assert page.evaluate("document.querySelectorAll('#program [aria-current]').length") == 1
    assert page.evaluate("document.querySelector('#program span').textContent").startswith("ok, ")
    assert violations(page, axe) == []
    page.evaluate("document.querySelector('#program li:last-child button').click()")
    page.eventually("document.querySelector('#program li:last-child').ariaCurrent === 'true'")
    assert_it_says_what_came_of_a_call(page)
    assert page.complaints == []


HELD = {
    "model": "demo", "tenant": "<u>t</u>", "tokens": 12_000, "held_s": 65, "place": 2, "expected_s": 30,
    "live_tokens": 380_000, "kv_tokens": 400_000,
}  # fmt: skip


def test_held_calls_say_what_they_wait_for(served: Served, page: Page) -> None:
    """The page reads them of a changed event, because a gate closes only before a fleet that is full for long."""
    changed = f"(found) => (found.held ? {{...found, held: {json.dumps([HELD])}}} : found)"
    source = f"const parse = JSON.parse; JSON.parse = (text) => ({changed})(parse(text));"
    page.open(f"{served.url}/#key={KEY}")
    page.eventually("document.querySelectorAll('#engines li').length === 4")
    assert page.evaluate(is_hidden("held-section"))
    page.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    page.call("Page.reload")
    page.eventually("document.querySelectorAll('#held tbody tr').length === 1")
    cells = page.evaluate("[...document.querySelectorAll('#held td')].map((cell) => cell.textContent)")
    assert cells == ["demo", "<u>t</u>", "12.0k", "65 s", "2, in 30 s", "380.0k of 400.0k"]
    assert page.complaints == []


def test_without_receipts_no_call_opens_and_the_page_says_why(page: Page, tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("one")
        gateway = launch.gateway([engine], server={"admin_key": KEY}, receipts={"max_bytes": 0})
        for one in (engine, gateway):
            one.start()
        for one in (engine, gateway):
            one.wait_until_ready()
        page.open(f"{gateway.url}/#key={KEY}")
        page.eventually("document.querySelectorAll('#engines li').length === 1")
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
        assert gateway.post("/v1/completions", json=body).status_code == 200
        page.eventually("document.querySelectorAll('#calls tbody tr').length === 1")
        assert page.evaluate("document.getElementById('calls-title').innerText").endswith("[receipts] max_bytes is 0")
        assert page.evaluate(is_hidden("views"))
        page.evaluate("document.querySelector('#calls tbody td').click()")
        page.evaluate("document.querySelector('#calls button').click()")
        page.look(0.5)
        assert not page.evaluate(IS_OPEN)
        assert page.complaints == []


def test_it_goes_on_after_a_break(served: Served, page: Page) -> None:
    page.open(f"{served.url}/#key={KEY}")
    page.eventually("document.getElementById('state').textContent === 'live'")
    gateway_id = served.gateway_id
    os.kill(gateway_id, signal.SIGSTOP)
    try:
        page.eventually("document.getElementById('state').className === 'broken'")
    finally:
        os.kill(gateway_id, signal.SIGCONT)
    page.eventually("document.getElementById('state').textContent === 'live'")


def test_a_page_that_nobody_reads_does_not_hold_the_gateway(served: Served) -> None:
    """A client that opens the stream and never reads it; calls go on beside it."""
    began = threading.Event()

    def hang() -> None:
        with (
            httpx.Client(trust_env=False, timeout=WITHIN_S) as client,
            client.stream("GET", f"{served.url}/admin/live", headers={"authorization": f"Bearer {KEY}"}) as answer,
        ):
            assert answer.status_code == 200
            began.set()
            time.sleep(4)

    thread = threading.Thread(target=hang)
    thread.start()
    assert began.wait(WITHIN_S)
    answer = httpx.post(
        f"{served.url}/v1/completions",
        json={"model": "demo", "prompt": "Hello", "max_tokens": 4},
        trust_env=False,
        timeout=WITHIN_S,
    )
    assert answer.status_code == 200
    thread.join()


def test_it_names_what_is_wrong_until_it_is_mended(served: Served, page: Page, axe: str) -> None:
    page.open(f"{served.url}/#key={KEY}")
    page.eventually("document.querySelectorAll('#engines li').length === 4")
    page.eventually(is_hidden("problem-section"))  # the gateway stood still in an earlier test
    engine_id = process_of("engine-3")
    os.kill(engine_id, signal.SIGSTOP)
    try:
        page.eventually("document.getElementById('problems').innerText.includes('engine_out')")
        assert "engine-3 takes no calls" in page.evaluate("document.getElementById('problems').innerText")
        assert not page.evaluate(is_hidden("problem-section"))
        assert violations(page, axe) == []
        assert page.complaints == []
    finally:
        os.kill(engine_id, signal.SIGCONT)
    page.eventually(is_hidden("problem-section"))


WORKERS = 2
TENANTS = [f"<u>tenant-{number:02}</u>" for number in range(12)]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A gateway of several workers whose tenants and engines have names that look like HTML, and its last engine."""
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name) for name in ("one", "two")]
        tenants = list[Mapping[str, Any]](
            {"name": name, "api_keys": [name], "weight": 1 + place} for place, name in enumerate(TENANTS)
        )
        named = [{"name": f"<u>{engine.name}</u>", "url": engine.url} for engine in engines]
        gateway = launch.gateway(named, server={"workers": WORKERS, "admin_key": KEY}, tenants=tenants)
        for one in (*engines, gateway):
            one.start()
        for one in (*engines, gateway):
            one.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") == WORKERS * len(engines))
        yield gateway, engines[-1]


def test_tenants_and_problems_are_of_all_workers(workers: tuple[Server, Server], page: Page) -> None:
    gateway, engine = workers
    for place, name in enumerate(TENANTS):
        for _ in range(1 + place):  # each over a connection of its own
            answer = gateway.post(
                "/v1/completions",
                json={"model": "demo", "prompt": "Hello", "max_tokens": 4},
                headers={"authorization": f"Bearer {name}"},
            )
            assert answer.status_code == 200
    page.open(f"{gateway.url}/#key={KEY}")
    page.eventually("document.querySelectorAll('#tenants tbody tr').length === 10")
    first = page.evaluate("[...document.querySelector('#tenants tbody tr').children].map((cell) => cell.textContent)")
    assert (first[:5], first[6]) == ([TENANTS[-1], "12", "0", "12", "0"], "48")
    assert int(first[5]) >= 12
    assert page.evaluate("document.getElementById('tenant_count').textContent") == "since the start, and 2 more"

    def ask(_number: int) -> str:
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
        answer = gateway.post("/v1/completions", json=body, headers={"authorization": f"Bearer {TENANTS[0]}"})
        return answer.headers["x-request-id"]

    ids, count = list[str](), "document.querySelectorAll('#calls button').length"
    with ThreadPoolExecutor(8) as clients:  # at once, so that more than one worker takes some
        while not page.evaluate(count):
            ids += clients.map(ask, range(16))
            page.look(1.0)
    for request_id in ids[:6]:  # the receipts of another worker too
        page.evaluate(f"document.querySelector('#calls tr:has(button)').call.id = '{request_id}'")
        page.evaluate("document.querySelector('#calls button').click()")
        page.eventually(f"{SENTENCES}[0]?.startsWith('{request_id}')")
        page.evaluate("document.getElementById('close').click()")

    engine.kill()
    page.eventually("document.getElementById('problems').innerText.includes('engine_out')")
    page.eventually("document.getElementById('engines').innerText.includes('<u>two</u>')")
    page.eventually(
        "document.querySelector('#engines .why:not(:empty)')?.textContent.includes('refused the connection')"
    )
    state = page.eventually(
        "document.querySelector('#engines .odd')?.textContent", lambda text: text and "since" in text
    )
    assert re.fullmatch(r"(down|ejected) \(\w+\), since \d+ s", state)
    assert page.evaluate("document.querySelectorAll('u').length") == 0
    assert page.evaluate("document.body.scrollHeight <= innerHeight"), "all of it fits"
    assert page.complaints == []


def test_ranks_are_shown_below_their_address(page: Page, tmp_path: Path, axe: str) -> None:
    with Launcher(tmp_path) as launch:
        ranked, plain = launch.engine("ranked", options=["--ranks", "4"]), launch.engine("plain")
        gateway = launch.gateway([ranked, plain], server={"admin_key": KEY})
        for one in (ranked, plain, gateway):
            one.start()
        for one in (ranked, plain, gateway):
            one.wait_until_ready()
        eventually(lambda: gateway.metric("plait_engine_up") == 5)
        for place in range(20):
            body = {"model": "demo", "prompt": f"{place % 5} " * 400, "max_tokens": 4}
            assert gateway.post("/v1/completions", json=body).status_code == 200

        page.open(f"{gateway.url}/#key={KEY}")
        page.eventually("document.querySelectorAll('#engines > li').length === 2")
        heads = "[...document.querySelectorAll('#engines > li > h3')].map((head) => head.innerText).sort()"
        assert page.eventually(heads, lambda found: len(found) == 2) == ["plain\nup", "ranked\n4 ranks up"]
        ranks = "[...document.querySelectorAll('.ranks > li > h3 > span:first-child')].map((name) => name.textContent)"
        assert page.evaluate(ranks) == [f"ranked@{rank}" for rank in range(4)]
        assert page.evaluate("document.querySelectorAll('.ranks > li > .bar > i').length") >= 4
        assert violations(page, axe) == []
        assert page.evaluate("document.body.scrollHeight <= innerHeight"), "all of it fits"

        ranked.kill()
        page.eventually(heads, lambda found: found and "4 ranks down (" in found[1])
        page.eventually("document.querySelectorAll('#problems li').length === 1")
        problem = page.evaluate("document.getElementById('problems').innerText")
        assert problem.startswith("engine_out ranked Each rank of ranked takes no calls: it is down (")
        assert page.complaints == []


def process_of(engine: str) -> int:
    """The process of an engine, which this one has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return next(int(pid) for pid in children if f"--name={engine}" in Path(f"/proc/{pid}/cmdline").read_text())
