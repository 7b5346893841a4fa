"""What differs between the Kubernetes releases that the suite runs on: one table, by what the API server says it is.

What is here has been seen on the original; 1.37 is by its sources alone (docs/reference.md). A release that is not
in the table is taken for the newest before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from gpuactors_simulation.kubelet.dra.values import KUBELET_1_34, KUBELET_1_36, KUBELET_1_37, Release
from tests.node.cluster import Api

Version = tuple[int, int]
"""Major and minor."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What a scenario or a fake does otherwise on a release."""

    kubelet: Release
    """What the fake kubelet has to play to be as the node's with default gates."""
    dra_by_default: bool
    """Device taints, extended resources, health of claims' devices, counters and binding conditions are on by default;
    where not, set B of the node has them on."""


TABLE: Final[dict[Version, Differences]] = {
    (1, 35): Differences(kubelet=KUBELET_1_34, dra_by_default=False),
    (1, 36): Differences(kubelet=KUBELET_1_36, dra_by_default=True),
    (1, 37): Differences(kubelet=KUBELET_1_37, dra_by_default=True),
}

WITHOUT_DRA_GATES: Final = "DRADeviceTaints=false,DRAExtendedResource=false,DRAPartitionableDevices=false"
"""`--feature-gates` of an API server that is to treat slices and classes as before 1.36 with its default gates."""


def differences_of(version: Version) -> Differences:
    """Those of a release. Raises LookupError for one that is older than all of the table."""
    known = [row for row in TABLE if row <= version]
    if not known:
        raise LookupError(f"the suite does not know Kubernetes {version[0]}.{version[1]}: {sorted(TABLE)}")
    return TABLE[max(known)]


@cache
def version() -> Version:
    """What the API server of the node that this process is in says of itself."""
    found = Api().get("/version")
    return int(found["major"]), int(found["minor"].rstrip("+"))


def of_node() -> Differences:
    """Those of the node that this process is in."""
    return differences_of(version())
