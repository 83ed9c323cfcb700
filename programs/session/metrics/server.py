"""Serves the figures of a run over HTTP, while the run trains."""

from __future__ import annotations

import contextlib
import math
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import rlstack
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.metrics import processes
from rlstack.programs.session.metrics.figures import Figures, Node, as_text
from rlstack.rpc import addresses
from rlstack.rpc.socket_filter import address_of

_PATH = "/metrics"
_KIND = "text/plain; version=0.0.4; charset=utf-8"
_LOCAL = ("localhost", "127.0.0.1", "::1")  # host names that a request to loopback may give


def check(address: str) -> None:
    """Checks that a server can listen at the address of the config, here and now.

    Raises:
      ValueError: it cannot.
    """
    _Server(address, lambda: "").server_close()


class MetricsServer:
    """A logger that serves its newest values, and the state of the nodes, to Prometheus.

    Attributes:
      address: the URL of the figures.
    """

    def __init__(
        self,
        experiment: Experiment,
        run_dir: Path,
        frames: int,
        nodes: Callable[[], Mapping[str, Node]] = dict,
    ) -> None:
        """Starts to listen.

        Args:
          experiment: the run's experiment, with the address.
          run_dir: the run directory.
          frames: frames of the run so far.
          nodes: returns the nodes of the program; called for each request, from any thread.

        Raises:
          ValueError: listening is not possible.
        """
        self._about = {
            "preset": experiment.preset,
            "topology": experiment.topology,
            "environment": str(experiment.env.name),
            "seed": str(experiment.seed),
            "run": run_dir.name,
            "version": rlstack.__version__,
        }
        self._budget, self._run_dir, self._nodes = experiment.all_frames, run_dir, nodes
        self._lock = threading.Lock()
        self._frames, self._logged = frames, math.nan
        self._logs: dict[str, float] = {}
        self._server = _Server(experiment.program.metrics, self._text)
        host, port = self._server.server_address[:2]
        self.address = f"http://{addresses.join(str(host), port)}{_PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True
        )
        self._thread.start()

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Takes one line of logs."""
        with self._lock:
            self._frames, self._logged = step, time.time()
            self._logs.update({name: float(value) for name, value in logs.items()})

    def close(self) -> None:
        """Stops to listen."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _text(self) -> str:
        with self._lock:
            logs, frames, logged = dict(self._logs), self._frames, self._logged
        found = processes.find().get(str(self._run_dir), {})
        state = Figures(self._about, self._budget, frames, logs, logged, self._nodes(), found)
        return as_text(state)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, text: Callable[[], str]) -> None:
        host, port = addresses.split(address if ":" in address else f":{address}")
        try:
            host = address_of(host) if host else addresses.LOOPBACK
            self.address_family = addresses.family(host)
            self.is_local = addresses.is_loopback(host)
            self.text = text
            super().__init__((host, int(port)), _Handler)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(
                "program.metrics must be PORT or ADDRESS:PORT at which this process can listen; "
                f"got {address}: {why}. Several runs at the same time need a port each."
            ) from error

    def server_bind(self) -> None:
        """Binds without asking a name server for this host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error, unless the client has only closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a request: an unused connection holds a thread

    def do_GET(self) -> None:
        host = addresses.split(self.headers.get("Host", "").lower())[0]
        if self.server.is_local and host not in _LOCAL:  # a web page whose name leads here
            self._answer(HTTPStatus.FORBIDDEN, f"the host must be {' or '.join(_LOCAL)}\n")
        elif self.path.partition("?")[0] != _PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"the figures are at {_PATH}\n")
        else:
            self._answer(HTTPStatus.OK, self.server.text())

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", _KIND)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def version_string(self) -> str:
        return "rlstack"

    def log_message(self, format: str, *args: object) -> None:
        pass
