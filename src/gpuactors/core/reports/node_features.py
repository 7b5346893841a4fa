"""The node's features for Node Feature Discovery, read off the state: the models and drivers of the selected functions,
and whether there is an IOMMU. They count what is there, not what is free: that changes with every pod, and is in the
node's `allocatable`.

The labels are in a subdomain of the namespace that NFD keeps for features, so no other owner's domain is used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Role

PREFIX: Final = "gpuactors.feature.node.kubernetes.io"

IOMMU: Final = "iommu"
DRIVER: Final = "driver."
NO_DRIVER: Final = "none"

LABELS: Final[Mapping[str, str]] = {
    "MODEL": "How many selected functions the node has of this model, by the name of its resource after the slash.",
    f"{DRIVER}NAME": f"How many of them are bound to this driver; `{DRIVER}{NO_DRIVER}`: to none.",
    IOMMU: "`true` if any of them is in an IOMMU group of the hardware, else `false`.",
}
"""Every label, after the prefix, and its meaning."""

_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
"""The pattern of a label's name, after its prefix (k8s.io/apimachinery util/validation, IsQualifiedName)."""


def node_features(state: NodeState) -> Mapping[str, str] | None:
    """Return the labels, sorted by name; None while they are not known, or another daemon writes them."""
    if state.daemon.stopping or state.daemon.role is not Role.SERVING or not state.host.scanned:
        return None
    index = state.index
    devices = [index.present[key] for key in index.names]
    counts = Counter(resource.partition("/")[2] for resource in index.names.values())
    counts.update(f"{DRIVER}{device.driver or NO_DRIVER}" for device in devices)
    has_iommu = any(
        d.group is not None and not any(unit.without_iommu for unit in d.units[:1]) for d in devices
    )
    labels = {name: str(count) for name, count in counts.items() if re.fullmatch(_NAME, name)}
    labels[IOMMU] = "true" if has_iommu else "false"
    return {f"{PREFIX}/{name}": labels[name] for name in sorted(labels)}
