"""`gpuactors explain NAMESPACE/POD` and `explain RESOURCE`, and how the owner of a GPU is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gpuactors.cli.inspect.report import explained_json, explained_text
from gpuactors.cli.inspect.view import (
    ExplainedClaim,
    ExplainedPod,
    ExplainedResource,
    Inspected,
    UnknownAddressError,
    find_named,
)
from gpuactors.control.node_view import view_of
from gpuactors.core.values.model import ClaimedDevice, DeviceId, Holder, Pod, PodClaim, ResourceName
from gpuactors.core.values.owner import Allocation, owner_of
from tests.core.builders import Core, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name

H100 = "nvidia.com/GH100_H100_SXM5_80GB"
A, B, C = "0000:23:00.0", "0000:24:00.0", "0000:25:00.0"


@pytest.fixture
def core() -> Core:
    """Two GPUs of vm-1, one is free."""
    core = Core(gpu("23:00.0", 1), gpu("24:00.0", 2), gpu("25:00.0", 3))
    core.ledger[A] = core.ledger[B] = "vm-1"
    core.pass_time(60)
    return core


def by_daemon(core: Core | ClaimCore) -> Inspected:
    return Inspected(view_of(core.state, core.at), True, "the running daemon", node="gpu-17", wall=1e9)


def text_and_json(found: Inspected, words: str) -> tuple[list[str], Mapping[str, Any]]:
    named = find_named(found, words)
    assert named is not None
    return explained_text(named).splitlines(), json.loads(explained_json(named))


def test_a_pod_is_explained_by_its_name(core: Core) -> None:
    text, known = text_and_json(by_daemon(core), "default/vm-1")
    assert text[:7] == [
        "Pod default/vm-1",
        "has 2 GPUs by kubelet's ledger",
        "",
        f"GPU          {A}, GH100 [H100 SXM5 80GB], {H100}",
        "               Healthy: allocated to pod default/vm-1",
        f"             {B}, GH100 [H100 SXM5 80GB], {H100}",
        "               Healthy: allocated to pod default/vm-1",
    ]
    assert text[-2:] == ["Node         gpu-17", "Seen by      the running daemon"]
    assert (known["pod"], [d["address"] for d in known["devices"]]) == ("default/vm-1", [A, B])
    assert (known["left"], known["claims"], known["source"]) == ([], [], "daemon")


def test_a_pod_that_left_its_gpu_behind_is_explained(core: Core) -> None:
    core.holders[1] = (Holder(4711, "qemu-system-x86", None),)
    core.pass_time(10)
    del core.ledger[A]
    core.pass_time(10)
    text, known = text_and_json(by_daemon(core), "default/vm-1")
    assert text[1] == ("has 1 GPU by kubelet's ledger; it has left kubelet's ledger and may still hold 1 GPU")
    assert [d["address"] for d in known["left"]] == [A]


def test_a_resource_is_explained_by_its_name_with_or_without_the_domain(core: Core) -> None:
    found = by_daemon(core)
    text, known = text_and_json(found, H100)
    assert (text, known) == text_and_json(found, "GH100_H100_SXM5_80GB")
    assert text[0] == H100
    assert text[1].startswith("3 listed, 3 Healthy, 2 allocated, 1 free; not registered with kubelet: ")
    assert text[3:8] == [
        "Model        GH100 [H100 SXM5 80GB] (10de:2330)",
        f"GPU          {A}, Healthy: allocated to pod default/vm-1",
        f"             {B}, Healthy: allocated to pod default/vm-1",
        f"             {C}, Healthy: free",
        f"Pod          default/vm-1: {A}, {B}",
    ]
    assert (known["name"], known["free"], known["pods"]) == (H100, 1, {"default/vm-1": [A, B]})
    assert [device["owner"] for device in known["devices"]] == ["default/vm-1", "default/vm-1", None]


def test_a_name_that_nothing_has(core: Core) -> None:
    found = by_daemon(core)
    with pytest.raises(UnknownAddressError, match=r"called default/vm-2; it knows the pod default/vm-1$"):
        find_named(found, "default/vm-2")
    with pytest.raises(UnknownAddressError, match=f"has the resource nvidia.com/H200; there are {H100}$"):
        find_named(found, "nvidia.com/H200")


def test_a_claim_and_a_pod_of_one_name_can_each_be_explained() -> None:
    core = ClaimCore(gpu(A, group=1), gpu(B, group=2))
    core.prepare(allocated(name("one"), A))
    core.ledger[B] = "one"
    core.pass_time(60)
    found = by_daemon(core)
    with pytest.raises(
        UnknownAddressError,
        match=r"a claim and a pod: run gpuactors explain uid-one, or gpuactors explain pod/default/one$",
    ):
        find_named(found, "default/one")
    assert isinstance(find_named(found, "uid-one"), ExplainedClaim)
    pod = find_named(found, "pod/default/one")
    assert isinstance(pod, ExplainedPod)
    assert pod.pod.devices == (B,)
    assert isinstance(find_named(found, H100), ExplainedResource)


def test_a_pod_whose_claim_waits_is_explained() -> None:
    core = ClaimCore(gpu(A, group=1), gpu(B, group=2))
    core.ledger[A] = "vm-1"
    core.created(allocated(name("one"), A))
    core.waiting = tuple(PodClaim(f"default/{claim}", Pod("default", "vm-2", "")) for claim in ("nic", "one"))
    core.strangers = (
        ClaimedDevice("nic.example", "node", "eth0", "default/other", Pod("default", "vm-3", "")),
    )
    core.pass_time(60)
    core.prepare(name("one"))
    core.pass_time(10)
    found = by_daemon(core)
    text, known = text_and_json(found, "default/vm-2")
    assert text[:2] == ["Pod default/vm-2", "has no GPU by kubelet's ledger, and 2 claims"]
    assert text[3].startswith("Claim        default/nic: not known here; ")
    assert text[4] == "             default/one: Waiting for 10 s"
    assert A in text[5]
    assert (known["devices"], known["left"], known["claims"]) == ([], [], ["default/nic", "default/one"])
    with pytest.raises(UnknownAddressError, match="called default/vm-3"):
        find_named(found, "default/vm-3")


@pytest.mark.parametrize(
    ("to", "owner"),
    [
        (Pod("default", "vm-1", ""), "default/vm-1"),
        (Pod("", "", "1234"), "the pod with UID 1234"),
        (ClaimedDevice("d", "p", "gpu-0", "default/c", Pod("default", "vm-1", "")), "default/vm-1"),
        (ClaimedDevice("d", "p", "gpu-0", "default/c", None), "claim default/c"),
        (None, "a pod that kubelet does not list yet"),
    ],
)
def test_the_owner_is_a_name(to: Pod | ClaimedDevice | None, owner: str) -> None:
    entry = Allocation(ResourceName(H100), DeviceId(A), to)
    assert owner_of([entry]).name == owner_of([entry, entry]).name == owner
