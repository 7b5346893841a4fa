"""Shared counters (KEP-4815): the real scheduler never allocates a GPU and a virtual function of it.

Each claim here tolerates every taint: only counters keep the scheduler from the second device. Without counters it
allocates both, and the node prepares one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.node import pods
from tests.node.claims import (
    IDLE,
    ClaimNode,
    by_address,
    claims,
    device_name,
    from_template,
    request,
    slices_of,
)
from tests.node.cluster import Object, component, eventually
from tests.node.fake_host import NVIDIA

__all__ = ["claims"]

pytestmark = pytest.mark.node_set("B")

VF_CLASS = "vf.gpu.nvidia.com"


def tolerating(address: str, device_class: str | None = None) -> Object:
    """A request for one device, whatever taint it has."""
    found = request(selector=by_address(address))
    found["exactly"]["tolerations"] = [{"operator": "Exists"}]
    if device_class is not None:
        found["exactly"]["deviceClassName"] = device_class
    return found


def arranged(claims: ClaimNode) -> tuple[str, list[str]]:
    """A GPU on its host's driver with two virtual functions on vfio-pci, and a template for each of the three."""
    physical = claims.host.plug(0x21, driver=NVIDIA, total_vfs=2)
    claims.offered(physical)
    virtual = claims.host.virtualize(physical, 2)
    claims.offered(*virtual)
    claims.template("whole", tolerating(physical))
    for number, address in enumerate(virtual):
        claims.template(f"vf-{number}", tolerating(address, VF_CLASS))
    return physical, virtual


def counter_sets(claims: ClaimNode) -> dict[str, str]:
    """The slots of each counter set in the slices."""
    sets = (one for spec in slices_of(claims.api) for one in spec.get("sharedCounters", ()))
    return {one["name"]: one["counters"]["vf-slots"]["value"] for one in sets}


def consumed(claims: ClaimNode) -> dict[str, str]:
    """The slots that each device consumes."""
    devices = (device for spec in slices_of(claims.api) for device in spec.get("devices", ()))
    return {
        device["name"]: device["consumesCounters"][0]["counters"]["vf-slots"]["value"]
        for device in devices
        if "consumesCounters" in device
    }


def test_the_scheduler_gives_a_gpu_or_virtual_functions_of_it(claims: ClaimNode) -> None:
    physical, virtual = arranged(claims)
    slots = {device_name(physical): "2"} | dict.fromkeys(map(device_name, virtual), "1")
    eventually(lambda: consumed(claims) == slots, "the counters of the devices")
    assert counter_sets(claims) == {"pf-0000-21-00-0-counter-set": "2"}
    claims.create("vm-1", from_template("vf-0"))
    claims.runs("vm-1", virtual[0])
    claims.create("vm-whole", from_template("whole"))
    assert "cannot allocate all claims" in claims.waits("vm-whole")
    claims.create("vm-2", from_template("vf-1"))
    claims.runs("vm-2", virtual[1])
    claims.waits("vm-whole")
    pods.stop(claims.api, "vm-1")
    claims.waits("vm-whole")
    assert not claims.refused("vm-whole"), "the node was never asked for both"
    pods.stop(claims.api, "vm-whole")
    pods.stop(claims.api, "vm-2")
    claims.nothing_is_left({physical: NVIDIA} | dict.fromkeys(virtual, "vfio-pci"))


def test_virtual_functions_that_are_made_after_their_gpu_was_allocated_are_not_given(
    claims: ClaimNode,
) -> None:
    """Until the node prepares its claim no taint says so: kubelet is away here, and the counters do."""
    physical = claims.host.plug(0x21, driver=NVIDIA, total_vfs=2)
    claims.offered(physical)
    claims.template("whole", tolerating(physical))
    with claims.node.without("kubelet"):
        claims.create("vm-whole", from_template("whole"), command=IDLE)
        eventually(lambda: claims.devices_of("vm-whole") == [device_name(physical)], "an allocation")
        virtual = claims.host.virtualize(physical, 2)
        claims.offered(*virtual)
        eventually(lambda: counter_sets(claims), "counter sets")
        claims.template("vf-0", tolerating(virtual[0], VF_CLASS))
        claims.create("vm-1", from_template("vf-0"))
        claims.waits("vm-1")
    pods.stop(claims.api, "vm-whole")
    claims.runs("vm-1", virtual[0])
    pods.stop(claims.api, "vm-1")


@contextmanager
def without_counters() -> Iterator[None]:
    """The API server drops counters while the context is open."""
    component("down.sh", "kube-apiserver")
    component("up.sh", "kube-apiserver", environment={"K8S_FEATURE_GATES": "DRAPartitionableDevices=false"})
    try:
        yield
    finally:
        component("down.sh", "kube-apiserver")
        component("up.sh", "kube-apiserver", environment={})
        for name in (
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
        ):  # they ask again only after a while
            component("down.sh", name)
            component("up.sh", name)


def test_without_counters_the_node_prepares_one_of_both(claims: ClaimNode) -> None:
    with claims.node.sampler.without(("kube-apiserver",)), without_counters():
        physical, virtual = arranged(claims)
        eventually(lambda: consumed(claims) == {} == counter_sets(claims), "slices without counters")
        claims.create("vm-1", from_template("vf-0"))
        claims.runs("vm-1", virtual[0])
        claims.create("vm-whole", from_template("whole"))
        eventually(lambda: claims.refused("vm-whole"), "a refusal by the node")
        assert claims.host.drivers()[physical] == NVIDIA
        claims.runs("vm-1", virtual[0])
        pods.stop(claims.api, "vm-whole")
        pods.stop(claims.api, "vm-1")
        claims.nothing_is_left({physical: NVIDIA} | dict.fromkeys(virtual, "vfio-pci"))
