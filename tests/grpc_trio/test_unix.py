"""Sockets by path: nobody is refused, nothing of others is removed, every failure is a sentence with a remedy."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from gpuactors import limits
from gpuactors.grpc_trio import (
    ConnectError,
    NotASocketError,
    SocketBindError,
    SocketError,
    SocketInUseError,
    SocketPathTooLongError,
    bind_unix,
    connect_unix,
    open_unix_channel,
)
from gpuactors.grpc_trio.limits import SOCKET_PATH_MAX_BYTES

from .support import TEST_DEADLINE_S


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


LISTEN_UNTIL_TOLD = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen()
print("ready", flush=True)
sys.stdin.read()
"""

DIAL_UNTIL_CONNECTED = """
import socket, sys
print("ready", flush=True)
while True:
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(sys.argv[1])
        except FileNotFoundError:
            continue
        except ConnectionRefusedError:
            print("refused", flush=True)
        else:
            print("connected", flush=True)
        break
"""


# --- bind ---------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_bind_mode_and_removal(tmp_path: Path) -> None:
    path = tmp_path / "plugin.sock"
    listener = bind_unix(str(path), mode=0o640)
    found = os.lstat(path)
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert listener.path == str(path)
    assert listener.inode_id == (found.st_dev, found.st_ino)
    assert listener.still_there()
    assert names_in(tmp_path) == ["plugin.sock"]
    await listener.aclose()
    assert not listener.still_there()
    assert names_in(tmp_path) == []


@pytest.mark.trio
async def test_connect_works_through_the_renamed_file(tmp_path: Path) -> None:
    listener = bind_unix(str(tmp_path / "plugin.sock"))
    with trio.fail_after(TEST_DEADLINE_S):
        async with (
            listener,
            await connect_unix(listener.path, deadline_s=trio.current_time() + 1) as client,
            await listener.accept() as served,
        ):
            await client.send_all(b"hello")
            assert await served.receive_some() == b"hello"


@pytest.mark.trio
async def test_nobody_is_refused_while_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    """Each time the path exists as a socket of ours, a dial succeeds: it listens before it appears."""
    path = str(tmp_path / "plugin.sock")
    dialler = python(DIAL_UNTIL_CONNECTED, path)
    assert dialler.stdout is not None
    assert dialler.stdout.readline() == "ready\n"
    listener = bind_unix(path)
    with trio.fail_after(TEST_DEADLINE_S):
        result = await trio.to_thread.run_sync(dialler.stdout.readline, abandon_on_cancel=True)
        await trio.to_thread.run_sync(dialler.communicate, abandon_on_cancel=True)
    await listener.aclose()
    assert result == "connected\n"


@pytest.mark.trio
async def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    stale_socket(tmp_path / "plugin.sock")
    async with bind_unix(str(tmp_path / "plugin.sock")) as listener:
        assert listener.still_there()
        assert names_in(tmp_path) == ["plugin.sock"]


@pytest.mark.trio
async def test_live_socket_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "plugin.sock"
    other = python(LISTEN_UNTIL_TOLD, str(path))
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        other.stdout.readline()
        inode = os.lstat(path).st_ino
        with pytest.raises(SocketInUseError) as caught:
            bind_unix(str(path))
        assert caught.value.pid == other.pid
        for part in (str(path), f"process {other.pid}", "stop that one"):
            assert part in str(caught.value)
        assert os.lstat(path).st_ino == inode
    finally:
        other.communicate()
    async with bind_unix(str(path)):  # it is dead now, its file is stale
        pass


@pytest.mark.trio
async def test_live_socket_whose_listener_is_swamped_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "swamped.sock"
    with socket.socket(socket.AF_UNIX) as swamped, socket.socket(socket.AF_UNIX) as client:
        swamped.bind(str(path))
        swamped.listen(0)
        client.connect(str(path))
        with pytest.raises(SocketInUseError, match="another process listens on"):
            bind_unix(str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        datagram.bind(str(tmp_path / "datagram.sock"))
        with pytest.raises(SocketInUseError):
            bind_unix(str(tmp_path / "datagram.sock"))


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "directory"])
def test_what_is_not_a_socket_is_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "plugin.sock"
    make(path)
    with pytest.raises(NotASocketError, match="remove it") as caught:
        bind_unix(str(path))
    assert str(path) in str(caught.value)
    assert path.exists()
    assert names_in(tmp_path) == ["plugin.sock"]


def test_dangling_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "plugin.sock").symlink_to("nowhere")
    with pytest.raises(NotASocketError):
        bind_unix(str(tmp_path / "plugin.sock"))


# --- length -------------------------------------------------------------------------------------------------


def test_the_bound_of_a_path_is_the_one_that_configuration_is_checked_against() -> None:
    assert SOCKET_PATH_MAX_BYTES == limits.SOCKET_PATH_MAX_BYTES


def path_of(tmp_path: Path, length_bytes: int, base: str = "s") -> Path:
    directory = tmp_path / ("d" * (length_bytes - len(os.fsencode(tmp_path)) - len(os.fsencode(base)) - 2))
    directory.mkdir()
    path = directory / base
    assert len(os.fsencode(path)) == length_bytes
    return path


@pytest.mark.trio
@pytest.mark.parametrize("base", ["s", "plugin.sock", "a-much-longer-name-than-that.sock"])
async def test_longest_path(tmp_path_factory: pytest.TempPathFactory, base: str) -> None:
    """Even where no hidden name fits beside it, and over a stale file."""
    short = tmp_path_factory.mktemp("p")  # pytest's own directory for a test may leave no room for the name
    path = path_of(short, SOCKET_PATH_MAX_BYTES, base)
    stale_socket(path)
    async with bind_unix(str(path)) as listener:
        assert names_in(path.parent) == [base]
        stream = await connect_unix(listener.path, deadline_s=trio.current_time() + 1)
        await stream.aclose()


@pytest.mark.trio
async def test_path_too_long(tmp_path: Path) -> None:
    path = path_of(tmp_path, SOCKET_PATH_MAX_BYTES + 1)
    with pytest.raises(SocketPathTooLongError) as caught:
        bind_unix(str(path))
    for part in (str(path), "108 bytes", "107", "shorter"):
        assert part in str(caught.value)
    with pytest.raises(SocketPathTooLongError):
        await connect_unix(str(path), deadline_s=trio.current_time() + 1)


def test_length_is_counted_in_bytes(tmp_path: Path) -> None:
    path = path_of(tmp_path, SOCKET_PATH_MAX_BYTES + 1, "ü" * 10)
    assert len(str(path)) < SOCKET_PATH_MAX_BYTES
    with pytest.raises(SocketPathTooLongError):
        bind_unix(str(path))


# --- the directory ------------------------------------------------------------------------------------------


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(SocketBindError, match="does not exist: mount it") as caught:
        bind_unix(str(tmp_path / "nowhere" / "plugin.sock"))
    assert str(tmp_path / "nowhere") in str(caught.value)


def test_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SocketBindError, match="is not a directory"):
        bind_unix(str(tmp_path / "file" / "plugin.sock"))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EROFS, "read-only file system: mount it writable"),
        (errno.EACCES, "may not write to"),
        (errno.EPERM, "may not write to"),
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "is full"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("step", ["bind", "chmod", "rename"])
def test_directory_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str, step: str
) -> None:
    """Whatever step fails: one sentence, nothing left behind, a stale file still there."""
    stale_socket(tmp_path / "plugin.sock")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    class Failing(socket.socket):
        bind = fail

    if step == "bind":
        monkeypatch.setattr(socket, "socket", Failing)
    else:
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(SocketBindError, match=text) as caught:
        bind_unix(str(tmp_path / "plugin.sock"))
    assert str(tmp_path / "plugin.sock") in str(caught.value)
    assert names_in(tmp_path) == ["plugin.sock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root and a private mount namespace")
@pytest.mark.parametrize(
    ("options", "text"), [("ro", "read-only file system"), ("size=4k,nr_inodes=1", "is full")]
)
def test_real_read_only_and_full_file_systems(tmp_path: Path, options: str, text: str) -> None:
    """The kernel's own errors, in a child with its own mounts."""
    program = (
        "import ctypes, os, sys\n"
        "from gpuactors.grpc_trio import SocketBindError, bind_unix\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_RDONLY = 0x20000, 0x4000, 0x40000, 1\n"
        "path, options = sys.argv[1:]\n"
        "ro = options == 'ro'\n"
        "if libc.unshare(CLONE_NEWNS) or libc.mount(None, b'/', None, MS_REC | MS_PRIVATE, None) or libc.mount(\n"
        "        b'none', path.encode(), b'tmpfs', MS_RDONLY if ro else 0, b'' if ro else options.encode()):\n"
        "    print('cannot mount'); sys.exit()\n"
        "try: bind_unix(path + '/plugin.sock')\n"
        "except SocketBindError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), options],
        capture_output=True,
        text=True,
        check=True,
        timeout=TEST_DEADLINE_S,
    )
    if "cannot mount" in done.stdout:
        pytest.skip("no permission to mount")
    assert text in done.stdout


# --- removal ------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_another_ones_socket_is_not_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "plugin.sock")
    first = bind_unix(path)
    os.unlink(path)  # as kubelet does when it starts
    assert not first.still_there()
    second = bind_unix(path)
    assert not first.still_there()
    await first.aclose()
    assert second.still_there()
    await second.aclose()
    assert names_in(tmp_path) == []


@pytest.mark.trio
async def test_closing_twice_and_after_the_directory_has_gone(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    listener = bind_unix(str(directory / "plugin.sock"))
    os.unlink(listener.path)
    directory.rmdir()
    await listener.aclose()
    await listener.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()


# --- connect ------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_nobody_there(tmp_path: Path) -> None:
    deadline_s = trio.current_time() + 1
    with pytest.raises(ConnectError, match="no such file"):
        await connect_unix(str(tmp_path / "nothing"), deadline_s=deadline_s)
    stale_socket(tmp_path / "stale")
    with pytest.raises(ConnectError, match="no process listens"):
        await connect_unix(str(tmp_path / "stale"), deadline_s=deadline_s)
    with pytest.raises(ConnectError, match="no process listens"):
        await connect_unix(str(tmp_path), deadline_s=deadline_s)


@pytest.mark.trio
async def test_full_backlog_is_waited_for(tmp_path: Path) -> None:
    """trio's open_unix_socket would return a stream that is not connected."""
    path = str(tmp_path / "swamped.sock")
    with socket.socket(socket.AF_UNIX) as swamped, socket.socket(socket.AF_UNIX) as first:
        swamped.bind(path)
        swamped.listen(0)
        first.connect(path)
        with pytest.raises(ConnectError, match="queue of its listener is full"):
            await connect_unix(path, deadline_s=trio.current_time() + 0.05)
        async with trio.open_nursery() as nursery:

            async def accept_later() -> None:
                await trio.sleep(0.05)
                swamped.accept()[0].close()

            nursery.start_soon(accept_later)
            with trio.fail_after(TEST_DEADLINE_S):
                stream = await connect_unix(path, deadline_s=trio.current_time() + TEST_DEADLINE_S)
        swamped.accept()[0].close()
        with trio.fail_after(TEST_DEADLINE_S):
            assert await stream.receive_some() == b""  # a real connection: its end arrives
        await stream.aclose()


@pytest.mark.trio
async def test_listener_that_hangs_or_hangs_up(tmp_path: Path) -> None:
    path = str(tmp_path / "odd.sock")
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(path)
        odd.listen()
        with pytest.raises(ConnectError, match=r"did not speak HTTP/2 within 0\.05 s"):
            async with open_unix_channel(path, connect_deadline_s=0.05):
                pass
        async with trio.open_nursery() as nursery:

            async def hang_up() -> None:
                for _ in range(2):  # the one from before as well
                    (await trio.to_thread.run_sync(odd.accept))[0].close()

            nursery.start_soon(hang_up)
            with pytest.raises(ConnectError, match="closed the connection at once"):
                async with open_unix_channel(path, connect_deadline_s=TEST_DEADLINE_S):
                    pass


def test_every_error_is_a_socket_error() -> None:
    for kind in (ConnectError, NotASocketError, SocketBindError, SocketInUseError, SocketPathTooLongError):
        assert issubclass(kind, SocketError)
        assert not issubclass(kind, OSError)


def test_pid_of_another_pid_namespace_is_named_as_such() -> None:
    """SO_PEERCRED gives 0 then; the text must not say "process 0"."""
    from gpuactors.grpc_trio.unix import _in_use

    error = _in_use("/run/x.sock", 0)
    assert error.pid == 0
    assert "another PID namespace" in str(error)
    assert "process 0" not in str(error)
