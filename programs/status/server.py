"""Serves the page of ``rlstack dashboard`` and its data over HTTP, to this machine only."""

from __future__ import annotations

import errno
import json
import re
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from programs.status.dashboard import Dashboard

DEFAULT_PORT = 6080
_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")  # that a request may give as its host
_PAGE = Path(__file__).with_name("dashboard.html")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
        "form-action 'none'"
    ),
}


class PortError(ValueError):
    """The port cannot be used."""


class DashboardServer(ThreadingHTTPServer):
    """Answers requests of this machine for the page and its data.

    A page of another site may have a host name that means this machine (DNS rebinding). Therefore a
    request must name localhost or 127.0.0.1 as its host. Other requests, and other paths than those
    of the page and its data, are refused.
    """

    def __init__(self, dashboard: Dashboard, port: int = DEFAULT_PORT) -> None:
        """Opens the port.

        Args:
          dashboard: the data.
          port: at which to answer; 0 for any free one.

        Raises:
          PortError: the port cannot be used.
        """
        if not 0 <= port < 1 << 16:
            raise PortError(f"--port must be 0 to 65535; got {port}. 0 takes a free one")
        self.dashboard = dashboard
        self.page = _PAGE.read_bytes()
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = "another program uses it"
            elif error.errno == errno.EACCES:
                why = "this user may not use it"
            else:
                why = error.strerror or str(error)
            raise PortError(
                f"port {port} cannot be used: {why}. Choose another with --port N; --port 0 takes "
                "a free one"
            ) from error

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error, unless the browser has only closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    timeout = 10  # seconds for a request: an unused connection holds a thread

    def do_GET(self) -> None:
        if not self._named_here():
            names = " or ".join(_NAMES)
            self._refuse(HTTPStatus.FORBIDDEN, f"the host of a request must be {names}")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif address.path == "/state.json":
            self._answer_json(self.server.dashboard.state())
        elif address.path == "/curves.json":
            self._answer_curves(address.query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _answer_curves(self, query: str) -> None:
        asked = parse_qs(query)
        runs = asked.get("run", [])
        if len(runs) != 1:
            self._refuse(HTTPStatus.BAD_REQUEST, "run must be given once")
            return
        found = self.server.dashboard.curves(runs[0], asked.get("name", []))
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such run")
            return
        self._answer_json(found)

    def _named_here(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and re.sub(r":\d+\Z", "", hosts[0].lower()) in _NAMES

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{why}\n".encode())

    def _answer_json(self, content: dict[str, Any]) -> None:
        body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        self._answer(HTTPStatus.OK, "application/json", body)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "rlstack"

    def log_message(self, format: str, *args: object) -> None:
        pass
