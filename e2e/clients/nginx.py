"""A real nginx in front of a server: `python -m e2e.clients.nginx` fetches its package where there is none.

Its settings are the defaults, but for `READ_TIMEOUT_S`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from e2e.debian_package import DebianPackage
from e2e.ports import free_port
from e2e.server_process import Server

PACKAGE: Final = DebianPackage("nginx")

READ_TIMEOUT_S: Final = 15
"""nginx gives a server up after so long without a byte. By default it waits for 60 s: no test has the time for that."""

CONFIG: Final = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {url};
            proxy_read_timeout {read_timeout_s}s;
        }}
    }}
}}
"""
"""So requests go on by HTTP/1.0, and answers are buffered."""


class Nginx(Server):
    """One nginx before a server. It writes into `folder`. Not started yet."""

    def __init__(self, binary: Path, folder: Path, server: Server) -> None:
        port, config, log = free_port(), folder / "nginx.conf", folder / "nginx.log"
        super().__init__("nginx", port, (), log, ready_path="/health")
        config.write_text(CONFIG.format(folder=folder, port=port, url=server.url, read_timeout_s=READ_TIMEOUT_S))
        self._command = [str(binary), "-c", str(config), "-p", str(folder), "-e", str(log)]


if __name__ == "__main__":
    PACKAGE.fetch()
