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
"""Each with its number behind it; as paths of the container."""

IMEXD: Final = "/imexd"
"""Where the daemon's container has the domain's directory."""

_MODE: Final = 0o666


@lru_cache(
    maxsize=8
)  # what the actors are to do is derived at each event, and 2,048 nodes take some milliseconds
def channel_edits(own: ClaimedDomain, imex: ImexFacts) -> Json:
    """Of each channel that the claim has, or of all that the host's driver has."""
    found: dict[str, Json] = {"env": (f"COMPUTE_DOMAIN_UUID={own.uid}",)}
    if imex.clique_id and imex.channel_major is not None:
        allocated = [d.id for d in own.devices if d.kind is DeviceKind.CHANNEL]
        numbers = range(max(imex.channels, *allocated, 0)) if own.every else allocated
        found["deviceNodes"] = tuple(
            _node(f"{CHANNEL_NODES}{number}", imex.channel_major, number) for number in numbers
        )
    return found


def daemon_edits(own: ClaimedDomain, imex: ImexFacts, directory: str) -> Json:
    """`directory` is the domain's own, as the host has it."""
    found: dict[str, Json] = {
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
        found["deviceNodes"] = (node,)
    return found


def edits_of(own: ClaimedDomain, device: DomainDevice, directory: str) -> Json:
    """Those of one device of the claim, for which the host's facts have been read."""
    assert own.imex is not None
    if device.kind is DeviceKind.CHANNEL:
        return channel_edits(own, own.imex)
    return daemon_edits(own, own.imex, directory)


def _mgmt_node(imex: ImexFacts) -> Json:
    """The capability fabric-imex-mgmt; None on a node without fabric, and where the driver has none."""
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
