"""The DeviceClasses that have a resource of this node's device plugin as their `spec.extendedResourceName`.

A pod that requests such a resource is served by the device plugin where the node advertises it, and elsewhere the
scheduler makes a claim by the class: the one or the other, as each node is (KEP-5004). On a node where both offer the
same GPUs one GPU is counted twice. Must not judge by a class's selectors: they are CEL, which only the scheduler has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

from msgspec import Struct

from gpuactors.core.state import NodeState
from gpuactors.core.values.model import ResourceName, Role
from gpuactors.core.values.quote import quoted_name

CLASSES_TOLD_MAX: Final = 16
"""DeviceClasses with a resource of gpuactors that are named; a cluster has some ten classes, and whoever makes a
thousand of that kind would fill the log."""

REMEDY = (
    "rename one of the two (--resource-name here, spec.extendedResourceName in the class), remove that field from the "
    "class, or set --device-plugin off on the nodes that have --dra on"
)
"""The remedy for such a class."""


class DeviceClass(Struct, frozen=True, gc=False):
    """A DeviceClass, as far as pods request it as an extended resource."""

    name: str
    extended_resource: str | None
    """`spec.extendedResourceName`."""


def contested(classes: Iterable[DeviceClass], ours: Collection[ResourceName]) -> tuple[DeviceClass, ...]:
    """The classes that take one of our resources, CLASSES_TOLD_MAX of them at most."""
    found = (one for one in classes if one.extended_resource in ours)
    return tuple(islice(found, CLASSES_TOLD_MAX))


def sentence_of(contender: DeviceClass) -> str:
    """The fault of one of them, as a sentence."""
    name, resource = quoted_name(contender.name), quoted_name(contender.extended_resource or "")
    return (
        f"the DeviceClass {name} has the extendedResourceName {resource}, which the device plugin of this node serves: "
        "the scheduler may count one GPU twice"
    )


def own_resources(state: NodeState) -> frozenset[ResourceName] | None:
    """The resources that the device plugin of this node serves, or would serve with each selected GPU on vfio: a claim
    may bind one at any time. None while they are not known, and in a daemon that does not serve."""
    if state.daemon.role is not Role.SERVING or not state.host.scanned:
        return None
    return frozenset({*state.index.names.values(), *state.published.plugins})
