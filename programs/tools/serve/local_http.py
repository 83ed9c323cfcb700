"""HTTP servers that answer this machine only. This module does not import JAX."""

from __future__ import annotations

import errno
import json
import re
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, urlsplit

_HOST = "127.0.0.1"
_PIECE = 1 << 20  # bytes of a body that are sent at once
_NAMES = ("127.0.0.1", "localhost")  # host names that a request may give
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class PortError(ValueError):
    """The port cannot be used."""


class LocalServer(ThreadingHTTPServer):
    """A server at a port of the loopback interface."""

    def __init__(self, handler: type[LocalHandler], port: int) -> None:
        """Opens the port.

        Args:
          handler: answers requests.
          port: at which to answer; 0 for any free one.

        Raises:
          PortError: the port cannot be used.
        """
        if not 0 <= port < 1 << 16:
            raise PortError(f"--port must be 0 to 65535; got {port}. 0 takes a free one")
        try:
            super().__init__((_HOST, port), handler)
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
        """The URL of the server."""
        return f"http://{_HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error, unless the client has only closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Answers requests whose host name is localhost or 127.0.0.1.

    The check prevents DNS rebinding, in which the host name of another site is made to resolve to
    this machine.
    """

    timeout = 10  # seconds for a request: an unused connection holds a thread

    def is_named_here(self) -> bool:
        """Returns whether the request names this machine; otherwise refuses it."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) == 1 and re.sub(r":\d+\Z", "", hosts[0].lower()) in _NAMES:
            return True
        self.close_connection = True  # its body was not read
        self.refuse(HTTPStatus.FORBIDDEN, f"the host of a request must be {' or '.join(_NAMES)}")
        return False

    def target(self) -> SplitResult | None:
        """Returns the parts of the address that the request asks for; None if it was refused."""
        try:
            return urlsplit(self.path)
        except ValueError as error:
            self.close_connection = True  # its body was not read
            why = f"a request must ask for a path, such as /; got {self.path!r:.80}: {error}"
            self.refuse(HTTPStatus.BAD_REQUEST, why)
            return None

    def refuse(self, status: HTTPStatus, why: str) -> None:
        """Answers with an error, as text."""
        body = f"{why}\n".encode(errors="backslashreplace")  # JSON may hold lone surrogates
        self.answer(status, "text/plain; charset=utf-8", body)

    def answer_json(self, content: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Answers with JSON."""
        body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        self.answer(status, "application/json", body)

    def answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        """Sends a response.

        Args:
          status: status code of the response.
          kind: media type of the body.
          body: content of the response.
        """
        self.send_response(status)
        for name, value in {**_HEADERS, **self.more_headers()}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for begin in range(0, len(body), _PIECE):  # each has the time limit of the connection
            self.wfile.write(body[begin : begin + _PIECE])

    def more_headers(self) -> dict[str, str]:
        """Returns further headers of all answers."""
        return {}

    def version_string(self) -> str:
        """Returns the name of the server, without versions."""
        return "rlstack"

    def log_message(self, format: str, *args: object) -> None:
        """Prints no line for a request."""
