"""Prometheus metrics: prefix sextet_, base units, labels from small sets; off loopback they need the token."""

import hmac
import ssl
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import Counter, Gauge, Histogram, make_wsgi_app

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)

RPC_REQUESTS = Counter("sextet_rpc_requests_total", "RPCs answered.", ["service", "method", "code"])
RPC_SECONDS = Histogram("sextet_rpc_duration_seconds", "Time of an RPC.", ["service", "method"], buckets=_SECONDS)
OPERATIONS_RUNNING = Gauge("sextet_operations_running", "Operations running or queued.", ["operation"])
OPERATION_SECONDS = Histogram(
    "sextet_operation_duration_seconds", "Time of an operation's work.", ["operation", "outcome"], buckets=_SECONDS
)
OPERATION_WAIT_SECONDS = Histogram(
    "sextet_operation_wait_seconds", "Time an operation waited for its lane.", ["operation"], buckets=_SECONDS
)
OPERATIONS_ATTACHED = Counter(
    "sextet_operations_attached_total", "Attempts answered by a running or finished operation.", ["operation"]
)
SERVICE_INFO = Gauge("sextet_service_info", "1 for the service of this process.", ["role", "replica"])
SERVICE_HEALTHY = Gauge("sextet_service_healthy", "1 while the service can serve.")

_MAX_NAMES = 64
_names: set[str] = set()


def bounded(name: str) -> str:
    """The name as a label value; "other" once there are 64 of them, since callers choose operation names."""
    if name not in _names and len(_names) >= _MAX_NAMES:
        return "other"
    _names.add(name)
    return name


class MetricsServer:
    """Serves /metrics from a daemon thread. With a token, requests must carry it as a bearer token.

    Args:
        tls: has `cert_file` and `key_file`: serves HTTPS.
    """

    def __init__(self, host: str, port: int, token: str | None, tls: Any = None) -> None:
        app = make_wsgi_app()
        self._server = make_server(host, port, _guarded(app, token) if token else app, _Server, _Quiet)
        self.port: int = self._server.server_port
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.cert_file, tls.key_file)
            # The handshake is done by the thread of the request: a silent stranger must not hold up the others.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        return None


def _guarded(app: Callable[..., Iterable[bytes]], token: str) -> Callable[..., Iterable[bytes]]:
    expected = f"Bearer {token}".encode()

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
        if hmac.compare_digest(given, expected):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"metrics need the token: Authorization: Bearer $SEXTET_TOKEN\n"]

    return guarded
