"""The policy of a run over HTTP, to programs of this machine; see docs/using_runs.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from rlstack.checks import WrongKindError
from rlstack.programs.tools.serve.local_http import LocalHandler, LocalServer
from rlstack.programs.tools.serve.players import Players, TooManyPlayersError

_MOST_BYTES = 64 << 20  # maximum size of a request
_MOST_DIGITS = 20  # maximum digits of the stated number of bytes
_PLAYERS = "/players/"


class PolicyServer(LocalServer):
    """Answers requests of this machine for actions.

    Attributes:
      players: computes the actions, with a state for each player.
      origins: the origins of web pages that may send requests.
    """

    def __init__(self, players: Players, port: int, origins: Sequence[str] = ()) -> None:
        """Opens the port.

        Args:
          players: computes the actions, with a state for each player.
          port: port to listen at; 0 for any free one.
          origins: the origins of web pages that may send requests, such as
            ``http://localhost:3000``.

        Raises:
          rlstack.programs.tools.serve.local_http.PortError: the port cannot be used.
        """
        self.players, self.origins = players, tuple(origins)
        super().__init__(_Handler, port)


class _Handler(LocalHandler):
    server: PolicyServer
    protocol_version = "HTTP/1.1"  # one connection for all steps of a game
    disable_nagle_algorithm = True
    timeout = 300  # seconds between two requests of a connection

    def do_GET(self) -> None:  # noqa: N802 (http.server calls it)
        path = self._path()
        if path == "/":
            self.answer_json(self.server.players.describe())
        elif path is not None:
            self._refuse_path()

    def do_POST(self) -> None:  # noqa: N802 (http.server calls it)
        players = self.server.players
        takes: dict[str, Callable[[Any], dict[str, Any]]] = {
            "/act": players.act,
            "/predict": players.predict,
        }
        path = self._path(has_body=True)
        if path is None:
            return
        take = takes.get(path)
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
            self.refuse(HTTPStatus.BAD_REQUEST, str(error).removeprefix("Policy.act: "))
        else:
            self._answer_step(answer)

    def do_DELETE(self) -> None:  # noqa: N802 (http.server calls it)
        path = self._path()
        if path is None:
            return
        if not path.startswith(_PLAYERS):
            self._refuse_path()
        elif self.server.players.forget(name := unquote(path.removeprefix(_PLAYERS))):
            self.answer_json({})
        else:
            self.refuse(HTTPStatus.NOT_FOUND, f"there is no player {name!r}")

    def do_OPTIONS(self) -> None:  # noqa: N802 (http.server calls it)
        if self._is_allowed() and self._skips_body():
            self.answer(HTTPStatus.NO_CONTENT, "text/plain", b"")

    def _path(self, has_body: bool = False) -> str | None:
        """Returns the path of a request, and reads a body that it should not have.

        None if the request was refused.
        """
        if not self._is_allowed():
            return None
        target = self.target()
        if target is None or not (has_body or self._skips_body()):
            return None
        return target.path

    def _is_allowed(self) -> bool:
        """Returns whether this machine, and no page of another site, asks; otherwise refuses."""
        if not self.is_named_here():
            return False
        origin = self.headers.get("Origin")
        if origin is None or origin in self.server.origins:
            return True
        self.close_connection = True
        self.refuse(HTTPStatus.FORBIDDEN, f"--origins must have {origin} for this web page")
        return False

    def _body(self) -> bytes | None:
        """Returns the body of a request; None if it was refused."""
        lengths = self.headers.get_all("Content-Length", [])
        length = lengths[0] if len(lengths) == 1 else ""
        # int() refuses numbers of thousands of digits.
        is_short = length.isdecimal() and len(length) <= _MOST_DIGITS and int(length) <= _MOST_BYTES
        if is_short and "Transfer-Encoding" not in self.headers:
            return self.rfile.read(int(length))
        self.close_connection = True
        self.refuse(
            HTTPStatus.BAD_REQUEST,
            f"a request must have one Content-Length of at most {_MOST_BYTES}, and no "
            f"Transfer-Encoding; got {', '.join(lengths)!r:.80}",
        )
        return None

    def _skips_body(self) -> bool:
        """Reads the body of a request that needs none: it would begin the next request.

        Returns whether the request can be answered; otherwise it was refused.
        """
        has_one = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        return not has_one or self._body() is not None

    def _answer_step(self, answer: dict[str, Any]) -> None:
        try:
            self.answer_json(answer)
        except ValueError:  # before anything was sent: JSON has no such numbers
            self.refuse(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the policy must answer with finite numbers; its params, or its state after steps "
                "as large as this one, give others",
            )

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
