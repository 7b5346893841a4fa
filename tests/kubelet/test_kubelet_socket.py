"""kubelet.sock: a new one is seen as new, whatever its inode's number."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import trio

from gpuactors.kubelet.kubelet import UnixKubelet
from tests.support.patience import patient

PATIENCE_S = patient(10.0)


def _make_socket(path: Path, made_at_ns: int) -> int:
    """As kubelet makes it at its start; its file system may give it the number that the last one had."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(path))
    os.utime(path, ns=(made_at_ns, made_at_ns))
    return path.stat().st_ino


async def test_a_socket_with_the_number_of_the_last_one_is_another(tmp_path: Path) -> None:
    """tmpfs and ext4 give a number away again at once."""
    directory = tmp_path / "device-plugins"
    directory.mkdir()
    path = directory / "kubelet.sock"
    _make_socket(path, 1_000_000_000)
    kubelet = UnixKubelet(str(tmp_path / "device-plugins"))
    with trio.fail_after(PATIENCE_S):
        async with kubelet.sockets() as sockets:
            first = (await anext(sockets)).kubelet
            # The same inode, made at another time; a rename tells the watcher as a restart does.
            os.utime(path, ns=(2_000_000_000, 2_000_000_000))
            path.rename(tmp_path / "aside")
            (tmp_path / "aside").rename(path)
            second = (await anext(sockets)).kubelet
            while second is None:
                second = (await anext(sockets)).kubelet
    assert first is not None
    assert second != first
