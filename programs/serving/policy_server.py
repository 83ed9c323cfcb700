"""The policy of a run over HTTP, to programs of this machine; see docs/using_runs.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote, urlsplit

from programs.serving.local_http import LocalHandler, LocalServer
from programs.serving.players import Players, TooManyPlayersError
from rlstack.checks import WrongKindError

_MOST_BYTES = 64 << 20  # of a request
_PLAYERS = "/players/"


class PolicyServer(LocalServer):
    """Answers requests of this machine for actions.

    Attributes:
      players: take the steps.
      origins: of web pages that may send requests.
    """

    def __init__(self, players: Players, port: int, origins: Sequence[str] = ()) -> None:
        """Opens the port.

        Args:
          players: take the steps.
          port: at which to answer; 0 for any free one.
          origins: of web pages that may send requests, such as ``http://localhost:3000``.

        Raises:
          programs.serving.local_http.PortError: the port cannot be used.
        """
        self.players, self.origins = players, tuple(origins)
        super().__init__(_Handler, port)


class _Handler(LocalHandler):
    server: PolicyServer
    protocol_version = "HTTP/1.1"  # one connection for all steps of a game
    disable_nagle_algorithm = True
    timeout = 300  # seconds between two requests of a connection

    def do_GET(self) -> None:  # noqa: N802 (http.server calls it)
        if self._is_allowed():
            if urlsplit(self.path).path == "/":
                self.answer_json(self.server.players.describe())
            else:
                self._refuse_path()

    def do_POST(self) -> None:  # noqa: N802 (http.server calls it)
        players = self.server.players
        takes: dict[str, Callable[[Any], dict[str, Any]]] = {
            "/act": players.act,
            "/predict": players.predict,
        }
        if not self._is_allowed():
            return
        take = takes.get(urlsplit(self.path).path)
        if take is None:
            self._refuse_path()
            return
        body = self._body()
        if body is None:
            return
        try:
            answer = take(json.loads(body))
        except TooManyPlayersError as error:
            self.refuse(HTTPStatus.TOO_MANY_REQUESTS, str(error))
        except (ValueError, WrongKindError, RecursionError) as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        else:
            self.answer_json(answer)

    def do_DELETE(self) -> None:  # noqa: N802 (http.server calls it)
        if not self._is_allowed():
            return
        path = urlsplit(self.path).path
        if not path.startswith(_PLAYERS):
            self._refuse_path()
        elif self.server.players.forget(name := unquote(path.removeprefix(_PLAYERS))):
            self.answer_json({})
        else:
            self.refuse(HTTPStatus.NOT_FOUND, f"there is no player {name!r}")

    def do_OPTIONS(self) -> None:  # noqa: N802 (http.server calls it)
        if self._is_allowed():
            self.answer(HTTPStatus.NO_CONTENT, "text/plain", b"")

    def _is_allowed(self) -> bool:
        """Returns whether this machine, and no page of another site, asks; otherwise refuses."""
        if not self.is_named_here():
            self.close_connection = True
            return False
        origin = self.headers.get("Origin")
        if origin is None or origin in self.server.origins:
            return True
        self.close_connection = True
        self.refuse(HTTPStatus.FORBIDDEN, f"--origins must have {origin} for this web page")
        return False

    def _body(self) -> bytes | None:
        """Returns the body of a request; None if it was refused."""
        length = self.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) <= _MOST_BYTES:
            return self.rfile.read(int(length))
        self.close_connection = True
        self.refuse(
            HTTPStatus.BAD_REQUEST,
            f"a request must have a Content-Length of at most {_MOST_BYTES}; got {length!r}",
        )
        return None

    def _refuse_path(self) -> None:
        self.close_connection = True  # its body was not read
        self.refuse(
            HTTPStatus.NOT_FOUND,
            "a request must be GET /, POST /act, POST /predict or DELETE /players/NAME",
        )

    def more_headers(self) -> dict[str, str]:
        origin = self.headers.get("Origin") if hasattr(self, "headers") else None
        if origin not in self.server.origins:
            return {}
        return {
            "Access-Control-Allow-Origin": str(origin),
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": "Content-Type",
            "Vary": "Origin",
        }
