"""The files of the CDI directory, as far as they give GPUs to containers: who has a GPU by the files of whatever DRA
driver.

A driver writes the file of a claim when it prepares it, and removes it when it unprepares it (Container Device
Interface, "transient specs"). A container runtime reads them; so may anybody, without asking kubelet.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

_UUID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class CdiSpec(Struct, frozen=True, gc=False):
    """One file."""

    path: str
    devices: tuple[str, ...]
    """The CDI ids that it defines, sorted: `k8s.gpu.nvidia.com/claim=<uid>-gpu-vfio-1`."""
    nodes: tuple[str, ...] = ()
    """The device nodes of GPUs that it gives to a container, by any of its devices, sorted: `/dev/vfio/51`,
    `/dev/nvidia0`. Without those that every GPU needs (`/dev/vfio/vfio`, `/dev/nvidiactl`)."""

    @property
    def claim(self) -> str:
        """The UID of the claim whose file it is, by its name or its devices; empty if it is another file."""
        stem = self.path.rpartition("/")[2].rpartition(".")[0]
        if (match := re.search(rf"_({_UUID})", stem)) is not None:
            return match[1]
        uids = {m[1] if (m := re.search(rf"=({_UUID})", device)) else "" for device in self.devices}
        return uids.pop() if len(uids) == 1 else ""

    @property
    def driver(self) -> str:
        """The DRA driver that has written it, by the vendor of its devices: `gpu.nvidia.com`; its file where that says
        nothing."""
        vendor = self.devices[0].partition("/")[0] if self.devices else ""
        return vendor.removeprefix("k8s.") or self.path


class CdiSpecs(Struct, frozen=True, gc=False):
    """One read of all of them."""

    specs: tuple[CdiSpec, ...] = ()
    """Sorted by path. Those that define no device, or cannot be read, are left out."""
    problem: str = ""
    """Why some may be missing, as a part of a sentence; empty if none is."""


NO_SPECS: Final = CdiSpecs()


def is_metadata(cdi_id: str) -> bool:
    """The device of a claim's metadata file (KEP-5304), which gives a container no device node."""
    return cdi_id.partition("=")[0].endswith("/metadata")
