"""Claims with the gates of DRA that are off by default before 1.36: taints, health, extended resources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.node import pods
from tests.node.claims import (
    EXAMPLES,
    IDLE,
    ClaimNode,
    by_address,
    claims,
    device_name,
    from_template,
    generation,
    request,
    slices_of,
    taints_of,
)
from tests.node.cluster import Object, eventually
from tests.node.fake_host import H100_RESOURCE, NVIDIA

__all__ = ["claims"]

pytestmark = pytest.mark.node_set("B")

H = H100_RESOURCE
COUNTED = "vfio.gpu.nvidia.com/any"


@contextmanager
def opened(group: int) -> Iterator[None]:
    """A process of no pod has an IOMMU group open: this one."""
    descriptor = os.open(f"/dev/vfio/{group}", os.O_RDWR)
    try:
        yield
    finally:
        os.close(descriptor)


def test_an_extended_resource_by_its_class(claims: ClaimNode) -> None:
    """A pod asks for a number; the scheduler makes the claim, and deletes it with the pod."""
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(gpu)
    with claims.device_class(EXAMPLES / "extended-resource.yaml"):
        pods.create(claims.api, pods.tenant("vm-1", {COUNTED: 1}))
        claims.runs("vm-1", gpu)
        (claim,) = claims.claims()
        assert claim["metadata"]["annotations"]["resource.kubernetes.io/extended-resource-claim"] == "true"
        claims.is_prepared(claim["metadata"]["uid"])
        claims.settled({})
        pods.create(claims.api, pods.tenant("vm-2", {COUNTED: 1}))
        claims.waits("vm-2")
        pods.stop(claims.api, "vm-1")
        claims.runs("vm-2", gpu)
        pods.stop(claims.api, "vm-2")
        eventually(lambda: not claims.claims(), "the end of the scheduler's claims")
        claims.nothing_is_left({gpu: NVIDIA})


def test_a_gpu_of_a_foreign_process_is_tainted(claims: ClaimNode) -> None:
    """The scheduler does not choose it while a process of the host has it open."""
    gpu = claims.host.plug(0x25)
    claims.offered(gpu)
    claims.template("one", request())
    with opened(0x25):
        claims.offered()
        # Tainted at once; who has it is known when kubelet's ledger has been read again.
        taint = eventually(lambda: held_by_other(claims, gpu), "the taint HeldByOther")
        assert (taint["key"], taint["effect"]) == ("gpu.nvidia.com/held", "NoSchedule")
        claims.create("vm-1", from_template("one"))
        claims.waits("vm-1")
        claims.settled({})
    claims.runs("vm-1", gpu)
    assert taints_of(claims.api) == {device_name(gpu): []}
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left({gpu: "vfio-pci"})
    claims.settled({H: 1})


def test_a_gpu_whose_vfio_driver_is_absent_is_tainted(claims: ClaimNode) -> None:
    """The scheduler does not choose it until the driver is loaded: each of its claims would fail."""
    with vfio_absent(claims):
        gpu = claims.host.plug(0x28, driver=NVIDIA)
        taint = eventually(lambda: taint_of(claims, gpu), "a taint")
        assert (taint["key"], taint["effect"]) == ("gpu.nvidia.com/unhealthy", "NoSchedule")
        assert taint["value"] == "DriverNotLoaded"
        claims.template("one", request())
        claims.create("vm-1", from_template("one"))
        claims.waits("vm-1")
        assert claims.host.drivers() == {gpu: NVIDIA}
        assert not claims.refused("vm-1")
    claims.runs("vm-1", gpu)
    assert taints_of(claims.api) == {device_name(gpu): []}
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left({gpu: NVIDIA})


@contextmanager
def vfio_absent(claims: ClaimNode) -> Iterator[None]:
    """The module vfio-pci is not loaded while the context is open."""
    with claims.host.lock:
        claims.host.kernel.rmmod("vfio-pci")
    try:
        yield
    finally:
        with claims.host.lock:
            claims.host.kernel.modprobe("vfio-pci")


def held_by_other(claims: ClaimNode, gpu: str) -> Object:
    """Its taint with that cause; empty while it has another one, or none."""
    taint = taint_of(claims, gpu)
    return taint if taint.get("value") == "HeldByOther" else {}


def taint_of(claims: ClaimNode, gpu: str) -> Object:
    """The first taint of a GPU in the slices; empty if it has none."""
    taints = taints_of(claims.api).get(device_name(gpu), [])
    return taints[0] if taints else {}


def test_the_health_of_a_claims_device(claims: ClaimNode) -> None:
    """It is in the pod's status: Healthy, and Unhealthy when its GPU has gone."""
    gpu = claims.host.plug(0x25)
    claims.offered(gpu)
    claims.template("one", request())
    claims.create("vm-1", from_template("one"), command=IDLE)
    claims.comes_to("vm-1", "Running")
    claims.shows_health("vm-1", "Healthy")
    claims.host.unplug(gpu)
    claims.shows_health("vm-1", "Unhealthy")
    claims.offered()
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left({})
    claims.settled({})


def test_a_pool_of_several_slices(claims: ClaimNode) -> None:
    """The first taint of a pool of 66 GPUs makes it two slices, its end makes it one: the scheduler finds the GPUs of
    each, every time. With a slice of an old generation it finds none of the others, and `consistent` says which."""
    first, last = claims.host.plug(0x25), claims.host.plug(0xB0, driver=NVIDIA, group=0x26)
    many = [claims.host.plug(slot, driver=NVIDIA) for slot in range(0x40, 0x80)]
    claims.offered(first, last, *many)
    assert [len(spec["devices"]) for spec in slices_of(claims.api)] == [66]
    single = generation(claims.api)
    claims.template("first", request(selector=by_address(first)))
    claims.template("last", request(selector=by_address(last)))
    with opened(0x25):
        claims.offered(last, *many)
        assert sorted(len(spec["devices"]) for spec in slices_of(claims.api)) == [2, 64]
        several = generation(claims.api)
        assert several > single
        claims.create("vm-1", from_template("last"))
        claims.runs("vm-1", last)
    claims.offered(first, last, *many)
    assert [len(spec["devices"]) for spec in slices_of(claims.api)] == [66]
    assert generation(claims.api) > several
    claims.create("vm-2", from_template("first"))
    claims.runs("vm-2", first)
    pods.clear(claims.api)
    claims.nothing_is_left({first: "vfio-pci", last: NVIDIA})
