"""The files of the CDI directory that give GPUs to containers, of all DRA drivers.

A driver writes the file of a claim when it prepares it, and removes it when it unprepares it (Container Device
Interface, "transient specs"). Container runtimes read them; any program may, without asking kubelet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

_UUID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class CdiSpec(Struct, frozen=True, gc=False):
    """One file of the CDI directory."""

    path: str
    devices: tuple[str, ...]
    """The CDI ids that the file defines, sorted: `k8s.gpu.nvidia.com/claim=<uid>-gpu-vfio-1`."""
    nodes: tuple[str, ...] = ()
    """The device nodes of GPUs that its devices give to a container, sorted: `/dev/vfio/51`, `/dev/nvidia0`. Without
    the nodes that every GPU needs (`/dev/vfio/vfio`, `/dev/nvidiactl`)."""

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
        """The DRA driver that has written it, by the vendor of its devices: `gpu.nvidia.com`; the path if it has no
        device."""
        vendor = self.devices[0].partition("/")[0] if self.devices else ""
        return vendor.removeprefix("k8s.") or self.path


class CdiSpecs(Struct, frozen=True, gc=False):
    """One read of the CDI directory."""

    specs: tuple[CdiSpec, ...] = ()
    """The files, sorted by path, without those that define no device or cannot be read."""
    problem: str = ""
    """Why files may be missing, as a part of a sentence; empty if none is."""


NO_SPECS: Final = CdiSpecs()


def device_nodes(paths: Iterable[str]) -> tuple[Mapping[str, str], ...]:
    """Return device nodes as the container edits of a device have them, by the same path on the host and in the
    container."""
    return tuple({"path": path, "permissions": "mrw"} for path in paths)


def is_metadata(cdi_id: str) -> bool:
    """Return whether the device is that of a claim's metadata file (KEP-5304), which has no device node."""
    return cdi_id.partition("=")[0].endswith("/metadata")
