"""Serves the page of ``rlstack dashboard`` and its data over HTTP, to this machine only."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from rlstack.programs.tools import charts
from rlstack.programs.tools.serve.local_http import LocalHandler, LocalServer
from rlstack.programs.tools.status.dashboard import VIDEOS, Dashboard

_PAGE = Path(__file__).with_name("dashboard.html")
_HEADERS = {
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self' data:; media-src 'self'; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    ),
}


class DashboardServer(LocalServer):
    """Answers requests of this machine for the page and its data; other paths are refused."""

    def __init__(self, dashboard: Dashboard, port: int) -> None:
        """Opens the port.

        Args:
          dashboard: the data.
          port: at which to answer; 0 for any free one.

        Raises:
          rlstack.programs.tools.serve.local_http.PortError: the port cannot be used.
        """
        self.dashboard = dashboard
        self.page = _PAGE.read_text("utf-8").replace("<!-- charts -->", charts.HEAD).encode()
        super().__init__(_Handler, port)


class _Handler(LocalHandler):
    server: DashboardServer

    def do_GET(self) -> None:  # noqa: N802 (http.server calls it)
        if not self.is_named_here():
            return
        asked = self.target()
        if asked is None:
            return
        if asked.path == "/":
            self.answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif asked.path == "/state.json":
            self.answer_json(self.server.dashboard.state())
        elif asked.path == "/plots.json":
            self._answer_plots(asked.query)
        elif asked.path == "/data.csv":
            self._answer_data(asked.query)
        elif asked.path == "/video":
            self._answer_video(asked.query)
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _answer_plots(self, query: str) -> None:
        asked = parse_qs(query)
        runs = asked.get("run", [])
        if not runs:
            self.refuse(HTTPStatus.BAD_REQUEST, "run must be given")
            return
        try:
            found = self.server.dashboard.plots(
                runs,
                asked.get("name", []),
                hours="hours" in asked,
                seeds="seeds" in asked,
                smooth=float(asked.get("smooth", ["0"])[0]),
                log="log" in asked,
                within=(
                    float(asked.get("from", ["-inf"])[0]),
                    float(asked.get("to", ["inf"])[0]),
                ),
            )
        except ValueError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        if found is None:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such run")
            return
        self.answer_json(found)

    def _answer_data(self, query: str) -> None:
        asked = parse_qs(query)
        found = self.server.dashboard.data(asked.get("run", []), asked.get("name", []))
        if found is None:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such run")
            return
        text = found.encode("utf-8", "backslashreplace")
        self.answer(HTTPStatus.OK, "text/csv; charset=utf-8", text)

    def _answer_video(self, query: str) -> None:
        asked = parse_qs(query)
        path = self.server.dashboard.video(*(asked.get(name, [""])[0] for name in ("run", "name")))
        try:
            body = None if path is None else path.read_bytes()
        except OSError:  # it was removed
            body = None
        if path is None or body is None:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such video")
            return
        self.answer(HTTPStatus.OK, VIDEOS[path.suffix], body)

    def more_headers(self) -> dict[str, str]:
        return _HEADERS
