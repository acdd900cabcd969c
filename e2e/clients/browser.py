"""Headless Chromium, driven by its DevTools protocol: what a page shows, asks for and complains of."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.waiting import WITHIN_S

WIDTH, HEIGHT = 1280, 720

OPTIONS: Final = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--no-first-run", "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}",
)  # fmt: skip


def chromium() -> str | None:
    """The browser's path; None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """A page of the browser. `requested` has the addresses that it asked for, `complaints` its console's errors."""

    def __init__(self, socket: ClientConnection) -> None:
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._number = 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; returns its result. Raises `AssertionError` with its error."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(WITHIN_S))
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, said = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in {"error", "warning", "assert"}:
            self.complaints.append(json.dumps(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; None while the page changes."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def eventually(self, expression: str, holds: Callable[[Any], object] = bool) -> Any:
        """The expression's value once it holds. Raises `AssertionError` if it does not in time."""
        ends_s = time.monotonic() + WITHIN_S
        while not holds(value := self.evaluate(expression)):
            assert time.monotonic() < ends_s, f"{expression} is {value!r}; the console says {self.complaints}"
            time.sleep(0.1)
        return value

    def look(self, seconds: float) -> None:
        """Let time pass, and note what the page does."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self.evaluate("0")
            time.sleep(0.1)

    def colours(self, scheme: str) -> None:
        """Have the page think that its user prefers `dark` or `light`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Write what is seen, as PNG."""
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        self.look(0.7)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """An empty page of a new browser. Raises `RuntimeError` where there is no Chromium."""
    command = chromium()
    if command is None:
        raise RuntimeError("there is no chromium: apt-get install --no-install-recommends chromium")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        arguments = [command, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                with connect(_address(Path(folder, "DevToolsActivePort")), max_size=None, ping_interval=None) as socket:
                    yield Page(socket)
            finally:
                process.terminate()
                try:
                    process.wait(WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _address(port_file: Path) -> str:
    """The address of the first page, once the browser says its port."""
    ends_s = time.monotonic() + WITHIN_S
    while time.monotonic() < ends_s:
        if port_file.is_file() and (port := port_file.read_text().partition("\n")[0]):
            targets = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False, timeout=WITHIN_S).json()
            pages = [target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page"]
            if pages:
                return str(pages[0])
        time.sleep(0.05)
    raise RuntimeError("chromium has not opened its DevTools port")
