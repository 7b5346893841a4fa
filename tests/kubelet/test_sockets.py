"""The sockets beside kubelet's: other plugins' are told of, ours are not, and a storm of them not one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from gpuactors import limits
from gpuactors.grpc_trio import bind_unix
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.ports import Sockets
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
        async with UnixKubelet(str(kubelet_dir)).sockets() as found:
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
        async with UnixKubelet(str(kubelet_dir)).sockets() as found:
            assert await anext(found) == Sockets(None)
            for n in range(100):
                bind_unix(str(directory / f"{n}.sock"))
            told = await anext(found)
            assert len(told.others) == limits.NEIGHBOURS_MAX
