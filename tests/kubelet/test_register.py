"""Register where nobody answers it: a failed registration, with the socket's path, whatever is wrong there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from gpuactors.core.values.model import ResourceName
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.ports.errors import KubeletError
from tests.support.patience import patient

WITHIN_S = patient(10.0)


@contextmanager
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield listening


async def registers(directory: Path) -> None:
    path = directory / "device-plugins/kubelet.sock"
    with (
        trio.fail_after(WITHIN_S),
        pytest.raises(KubeletError, match=f"cannot reach kubelet at {path}: "),
    ):
        await UnixKubelet(str(path.parent)).register(ResourceName("nvidia.com/X"), "x.sock", pre_start=True)


@pytest.fixture
def kubelet_sock(tmp_path: Path) -> Path:
    path = tmp_path / "device-plugins/kubelet.sock"
    path.parent.mkdir()
    return path


@pytest.mark.trio
async def test_without_a_socket(tmp_path: Path) -> None:
    await registers(tmp_path)


@pytest.mark.trio
async def test_with_the_socket_of_a_kubelet_that_was_killed(tmp_path: Path, kubelet_sock: Path) -> None:
    with listener(kubelet_sock):
        pass  # the file stays
    await registers(tmp_path)


@pytest.mark.trio
async def test_with_somebody_who_hangs_up_at_once(tmp_path: Path, kubelet_sock: Path) -> None:
    def hang_up(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        connection.close()

    with listener(kubelet_sock) as listening:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, hang_up, listening)
            await registers(tmp_path)
