"""Several gateways over one PostgreSQL, behind a load balancer that sends each request to a random one of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from e2e.server_process import Server

PEER_KEY: Final = "the-peer-key-of-all-gateways-in-the-tests"
SECRET: Final = "the-server-secret-of-all-gateways-in-tests"


class Gateways(Server):
    """Several gateways that look as one: this process is the load balancer before `members`."""

    def __init__(self, name: str, port: int, members: Sequence[Server], log_path: Path) -> None:
        processes = sum(member.processes for member in members)
        super().__init__(name, port, (), log_path, ready_path="/ready", processes=processes)
        self.members = members
        self._command = [sys.executable, "-m", "e2e.balancer", str(port), *(str(one.port) for one in members)]

    def start(self) -> None:
        """Start all."""
        for member in self.members:
            member.may_log_tracebacks, member.stderr = self.may_log_tracebacks, self.stderr
            member.start()
        super().start()

    def wait_until_ready(self) -> None:
        """All are ready."""
        for member in self.members:
            member.wait_until_ready()
        super().wait_until_ready()

    def terminate(self) -> None:
        """Ask all gateways to stop."""
        for member in self.members:
            if member.running:
                member.terminate()

    def interrupt(self) -> None:
        """Ask all gateways to stop without a delay, unless they were asked."""
        for member in self.members:
            if not member._is_interrupted:
                member.interrupt()

    def signal(self, number: int) -> None:
        """Send all gateways a signal."""
        for member in self.members:
            member.signal(number)

    def kill(self) -> None:
        """End all."""
        for member in self.members:
            if member.running:
                member.kill()
        super().kill()

    def wait(self) -> int:
        """The exit status of the gateways, the worst one."""
        status = max((abs(member.wait()) for member in self.members), default=0)
        if self.running:
            super().kill()
        return status

    def stop(self) -> None:
        """Stop all."""
        if self.running:
            super().kill()
        for member in self.members:
            if member.running and not member._is_interrupted:
                member.terminate()
                member._is_interrupted = True
        for member in self.members:
            member.stop()

    def log(self) -> str:
        """What all wrote."""
        return "".join(member.log() for member in self.members)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all."""
        return sum(member.metric(name, **labels) for member in self.members if member.running)
