"""What the files of a claim give to its container."""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.values.claim import DeviceEdits


def nodes_of(device: DeviceEdits) -> tuple[str, ...]:
    """The device nodes of a device of a claim."""
    assert isinstance(device.edits, Mapping)
    found = device.edits.get("deviceNodes", ())
    assert isinstance(found, tuple)
    return tuple(str(node["path"]) for node in found if isinstance(node, Mapping))
