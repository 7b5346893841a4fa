"""The page of metrics that the running daemon serves. A file of its own: only here does a command speak HTTP to it."""

from __future__ import annotations

import http.client
import socket
from typing import Final, assert_never

from gpuactors.config import Config, EverywhereHttp, HttpAddress, TcpHttp, UnixHttp

_METRICS_S: Final = 5.0
"""One step of the request, in seconds; all of them take milliseconds."""

_METRICS_MAX_BYTES: Final = 16 << 20
"""The most bytes of the page that are read: something else at that address must not fill the memory."""


class MetricsError(Exception):
    """There is no page; the text names the reason."""


def metrics_page(config: Config) -> bytes:
    """Return the page of a daemon with these settings. Raises `MetricsError` and `OSError`."""
    if (address := config.http) is None:
        raise MetricsError("the daemon serves none: http_address is off")
    connection = http.client.HTTPConnection("localhost")
    connection.sock = _dialled(address)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise MetricsError(f"{address} answers {answer.status}")
        return answer.read(_METRICS_MAX_BYTES)
    except http.client.HTTPException as exc:
        raise MetricsError(f"{address} speaks no HTTP: {exc!r}") from exc
    finally:
        connection.close()


def _dialled(address: HttpAddress) -> socket.socket:
    match address:
        case UnixHttp(path):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(_METRICS_S)
            connection.connect(str(path))
            return connection
        case TcpHttp(host, port):
            return socket.create_connection((host, port), _METRICS_S)
        case EverywhereHttp(port):
            return socket.create_connection(("127.0.0.1", port), _METRICS_S)  # no resolver is asked
        case _:
            assert_never(address)
