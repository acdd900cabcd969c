"""Somebody at an address on this machine who notes all that is sent there, in threads of its own."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.waiting import WITHIN_S


class Eavesdropper:
    """Listens while it is entered, and passes all on to the server at `port` and back; None: it answers nothing."""

    def __init__(self, port: int | None = None) -> None:
        self._server_port = port
        self._heard: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def heard(self) -> bytes:
        """All that was sent there so far."""
        return b"".join(self._heard)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WITHIN_S)

    def _accept(self) -> None:
        with suppress(OSError):  # at the end
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if self._server_port is None:
                self._pass_on(client, None)
                return
            with socket.create_connection(("127.0.0.1", self._server_port)) as server:
                back = threading.Thread(target=self._back, args=(server, client), daemon=True)
                back.start()
                self._pass_on(client, server)
                back.join(WITHIN_S)

    def _pass_on(self, client: socket.socket, server: socket.socket | None) -> None:
        while piece := client.recv(65_536):
            self._heard.append(piece)
            if server is None:
                return
            server.sendall(piece)
        if server is not None:
            server.shutdown(socket.SHUT_WR)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while piece := server.recv(65_536):
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
