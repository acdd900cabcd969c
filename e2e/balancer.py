"""A load balancer that knows nothing: each request goes to a random one of several servers.

`python -m e2e.balancer PORT SERVER_PORT...`. A connection carries one request, as its answer says, so a client that
keeps connections comes to another server with each request.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress
from typing import Final

HEAD_BYTES: Final = 2**20
LINGER_S: Final = 2.0


class Balancer:
    """Passes connections on to `ports`."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            there, back = await self._connected()
            line, _, headers = head.partition(b"\r\n")
            kept = [one for one in headers.split(b"\r\n") if not one.lower().startswith(b"connection:")]
            back.write(b"\r\n".join([line, b"connection: close", *kept]))
            asking = asyncio.create_task(_ask(reader, back))
            await _answer(there, writer)
            writer.write_eof()  # a close at once could take the answer from a client that still sends
            await asyncio.wait([asking], timeout=LINGER_S)
            asking.cancel()
            back.close()
        writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A random server that takes connections. Raises OSError if there is none."""
        ports = random.sample(self._ports, len(self._ports))
        for port in ports[:-1]:
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
        return await asyncio.open_connection("127.0.0.1", ports[-1])


async def _ask(reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
    """The rest of a request. If the client goes, the server hears of it."""
    with suppress(ConnectionError):  # of a server that does not want the whole request
        while piece := await reader.read(2**16):
            back.write(piece)
            await back.drain()
        back.close()
    while await reader.read(2**16):
        pass


async def _answer(there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes from a server."""
    with suppress(ConnectionError):  # of a server that was killed
        while piece := await there.read(2**16):
            writer.write(piece)
            await writer.drain()


async def main() -> None:
    """Serve until killed."""
    port, *ports = map(int, sys.argv[1:])
    server = await asyncio.start_server(Balancer(ports).serve, "127.0.0.1", port, limit=HEAD_BYTES, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
