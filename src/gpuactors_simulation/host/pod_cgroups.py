"""The cgroups of a fake node's pods, as kubelet's systemd driver makes them in cgroup v2.

Must not know when a pod lives: the fake kubelet says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

from gpuactors.core.values.model import PodLife
from gpuactors.host.root import CGROUPS

SLICE: Final = "kubepods.slice/kubepods-burstable.slice"


def slice_of(pod_uid: str) -> str:
    """Return the cgroup of a pod, below the root of all."""
    return f"{SLICE}/kubepods-burstable-pod{pod_uid.replace('-', '_')}.slice"


@final
class CgroupTree:
    """Below the root of a `HostTree`."""

    def __init__(self, root: Path) -> None:
        self._cgroups = Path(f"{root}{CGROUPS}")
        (self._cgroups / SLICE).mkdir(parents=True)
        (self._cgroups / "cgroup.controllers").write_text("cpu memory pids\n")
        self._shown: dict[str, PodLife] = {}

    def show(self, lives: Mapping[str, PodLife]) -> None:
        """From now on these pods have a cgroup, and no others."""
        for uid in self._shown.keys() - lives.keys():
            shutil.rmtree(self._cgroups / slice_of(uid))
        for uid, life in lives.items():
            if self._shown.get(uid) is not life:
                self._write(self._cgroups / slice_of(uid), life)
        self._shown = dict(lives)

    def _write(self, path: Path, life: PodLife) -> None:
        path.mkdir(exist_ok=True)
        (path / "cpu.stat").write_text(f"usage_usec {0 if life is PodLife.STARTING else 1}\n")
        (path / "cgroup.events").write_text(f"populated {int(life is PodLife.RUNNING)}\nfrozen 0\n")
