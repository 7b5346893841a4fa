"""Kubelet's directory is removed and made anew, and a container goes on seeing the removed one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.ports.errors import KubeletError
from tests.support.patience import patient

PATIENCE_S = patient(10.0)


@pytest.mark.trio
async def test_that_it_has_been_removed_is_said_whether_it_happens_or_has_happened(tmp_path: Path) -> None:
    """A descriptor holds the directory here, as a mount does in a container."""
    (tmp_path / "held").mkdir()
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_DIRECTORY)
    (tmp_path / "device-plugins").symlink_to(f"/proc/self/fd/{held}")
    kubelet = UnixKubelet(str(tmp_path / "device-plugins"))
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(KubeletError, match="delete this pod"):
            await watch(kubelet, str(tmp_path / "held"))
        with pytest.raises(KubeletError, match="delete this pod"):
            await watch(kubelet, None)
    os.close(held)


async def watch(kubelet: UnixKubelet, to_remove: str | None) -> None:
    async with kubelet.sockets() as sockets:
        async for found in sockets:
            assert found.kubelet is None
            assert to_remove is not None, "there is nothing to watch"
            os.rmdir(to_remove)
