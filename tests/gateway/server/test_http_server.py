"""What servers of ours need of uvicorn."""

from __future__ import annotations

import pytest

from plait.gateway.server.http_server import RELIED_ON, check_uvicorn


def test_the_installed_uvicorn_has_what_is_relied_on() -> None:
    check_uvicorn()


def test_another_uvicorn_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = next(iter(RELIED_ON))
    monkeypatch.setitem(RELIED_ON, cls, f"{RELIED_ON[cls]} _gone")
    with pytest.raises(ValueError, match=rf"it lacks: {cls.__name__}\._gone\. Install"):
        check_uvicorn()
