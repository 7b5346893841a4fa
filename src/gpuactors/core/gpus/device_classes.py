"""The DeviceClasses that have a resource of this node's device plugin as their `spec.extendedResourceName`.

On a node that advertises such a resource, the device plugin serves the pods that request it. Elsewhere the scheduler
makes a claim of the class (KEP-5004). If a node offers the same GPUs by both, one GPU is counted twice. Must not judge
by a class's selectors: they are CEL, which only the scheduler evaluates.
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
"""The maximum number of reported DeviceClasses with a resource of gpuactors. A cluster has some ten classes; a thousand
would fill the log."""

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


def contested(classes: Iterable[DeviceClass], resources: Collection[ResourceName]) -> tuple[DeviceClass, ...]:
    """Return the classes with one of these resources, at most CLASSES_TOLD_MAX."""
    contenders = (c for c in classes if c.extended_resource in resources)
    return tuple(islice(contenders, CLASSES_TOLD_MAX))


def sentence_of(contender: DeviceClass) -> str:
    """Return what is wrong with such a class, as a sentence."""
    name, resource = quoted_name(contender.name), quoted_name(contender.extended_resource or "")
    return (
        f"the DeviceClass {name} has the extendedResourceName {resource}, which the device plugin of this node serves: "
        "the scheduler may count one GPU twice"
    )


def own_resources(state: NodeState) -> frozenset[ResourceName] | None:
    """Return the resources that the device plugin of this node serves, or would serve with each selected GPU on vfio: a
    claim may bind one at any time. None while they are not known, and in a daemon that does not serve."""
    if state.daemon.role is not Role.SERVING or not state.host.scanned:
        return None
    return frozenset({*state.index.names.values(), *state.published.plugins})
