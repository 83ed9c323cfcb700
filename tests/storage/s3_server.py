"""A server of S3 on this machine, moto's, that can be slow, refuse and cut connections."""

import contextlib
import threading
import time
import urllib.request

import werkzeug.serving
from moto.server import DomainDispatcherApplication, create_backend_app

BUCKET = "bucket"
SECRET = "secret-of-tests"
_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "key-of-tests",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
}


class Server:
    """The server.

    A process with `variables` in its environment uses it. `fault(method, path, query)` returns what
    happens to a request: None, seconds to wait, "403", "503", "cut" before the request is done,
    "lost" to do it and cut the answer, or "half" of it.
    """

    def __init__(self, host):
        self.fault = lambda method, path, query: None
        self.requests = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._listen(host, 0)
        self.address = f"http://{host}:{self._server.server_port}"
        self.variables = {**_VARIABLES, "AWS_ENDPOINT_URL": self.address}

    def _listen(self, host, port):
        self._server = werkzeug.serving.make_server(
            host, port, self._answer, threaded=True, request_handler=_Silent
        )
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def refusing(self):
        """Refuses connections in the body."""
        self.close()
        try:
            yield
        finally:
            self._listen(self._server.host, self._server.port)

    def _answer(self, environ, start_response):
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
        self.requests.append(request)
        fault = self.fault(*request)
        if isinstance(fault, int | float):
            time.sleep(fault)
        if fault in ("403", "503"):
            start_response(f"{fault} Refused", [("Content-Length", "0")])
            return []
        if fault in ("cut", "lost"):
            if fault == "lost":
                list(self._app(environ, lambda *_: None))
            start_response("500 Cut", [])
            self._cut(environ)
            return []
        if fault == "half":
            body = b"".join(self._app(environ, start_response))
            return self._half(environ, body)
        return self._app(environ, start_response)

    def _half(self, environ, body):
        yield body[: len(body) // 2]
        self._cut(environ)

    def _cut(self, environ):
        with contextlib.suppress(OSError):
            environ["werkzeug.socket"].shutdown(2)

    def counted(self, method):
        return sum(one[0] == method for one in self.requests)

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Silent(werkzeug.serving.WSGIRequestHandler):
    def log(self, *_, **__):
        pass


@contextlib.contextmanager
def started(host="127.0.0.1"):
    """Yields the server at an address of this machine, with an empty bucket."""
    server = Server(host)
    try:
        request = urllib.request.Request(f"{server.address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=20).close()
        server.requests.clear()
        yield server
    finally:
        server.close()
