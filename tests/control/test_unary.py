"""The one call of a command over the control socket, with peers that no daemon would be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpclib import GRPCError
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded, StreamReset

from gpuactors.control import unary
from gpuactors.control.client import NoDaemonError, read_status
from gpuactors.ports.errors import ControlError

METHOD = "/v1.Control/View"
SHORT_S = 0.2
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""An HTTP/2 frame without a setting in it (RFC 9113, 6.5)."""

ACKNOWLEDGED = b"\0\0\0\x04\x01"
"""How the client's answer to that begins."""


def asked(path: Path) -> object:
    return read_status(str(path), SHORT_S, SHORT_S)


@contextmanager
def saying(path: Path, *said: bytes, is_closing: bool) -> Iterator[None]:
    """A process that says this to whom connects, the second part when its SETTINGS were acknowledged, and then closes
    the connection or waits."""
    is_done = threading.Event()

    def serve() -> None:
        stream, _ = listener.accept()
        with stream:
            stream.sendall(said[0])
            for more in said[1:]:
                heard = b""
                while ACKNOWLEDGED not in heard:
                    heard += stream.recv(65_536)
                stream.sendall(more)
            if not is_closing:
                is_done.wait()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield
        finally:
            is_done.set()
            server.join()


@contextmanager
def answering(path: Path, body: bytes) -> Iterator[None]:
    """A server of grpcio that answers each call with these bytes."""

    class Handlers(grpc.GenericRpcHandler):
        def service(
            self, handler_call_details: grpc.HandlerCallDetails
        ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: body)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Handlers()])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 3_000_000])
def test_an_answer_of_many_frames_is_whole(tmp_path: Path, size: int) -> None:
    """Beyond 65,535 bytes the server waits until the client has acknowledged some."""
    body = bytes(i % 251 for i in range(size))
    with answering(tmp_path / "s", body):
        assert unary.call(str(tmp_path / "s"), METHOD, connect_s=10, call_s=10) == body


@pytest.mark.parametrize("end", [StreamReset(stream_id=1), ConnectionTerminated()])
def test_an_answer_that_is_whole_stays_so_when_its_connection_ends(end: Event) -> None:
    """A daemon answers and ends at once: both may come in one read."""
    http2 = H2Connection()
    http2.initiate_connection()
    http2.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "a")])
    found = unary._Answer(http2)
    with pytest.raises(GRPCError):
        found._add(end)
    found._add(ResponseReceived(stream_id=1, headers=[(b"grpc-status", b"0")]))
    found._add(DataReceived(stream_id=1, data=b"\0\0\0\0\x02ok", flow_controlled_length=0))
    found._add(StreamEnded(stream_id=1))
    found._add(end)
    assert found.message() == b"ok"


def test_an_answer_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unary, "CONTROL_ANSWER_MAX_BYTES", 100_000)
    with answering(tmp_path / "s", bytes(200_000)), pytest.raises(ControlError, match="RESOURCE_EXHAUSTED"):
        read_status(str(tmp_path / "s"), 10, 10)


@pytest.mark.parametrize(
    ("said", "is_closing", "wrong"),
    [
        ((b"",), False, "does it hang[?] .* did not speak HTTP/2 within 0.2 s"),
        ((b"",), True, "does it hang[?] .* does not speak HTTP/2"),
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), False, "does it hang[?] .* did not speak HTTP/2"),
        ((bytes(64),), False, "does it hang[?] .* does not speak HTTP/2"),
        ((SETTINGS,), False, "did not report its status within 0.2 s; does it hang[?]"),
        ((SETTINGS, b""), True, "is ending"),
        # A GOAWAY without its fields, and one with them; the call is reset.
        ((SETTINGS, b"\0\0\0\x07\0\0\0\0\0"), False, "refused to report its status: INTERNAL"),
        ((SETTINGS, b"\0\0\x08\x07" + bytes(13)), False, "is ending"),
        ((SETTINGS, b"\0\0\x04\x03\0\0\0\0\x01" + bytes(4)), False, "is ending"),
    ],
)
def test_a_peer_that_does_not_answer_is_named(
    tmp_path: Path, said: tuple[bytes, ...], is_closing: bool, wrong: str
) -> None:
    with saying(tmp_path / "s", *said, is_closing=is_closing), pytest.raises(ControlError, match=wrong):
        asked(tmp_path / "s")


def test_a_listener_whose_queue_is_full_hangs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        first.connect(str(tmp_path / "s"))
        with pytest.raises(ControlError, match="the queue of its listener is full"):
            asked(tmp_path / "s")


def test_no_process_and_no_file_are_no_daemon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "s"))
    (tmp_path / "file").touch()
    for path in ("s", "missing", "file/s", "file"):
        with pytest.raises(NoDaemonError):
            asked(tmp_path / path)
