"""The sockets beside kubelet's: other plugins' are told of, ours are not, and a storm of them not one by one."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from gpuactors import limits
from gpuactors.core.values.names import CONTROL_DIRECTORY
from gpuactors.grpc_trio import bind_unix
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.kubelet.sockets import Changes, DirectoryIo, SocketsWatch, directory_of_the_node
from gpuactors.ports.node import Sockets
from tests.support.patience import patient

WITHIN_S = patient(20.0)


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    """A short path, as a socket's has at most 107 bytes: pytest's own has more where it runs in several processes."""
    with tempfile.TemporaryDirectory(prefix="ga-") as directory:
        yield Path(directory)


@pytest.mark.trio
async def test_other_plugins_sockets_are_seen_and_ours_and_plain_files_are_not(kubelet_dir: Path) -> None:
    directory = kubelet_dir / "device-plugins"
    directory.mkdir()
    bind_unix(str(directory / "gpuactors-nvidia.com_X.sock"))
    (directory / "kubelet_internal_checkpoint").write_text("{}")
    with trio.fail_after(WITHIN_S):
        async with UnixKubelet(str(directory)).sockets() as found:
            assert await anext(found) == Sockets(None)
            (directory / CONTROL_DIRECTORY).mkdir()  # by this daemon, as it begins to serve
            with trio.move_on_after(2 * limits.ODD_SIGHT_S):
                pytest.fail(f"it was taken for another plugin's: {await anext(found)}")
        async with UnixKubelet(str(directory)).sockets() as found:
            assert await anext(found) == Sockets(None)
            bind_unix(str(directory / "kubevirt-gpu.sock"))
            assert await anext(found) == Sockets(None, ("kubevirt-gpu.sock",))
            (directory / "kubevirt-gpu.sock").unlink()
            bind_unix(str(directory / "kubevirt-gpu.sock"))
            assert await anext(found) == Sockets(None, ("kubevirt-gpu.sock",)), "another one of that name"
            (directory / "kubevirt-gpu.sock").unlink()
            assert await anext(found) == Sockets(None)
            bind_unix(str(directory / "short.sock"))
            (directory / "short.sock").unlink()
            assert await anext(found) == Sockets(None), "it was there for a moment"


@pytest.mark.trio
async def test_many_sockets_are_told_of_together_and_not_all(kubelet_dir: Path) -> None:
    directory = kubelet_dir / "device-plugins"
    directory.mkdir()
    with trio.fail_after(WITHIN_S):
        async with UnixKubelet(str(directory)).sockets() as found:
            assert await anext(found) == Sockets(None)
            for n in range(100):
                bind_unix(str(directory / f"{n}.sock"))
            told = await anext(found)
            assert len(told.others) == limits.FOREIGN_SOCKETS_MAX


@pytest.mark.trio
async def test_a_directory_that_could_not_be_watched_is_watched_as_soon_as_it_can_be(
    kubelet_dir: Path,
) -> None:
    """A daemon that starts while the node is short of inotify instances or descriptors would miss for ever who comes
    and goes between two reads."""
    directory = kubelet_dir / "device-plugins"
    directory.mkdir()
    node, watched, refused = directory_of_the_node(), trio.Event(), 0

    @contextmanager
    def watch(path: str) -> Iterator[Changes]:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        with node.watch(path) as changes:
            watched.set()
            yield changes

    async def passes_by() -> None:
        await watched.wait()
        bind_unix(str(directory / "short.sock"))
        (directory / "short.sock").unlink()

    io = DirectoryIo(watch, node.directory, node.names, node.socket_file)
    with trio.fail_after(WITHIN_S):
        async with SocketsWatch(str(directory), io).open() as found, trio.open_nursery() as nursery:
            assert await anext(found) == Sockets(None)
            nursery.start_soon(passes_by)
            assert await anext(found) == Sockets(None), "it was there for a moment"
