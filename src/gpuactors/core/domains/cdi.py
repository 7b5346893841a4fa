"""The content of the CDI file for a compute domain's claim: the nodes of its channels, and the needs of its daemon.

Values only. A container edit without any content is invalid in CDI; a channel on a node without fabric has no node, and
the domain's UID alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from gpuactors.core.values.claim import Json
from gpuactors.core.values.domain import ClaimedDomain, DeviceKind, DomainDevice, ImexFacts

CHANNEL_NODES: Final = "/dev/nvidia-caps-imex-channels/channel"
CAPABILITY_NODES: Final = "/dev/nvidia-caps/nvidia-cap"
"""The paths of device nodes in the container, before the node's number."""

IMEXD: Final = "/imexd"
"""The path of the domain's directory in the daemon's container."""

_MODE: Final = 0o666


@lru_cache(
    maxsize=8
)  # what the actors are to do is derived at each event, and 2,048 nodes take some milliseconds
def channel_edits(own: ClaimedDomain, imex: ImexFacts) -> Json:
    """Return the edits for each channel that the claim has, or for all that the host's driver has."""
    edits: dict[str, Json] = {"env": (f"COMPUTE_DOMAIN_UUID={own.uid}",)}
    if imex.clique_id and imex.channel_major is not None:
        allocated = [d.id for d in own.devices if d.kind is DeviceKind.CHANNEL]
        numbers = range(max(imex.channels, *allocated, 0)) if own.every else allocated
        edits["deviceNodes"] = tuple(
            _node(f"{CHANNEL_NODES}{number}", imex.channel_major, number) for number in numbers
        )
    return edits


def daemon_edits(own: ClaimedDomain, imex: ImexFacts, directory: str) -> Json:
    """Return the edits for the domain's daemon. `directory` is the domain's directory on the host."""
    edits: dict[str, Json] = {
        "env": (
            f"CLIQUE_ID={imex.clique_id}",
            f"COMPUTE_DOMAIN_UUID={own.uid}",
            f"COMPUTE_DOMAIN_NAME={own.name}",
            f"COMPUTE_DOMAIN_NAMESPACE={own.namespace}",
        ),
        "mounts": (
            {
                "hostPath": directory,
                "containerPath": IMEXD,
                "options": ("rw", "nosuid", "nodev", "bind"),
            },
        ),
    }
    if (node := _mgmt_node(imex)) is not None:
        edits["deviceNodes"] = (node,)
    return edits


def edits_of(own: ClaimedDomain, device: DomainDevice, directory: str) -> Json:
    """Return the edits for one device of the claim, for which the host's facts have been read."""
    assert own.imex is not None
    if device.kind is DeviceKind.CHANNEL:
        return channel_edits(own, own.imex)
    return daemon_edits(own, own.imex, directory)


def _mgmt_node(imex: ImexFacts) -> Json:
    """Return the device node of the capability fabric-imex-mgmt; None on a node without fabric, and where the driver
    has none."""
    if not imex.clique_id or imex.caps_major is None or imex.mgmt_minor is None:
        return None
    return _node(f"{CAPABILITY_NODES}{imex.mgmt_minor}", imex.caps_major, imex.mgmt_minor)


def _node(path: str, major: int, minor: int) -> Json:
    return {
        "path": path,
        "type": "c",
        "major": major,
        "minor": minor,
        "fileMode": _MODE,
        "permissions": "rw",
    }
