"""What the live page takes beside 64 engines and 500 calls/s: memory, and the time until a call is open.

`python -m benchmarks live_page [--engines N] [--seconds S] [--json PATH]`. Ended calls are put into a gateway's
receipts and its feed, in its process; no engine is asked. Headless Chromium shows the page, and opens calls by key.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from multiprocessing.connection import Connection
from statistics import median
from typing import Final

import msgspec

from benchmarks.live_screen import _mib
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from e2e.clients.browser import Page, browser
from plait.gateway.app import Gateway
from plait.gateway.calls.call import NOWHERE, Answer, Asked, Attempt, Ending
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.outgoing import ForwardedBody
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.timer import loop_time_s
from plait.lab.simulation.claim import Claim
from plait.policy.types import Call
from tests.gateway.api.served_gateway import CHAT, serving

CALLS_PER_S: Final = 500
TICK_S: Final = 0.02
BLOCKS: Final = 20
KEY: Final = "a-key-for-the-benchmark"
EACH_S: Final = 3.0
"""A call is opened so often."""

MOST_MIB: Final = 250.0
MOST_OPEN_S: Final = 1.0
SENTENCES: Final = "document.querySelectorAll('#sentences li').length"


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim does not hold."""
    parser = timed_parser(__doc__)
    parser.add_argument("--engines", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="watched (default: %(default)s)")
    arguments = parser.parse_args()
    with _busy_gateway(arguments.engines) as (port, gateway_id), browser() as page:
        page.call("Performance.enable")
        page.open(f"http://127.0.0.1:{port}/admin/#key={KEY}")
        page.eventually("document.querySelectorAll('#calls button:enabled').length >= 40")
        opened_s, ends_s = list[float](), time.monotonic() + arguments.seconds
        while time.monotonic() < ends_s:
            page.look(EACH_S)
            opened_s.append(_opened_s(page))
        worst_s = _worst_s(page)
        metrics = {one["name"]: one["value"] for one in page.call("Performance.getMetrics")["metrics"]}
        heap_mib, gateway_mib = metrics["JSHeapUsedSize"] / 2**20, _mib(gateway_id)
        rate = page.evaluate("parseFloat(document.getElementById('calls_per_s').textContent)")
        report = Report(
            lines=[
                f"{rate:.0f} calls/s; {len(opened_s)} calls opened, in {median(opened_s):.3f} s (median)",
                f"the latest of all receipts were shown in {worst_s:.3f} s",
            ],
            claims=[
                Claim("errors of the page", float(len(page.complaints)), most=0.0),
                Claim("seconds until a call is open", max(opened_s), most=MOST_OPEN_S),
                Claim("memory of the gateway in MiB", gateway_mib, most=MOST_MIB),
                Claim("memory of the page's script in MiB", heap_mib, most=MOST_MIB),
            ],
            results=[{"opened_s": opened_s, "worst_s": worst_s, "calls_per_s": rate}],
            inputs={"calls_per_s": CALLS_PER_S},
            is_timed=True,
        )
    return finish("live_page", report, arguments)


def _opened_s(page: Page) -> float:
    """Open the newest call by key, and close it; returns the seconds until its sentences are there."""
    page.evaluate("document.querySelector('#calls button:enabled').focus()")
    began_s = time.monotonic()
    _press(page, "Enter", 13, "\r")
    while page.evaluate(SENTENCES) < 2:  # one is the gateway's error
        assert time.monotonic() < began_s + 60 * MOST_OPEN_S, page.evaluate("document.body.innerText")
    seconds = time.monotonic() - began_s
    _press(page, "Escape", 27)
    page.eventually("!document.getElementById('opened').open")
    page.evaluate("document.activeElement.blur()")
    return seconds


def _press(page: Page, key: str, code: int, text: str = "") -> None:
    page.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, text=text)
    page.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)


def _worst_s(page: Page) -> float:
    """The seconds until the latest calls of all receipts are shown."""
    began_s = time.monotonic()
    page.evaluate("document.querySelector('#views [value=late]').click()")
    while not page.evaluate("document.getElementById('left_out').textContent.startsWith('of the kept receipts')"):
        assert time.monotonic() < began_s + 60 * MOST_OPEN_S, page.evaluate("document.body.innerText")
    return time.monotonic() - began_s


@contextmanager
def _busy_gateway(engines: int) -> Iterator[tuple[int, int]]:
    """(the port of a gateway with so many engines, its process id)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(engines, there), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield here.recv(), process.pid
    finally:
        process.terminate()
        process.join()


def _serve(engines: int, told: Connection) -> None:
    asyncio.run(_served(engines, told))


async def _served(engines: int, told: Connection) -> None:
    names = [f"engine-{number}" for number in range(engines)]
    async with serving(*names, server={"admin_key": KEY}) as served:
        told.send(served.port)
        calls = _ended_calls(served.gateway)
        began_s, done, receipts = loop_time_s(), 0, served.gateway.house[Receipts]
        while True:
            due = int((loop_time_s() - began_s) * CALLS_PER_S)
            for delivery in islice(calls, due - done):
                watch = served.gateway.kernel.relay.holdings.watch
                if watch is not None:
                    watch.placed(delivery)
                receipts.ended(delivery)
                if watch is not None:
                    watch.ended(delivery)
            done = due
            await asyncio.sleep(TICK_S)


def _ended_calls(gateway: Gateway) -> Iterator[Delivery]:
    """Calls that end now, on each engine in turn."""
    router, now_s = gateway.kernel.router, loop_time_s()
    bookings = []
    for number in range(len(router.engines)):
        hashes = array("Q", range(1 + BLOCKS * number, 1 + BLOCKS * (number + 1)))
        call = Call("", "m", BLOCKS * router.block_tokens, router.block_tokens, hashes, arrived_s=now_s)
        bookings.append(router.book(call, router.select(call, now_s), now_s))
    for number in count():
        booking, now_s = bookings[number % len(bookings)], loop_time_s()
        call = booking.call._replace(call_id=f"{number:032x}", arrived_s=now_s - 1.0)
        times = {"booked_s": now_s - 1.0, "sent_s": now_s - 0.9, "first_token_s": now_s - 0.5 - number % 7 * 0.05}
        booking = msgspec.structs.replace(booking, call=call, **times)
        usage = CallUsage(call.prompt_tokens, 20, 64)
        attempt = Attempt(booking, Answer("ok", usage=usage, finish="stop"))
        asked = Asked(call, CHAT, (), ForwardedBody(b""), tenant="tenant")
        ending = Ending("ok", 200, booking.placement.engine_id, ended_s=now_s)
        yield Delivery(asked, call, NOWHERE, None, attempt=attempt, ending=ending)


if __name__ == "__main__":
    sys.exit(main())
