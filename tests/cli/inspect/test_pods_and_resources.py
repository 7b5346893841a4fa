"""`gpuactors explain NAMESPACE/POD` and `explain RESOURCE`, and how the owner of a GPU is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors.cli.inspect.report import explained_json, explained_text
from gpuactors.cli.inspect.view import (
    ExplainedClaim,
    ExplainedPod,
    ExplainedResource,
    Inspected,
    UnknownAddressError,
    explain_in,
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


def test_a_name_needs_no_namespace_where_one_thing_has_it(core: Core) -> None:
    found = explain_in(by_daemon(core), "vm-1")
    assert isinstance(found, ExplainedPod)
    assert str(found.pod) == "default/vm-1"
    with pytest.raises(UnknownAddressError) as caught:
        explain_in(by_daemon(core), "vm-2")
    assert str(caught.value) == (
        "nothing on this node is called vm-2: no GPU, resource, claim, ComputeDomain, pod or virtual machine; "
        f"there are the pod default/vm-1; the GPUs are at {A}, {B}, {C}"
    )


def test_a_name_of_two_namespaces_is_asked_for(core: Core) -> None:
    view = by_daemon(core).view
    other = replace(view.pods[0], name="other/vm-1")
    found = replace(by_daemon(core), view=replace(view, pods=(*view.pods, other)))
    with pytest.raises(
        UnknownAddressError, match=r"several namespaces: say which of default/vm-1, other/vm-1$"
    ):
        explain_in(found, "vm-1")


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


# --- virtual machines -------------------------------------------------------------------------------------

LAUNCHER, OTHER = "virt-launcher-db-x7k2p", "virt-launcher-db-b2c4d"


def of_vm(core: Core | ClaimCore) -> Core | ClaimCore:
    """A GPU of the virtual machine default/db."""
    core.ledger[A] = LAUNCHER
    core.pass_time(60)
    return core


@pytest.mark.parametrize("words", ["default/db", "vm/default/db", "db", " db ", f"default/{LAUNCHER}"])
def test_a_virtual_machine_is_explained_as_its_pod(words: str) -> None:
    found = by_daemon(of_vm(Core(gpu("23:00.0", 1))))
    explained = explain_in(found, words)
    text, known = explained_text(explained).splitlines(), json.loads(explained_json(explained))
    assert text[0] == f"Pod default/{LAUNCHER}"
    assert text[3:5] == [
        "VM           default/db",
        f"GPU          {A}, GH100 [H100 SXM5 80GB], {H100}",
    ]
    assert (known["pod"], known["vm"]) == (f"default/{LAUNCHER}", "default/db")
    assert [device["vm"] for device in known["devices"]] == ["default/db"]


def test_a_gpu_names_the_virtual_machine_and_a_pod_that_is_none_has_no_line(core: Core) -> None:
    core.ledger[B] = LAUNCHER
    core.pass_time(60)
    found = by_daemon(core)
    assert "VM            default/db" in explained_text(explain_in(found, B))
    assert json.loads(explained_json(explain_in(found, B)))["vm"] == "default/db"
    for words in (A, "default/vm-1"):
        assert "VM " not in explained_text(explain_in(found, words))
        assert json.loads(explained_json(explain_in(found, words)))["vm"] is None


@pytest.mark.parametrize("words", ["default/dc", "other/db", "vm/default/dc", "vm/db", "dc", "vm/other/db"])
def test_another_virtual_machine_is_not_known(words: str) -> None:
    with pytest.raises(
        UnknownAddressError, match=r"the virtual machine default/db$|nothing on this node is called dc: "
    ):
        explain_in(by_daemon(of_vm(Core(gpu("23:00.0", 1)))), words)


def test_a_virtual_machine_whose_name_is_cut_is_found_by_its_whole_name() -> None:
    core, machine = Core(gpu("23:00.0", 1)), "x" * 50
    core.ledger[A] = f"virt-launcher-{machine}-"[:58] + "x7k2p"
    core.pass_time(60)
    explained = explain_in(by_daemon(core), f"default/{machine}")
    assert isinstance(explained, ExplainedPod)
    assert (explained.pod.name, explained.pod.vm) == (f"default/{core.ledger[A]}", "")


def test_a_virtual_machine_that_has_started_again_is_its_new_pod() -> None:
    """The former one has left kubelet's ledger, and its process still holds a GPU."""
    core = Core(gpu("23:00.0", 1), gpu("24:00.0", 2))
    core.holders[1] = (Holder(4711, "qemu-kvm", None),)
    of_vm(core)
    del core.ledger[A]
    core.ledger[B] = OTHER
    core.pass_time(10)
    found = by_daemon(core)
    former = next(pod for pod in found.view.pods if pod.left)
    assert (former.name, former.vm) == (f"default/{LAUNCHER}", "default/db")
    assert {d.address: d.vm for d in found.view.devices} == {A: None, B: "default/db"}
    explained = explain_in(found, "default/db")
    assert isinstance(explained, ExplainedPod)
    assert explained.pod.name == f"default/{OTHER}"


def test_two_pods_of_a_virtual_machine_that_have_gpus_are_named() -> None:
    core = Core(gpu("23:00.0", 1), gpu("24:00.0", 2))
    core.ledger[B] = OTHER
    found = by_daemon(of_vm(core))
    told = f"db is the virtual machine of 2 pods: run gpuactors explain pod/default/{OTHER} or gpuactors explain pod/"
    for words in ("default/db", "db"):
        with pytest.raises(UnknownAddressError, match=told):
            explain_in(found, words)


def test_a_claim_and_a_virtual_machine_of_one_name_can_each_be_explained() -> None:
    core = ClaimCore(gpu(A, group=1), gpu(B, group=2))
    core.prepare(allocated(name("db"), B))
    found = by_daemon(of_vm(core))
    with pytest.raises(UnknownAddressError, match=r"explain uid-db, or gpuactors explain vm/default/db$"):
        explain_in(found, "default/db")
    assert isinstance(explain_in(found, "uid-db"), ExplainedClaim)
    assert isinstance(explain_in(found, "vm/default/db"), ExplainedPod)


def test_a_gpu_that_a_virtual_machine_has_by_a_claim_names_it() -> None:
    core, claim = ClaimCore(gpu(A, group=1)), name(LAUNCHER)  # the name of its pod, here
    core.prepare(allocated(claim, A))
    core.pass_time(60)
    assert [d.vm for d in by_daemon(core).view.devices] == [None], "kubelet has not named the pod"
    core.listed(claim, A)
    core.pass_time(60)
    assert [d.vm for d in by_daemon(core).view.devices] == ["default/db"]
