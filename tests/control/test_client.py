"""The one question of a command over the control socket, with peers that no daemon would be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gpuactors.control import client
from gpuactors.control.about import About
from gpuactors.control.client import NoDaemonError, OtherVersionError, Running, read_status
from gpuactors.control.messages import BUSY, UNKNOWN, Answer, Request, line_of
from gpuactors.control.node_view import view_of
from gpuactors.control.view import DaemonStatus
from gpuactors.ports.errors import ControlError
from tests.core.builders import Core, gpu

SHORT_S = 0.2
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""An HTTP/2 frame without a setting in it (RFC 9113, 6.5): how a daemon of a release with gRPC begins."""


def asked(path: Path) -> Running:
    return read_status(str(path), SHORT_S, SHORT_S)


@contextmanager
def saying(path: Path, *said: bytes, is_closing: bool) -> Iterator[list[bytes]]:
    """A process that says this to whom has asked, part by part, and then closes the connection or waits. Yields what it
    was asked."""
    is_done = threading.Event()
    heard: list[bytes] = []

    def serve() -> None:
        stream, _ = listener.accept()
        with stream:
            heard.append(stream.recv(65_536))
            for part in said:
                stream.sendall(part)
            if not is_closing:
                is_done.wait()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield heard
        finally:
            is_done.set()
            server.join()


def test_a_status_in_many_pieces_is_whole(tmp_path: Path) -> None:
    core = Core(gpu("23:00.0"))
    view = view_of(core.state, core.at)
    status = DaemonStatus(About("n" * 300_000), view)
    line = line_of(Answer(7, "1.2.3", msgspec.Raw(msgspec.json.encode(status))))
    parts = [line[i : i + 40_000] for i in range(0, len(line), 40_000)]
    with saying(tmp_path / "s", *parts, is_closing=False) as heard:
        assert read_status(str(tmp_path / "s"), 10, 10) == Running(7, "1.2.3", About("n" * 300_000), view)
        assert heard == [line_of(Request("status"))]


def test_an_answer_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_MAX_BYTES", 100_000)
    with (
        saying(tmp_path / "s", b"{", b" " * 200_000, is_closing=False),
        pytest.raises(ControlError, match="what is no answer of a daemon"),
    ):
        read_status(str(tmp_path / "s"), 10, 10)


@pytest.mark.parametrize(
    ("said", "is_closing", "wrong"),
    [
        (b"", False, "did not report its status within 0.2 s; does it hang[?]"),
        (b"", True, "is ending"),
        (b'{"pid": 7, ', False, "did not report its status within 0.2 s; does it hang[?]"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False, "answered what is no answer of a daemon"),
        (bytes(64), False, "answered what is no answer of a daemon"),
        (b"{}}\n", False, "answered what is no answer of a daemon"),
        (b'{"pid": "seven"}\n', False, "answered what is no answer of a daemon"),
        (line_of(Answer(error=BUSY)), False, "refused: handing_over"),
    ],
)
def test_a_peer_that_does_not_answer_is_named(
    tmp_path: Path, said: bytes, is_closing: bool, wrong: str
) -> None:
    with saying(tmp_path / "s", said, is_closing=is_closing), pytest.raises(ControlError, match=wrong):
        asked(tmp_path / "s")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (SETTINGS, "is of another version than this command"),
        (line_of(Answer(version="9.0", error=UNKNOWN)), r"is of another version \(9.0\) than this command"),
        (line_of(Answer(7, "9.0")), r"is of another version \(9.0\) than this command"),
        (b'{"pid": 7, "version": "9.0", "status": {"of": 1}}\n', r"is of another version \(9.0\) than"),
    ],
)
def test_of_a_daemon_of_another_version_it_is_said_what_to_do(
    tmp_path: Path, said: bytes, named: str
) -> None:
    with (
        saying(tmp_path / "s", said, is_closing=True),
        pytest.raises(OtherVersionError, match=f"{named}.*: run the command of its version"),
    ):
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
