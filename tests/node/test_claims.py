"""Claims on a real node: what the scheduler, kubelet, the container and the host see of each."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.node import pods
from tests.node.claims import (
    IDLE,
    ClaimNode,
    by_address,
    by_id,
    by_name,
    claims,
    device_name,
    exactly,
    from_template,
    kubelet_calls,
    request,
    slice_versions,
)
from tests.node.cluster import DEVICE_PLUGINS, eventually
from tests.node.fake_host import A100, H100, H100_RESOURCE, NVIDIA
from tests.support.patience import patient

__all__ = ["claims"]

H = H100_RESOURCE


def test_a_claim_from_a_template_and_a_claim_by_name(claims: ClaimNode) -> None:
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(gpu)
    claims.template("one", request())
    claims.create("vm-1", from_template("one"))
    claims.runs("vm-1", gpu)
    uid = claims.uid_of("vm-1")
    claims.is_prepared(uid)
    assert claims.addresses("vm-1") == {"gpu": [gpu]}
    assert list(claims.metadata("vm-1")) == ["resourceclaimtemplates/gpu/gpu/gpu.nvidia.com-metadata.json"]
    assert claims.devices_of("vm-1") == [device_name(gpu)]
    claims.settled({})
    pods.stop(claims.api, "vm-1")
    claims.is_released(uid)
    eventually(lambda: not claims.claims(), "the end of the claim from a template")
    claims.on({gpu: NVIDIA})

    uid = claims.claim("mine", request())
    claims.create("vm-2", by_name("mine"))
    claims.runs("vm-2", gpu)
    claims.is_prepared(uid)
    assert list(claims.metadata("vm-2")) == ["resourceclaims/mine/gpu/gpu.nvidia.com-metadata.json"]
    pods.stop(claims.api, "vm-2")
    eventually(lambda: not claims.claims()[0].get("status"), "the claim to be free again")
    claims.nothing_is_left({gpu: NVIDIA})
    claims.settled({})


def test_several_requests_in_one_claim(claims: ClaimNode) -> None:
    first, second, third = (claims.host.plug(slot, driver=NVIDIA) for slot in (0x21, 0x22, 0x23))
    claims.offered(first, second, third)
    claims.template("three", request("single", by_address(second)), request("pair", count=2))
    claims.create("vm-1", from_template("three"))
    claims.runs("vm-1", first, second, third)
    claims.is_prepared(claims.uid_of("vm-1"))
    assert claims.addresses("vm-1") == {"single": [second], "pair": [first, third]}
    claims.settled({})
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left({first: NVIDIA, second: NVIDIA, third: NVIDIA})
    claims.settled({})


def test_first_available(claims: ClaimNode) -> None:
    common = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(common)
    wishes = [{"name": name, **exactly(by_id(model))} for name, model in (("a100", A100), ("h100", H100))]
    claims.template("best", {"name": "gpu", "firstAvailable": wishes})
    claims.create("vm-1", from_template("best"))
    claims.runs("vm-1", common)
    assert claims.addresses("vm-1") == {"gpu/h100": [common]}
    rare = claims.host.plug(0x27, A100)
    claims.offered(common, rare)
    claims.create("vm-2", from_template("best"))
    claims.runs("vm-2", rare)
    assert claims.addresses("vm-2") == {"gpu/a100": [rare]}
    assert list(claims.metadata("vm-2")) == ["resourceclaimtemplates/gpu/gpu/gpu.nvidia.com-metadata.json"]
    claims.settled({})
    pods.stop(claims.api, "vm-1")
    pods.stop(claims.api, "vm-2")
    claims.nothing_is_left({common: NVIDIA, rare: "vfio-pci"})


def test_one_claim_of_two_pods(claims: ClaimNode) -> None:
    """One prepare; the GPU stays until the second pod has ended, whichever that is."""
    gpu = claims.host.plug(0x21, driver=NVIDIA)
    claims.offered(gpu)
    uid = claims.claim("shared", request())
    claims.create("vm-1", by_name("shared"))
    claims.runs("vm-1", gpu)
    claims.create("vm-2", by_name("shared"), command=IDLE)
    claims.comes_to("vm-2", "Running")
    assert pods.nodes_in("vm-2") == {"33", "vfio"}
    assert claims.addresses("vm-2") == {"gpu": [gpu]}
    claims.settled({})
    pods.stop(claims.api, "vm-1")
    claims.is_prepared(uid)
    assert claims.host.drivers() == {gpu: "vfio-pci"}
    assert [call.uid for call in kubelet_calls() if call.uid == uid] == [uid]
    claims.settled({})
    pods.stop(claims.api, "vm-2")
    claims.nothing_is_left({gpu: NVIDIA})


def test_admin_access_touches_nothing(claims: ClaimNode) -> None:
    used, unused = (claims.host.plug(slot, driver=NVIDIA) for slot in (0x21, 0x22))
    claims.offered(used, unused)
    claims.template("one", request(selector=by_address(used)))
    claims.create("vm-1", from_template("one"))
    pod = claims.runs("vm-1", used)
    with claims.admin_namespace():
        claims.template("all", request(admin=True))
        claims.create("monitor", from_template("all"), command=IDLE)
        claims.comes_to("monitor", "Running")
    assert sorted(claims.devices_of("monitor")) == [device_name(used), device_name(unused)]
    assert pods.nodes_in("monitor") == set()
    assert claims.host.drivers() == {used: "vfio-pci", unused: NVIDIA}
    claims.settled({})
    uid = claims.uid_of("monitor")
    pods.stop(claims.api, "monitor")
    claims.is_released(uid)
    assert claims.host.drivers() == {used: "vfio-pci", unused: NVIDIA}
    assert claims.runs("vm-1", used) == pod
    claims.is_prepared(claims.uid_of("vm-1"))
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left({used: NVIDIA, unused: NVIDIA})


def test_pre_bound_beside_bound_by_the_claim(claims: ClaimNode) -> None:
    # Addresses of its own: the daemon remembers the original driver of a function that has gone.
    before = claims.host.plug(0x25)
    other = claims.host.plug(0x26, driver=NVIDIA)
    claims.offered(before, other)
    claims.settled({H: 1})
    claims.template("both", request("before", by_address(before)), request("other", by_address(other)))
    for _ in range(2):
        claims.create("vm-1", from_template("both"))
        claims.runs("vm-1", before, other)
        assert claims.addresses("vm-1") == {"before": [before], "other": [other]}
        claims.settled({})
        pods.stop(claims.api, "vm-1")
        claims.nothing_is_left({before: "vfio-pci", other: NVIDIA})
        claims.settled({H: 1})


@pytest.mark.timeout(patient(240.0))
def test_a_gpu_whose_pod_ended_without_a_daemon_is_offered_by_one_with_claims_alone(
    claims: ClaimNode,
) -> None:
    """Only kubelet's file still names the pod, and nothing makes kubelet write it: no device is listed or allocated."""
    gpu = claims.host.plug(0x27)
    claims.settled({H: 1})
    pods.start(claims.api, "vm-1", {H: 1})
    claims.settled({H: 1})
    claims.node.excuse_no_plugin()
    claims.node.uninstall()
    pods.stop(claims.api, "vm-1")
    claims.node.install("dra", {"GPUACTORS_DEVICE_PLUGIN": "off"})
    assert gpu in (DEVICE_PLUGINS / "kubelet_internal_checkpoint").read_text(), (
        "kubelet has written its file since"
    )
    claims.offered(gpu)
    claims.template("one", request())
    claims.create("vm-2", from_template("one"))
    claims.runs("vm-2", gpu)
    pods.stop(claims.api, "vm-2")
    claims.nothing_is_left({gpu: "vfio-pci"})


@pytest.mark.parametrize("driver", [NVIDIA, "vfio-pci"])
def test_a_claims_life_writes_no_slice(claims: ClaimNode, driver: str) -> None:
    """Bound for it or before: what the slice says of a GPU does not change while a claim has it, so no write is needed
    at its prepare, in its life or at its end."""
    gpu = claims.host.plug(0x27, driver=driver)
    claims.offered(gpu)
    claims.settled({H: 1} if driver == "vfio-pci" else {})
    claims.template("one", request())
    before = slice_versions(claims.api)
    for name in ("vm-1", "vm-2"):
        claims.create(name, from_template("one"))
        claims.runs(name, gpu)
        claims.is_prepared(claims.uid_of(name))
        claims.settled({})
        pods.stop(claims.api, name)
        claims.nothing_is_left({gpu: driver})
        claims.offered(gpu)
    # A write may come late: nothing of the last end is still to be said when the node's own books are true again.
    claims.settled({H: 1} if driver == "vfio-pci" else {})
    assert slice_versions(claims.api) == before


@pytest.mark.long
def test_thirty_pods_after_one_another(claims: ClaimNode) -> None:
    """Two pods at a time; a GPU is bound for each and returned. Latencies are kubelet's."""
    gpus = {slot: claims.host.plug(slot, driver=NVIDIA) for slot in (0x21, 0x22)}
    claims.offered(*gpus.values())
    for slot, gpu in gpus.items():
        claims.template(f"one-{slot:x}", request(selector=by_address(gpu)))
    before = len(kubelet_calls())
    began = time.monotonic()
    running: dict[int, str] = {}
    for number, slot in enumerate((0x21, 0x22) * 15):
        if slot in running:
            claims.comes_to(running[slot], "Succeeded")
            pods.delete(claims.api, running[slot])
        running[slot] = f"vm-{number}"
        entry = from_template(f"one-{slot:x}")
        claims.create(running[slot], entry, command="ls /dev/vfio/[2-6]?")
    for name in running.values():
        claims.comes_to(name, "Succeeded")
    took_s = time.monotonic() - began
    calls = kubelet_calls()[before:]
    assert len({call.uid for call in calls}) == 30, calls
    waits = sorted(call.ended - call.began for call in calls if call.ended is not None)
    p50, p99 = (statistics.quantiles(waits, n=100, method="inclusive")[n - 1] for n in (50, 99))
    claims.node.said(
        f"30 pods in {took_s:.1f} s; prepare p50 {p50:.3f}, p99 {p99:.3f}, max {waits[-1]:.3f} s"
    )
    pods.clear(claims.api)
    claims.nothing_is_left(dict.fromkeys(gpus.values(), NVIDIA))
