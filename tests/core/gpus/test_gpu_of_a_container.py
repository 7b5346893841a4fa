"""A GPU that NVIDIA's device plugin gave to a container: kubelet's ledger names it by its UUID, long before a process
opens it, and again when none has it open."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.reports.kube_events import PodsOf, kube_events
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import (
    ClaimedDevice,
    DeviceId,
    LedgerEntry,
    LedgerFile,
    PciFunction,
    Pod,
    ResourceName,
    device_key,
)
from gpuactors.core.values.owner import gpu_uuid
from gpuactors.core.values.slices import BlockKind, BlockReason, OfferedDevice, quantity
from tests.core.builders import A, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, core_with, name

UUID = "GPU-6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"
OTHER_UUID = "GPU-00000000-93f0-4f8e-9d3a-0f5f6a1c7e21"
PLUGIN = "nvidia.com/gpu"


def on_host(uuid: str | None = UUID) -> PciFunction:
    return replace(gpu(A, 1, driver="nvidia"), gpu_uuid=uuid, memory_bytes=1 << 37)


def a_container_has(device: str = UUID, *, resource: str = PLUGIN, uuid: str | None = UUID) -> ClaimCore:
    core = ClaimCore(on_host(uuid))
    core.others = {(resource, device): "train-0"}
    core.pass_time(limits.LEDGER_QUIET_S)
    core.created(allocated(name("one"), A))
    return core


def offered(core: ClaimCore) -> OfferedDevice:
    device = core.state.offered.devices[device_key(A)]
    assert device is not None
    return device


@pytest.mark.parametrize(
    ("resource", "device"),
    [
        (PLUGIN, UUID),
        ("nvidia.com/gpu.shared", f"{UUID}::3"),
        ("nvidia.com/mig-1g.10gb", f"MIG-{UUID}/1/0"),
        ("example.com/renamed", UUID),
    ],
)
def test_a_claim_waits_for_that_pod_and_says_so(resource: str, device: str) -> None:
    core = a_container_has(device, resource=resource)
    token = core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.WAITING
    (told,) = [e.message for e in kube_events(core.state) if e.about == PodsOf(name("one"))]
    assert f"{A}: allocated to pod default/train-0 as {resource}; it is free when its pod has ended" in told
    core.pass_time(limits.CLAIM_ANSWER_S)
    refused = core.refused(token)
    assert refused.causes == (Cause.CLAIMED_ELSEWHERE,)
    assert "default/train-0" in refused.reason
    assert core.acts == []


def test_a_waiting_claim_is_woken_by_the_end_of_that_pod() -> None:
    core = a_container_has()
    token = core.prepare(name("one"))
    core.others.clear()
    core.pass_time(limits.LEDGER_S)
    assert isinstance(core.answer(token), Prepared)
    assert core.driver(A) == "vfio-pci"


def test_it_is_not_to_be_given_away_as_long_as_the_pod_lives() -> None:
    core = a_container_has()
    assert offered(core).blocked == BlockReason(BlockKind.HELD, "ClaimedElsewhere")
    core.others.clear()
    core.pass_time(limits.LEDGER_S)
    assert offered(core).blocked is None


@pytest.mark.parametrize(
    "device", [OTHER_UUID, "0", "GPU-6b8a2c14", f"{UUID}::", f"MIG-{UUID[4:]}0", f" {UUID}"]
)
def test_any_other_id_is_none_of_this_gpu(device: str) -> None:
    core = a_container_has(device)
    assert offered(core).blocked is None
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def test_a_uuid_that_the_driver_says_later_is_joined_with_the_ledger_of_before() -> None:
    """A GPU that was not started yet has question marks in its place."""
    core = a_container_has(uuid=None)
    assert offered(core).blocked == BlockReason(BlockKind.HELD, "ClaimedElsewhere"), "it may be that one"
    core.changed(on_host())
    assert offered(core).blocked == BlockReason(BlockKind.HELD, "ClaimedElsewhere")


def test_of_a_kubelet_that_does_not_run_its_file_counts() -> None:
    core = ClaimCore(on_host())
    entry = LedgerEntry(ResourceName(PLUGIN), DeviceId(UUID), Pod("", "", "uid-of-train-0"))
    core.silent = True
    core.pass_time(limits.LEDGER_QUIET_S)
    core.feed(LedgerRead(core.read, None, (), (), file=LedgerFile(entries=(entry,))))
    assert offered(core).blocked == BlockReason(BlockKind.HELD, "ClaimedElsewhere")


def test_a_claim_that_ends_gives_the_gpu_back_although_a_container_was_given_it_meanwhile() -> None:
    """Its container needs the host's driver, and cannot have had the GPU: NVIDIA's plugin does not see that it left."""
    core = ClaimCore(on_host())
    core.prepare(allocated(name("one"), A))
    core.others = {(PLUGIN, UUID): "train-0"}
    core.pass_time(limits.LEDGER_S)
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia"


def test_it_does_so_too_for_a_container_of_nvidias_claim_which_has_the_old_node_of_the_gpu() -> None:
    core = ClaimCore(replace(on_host(), host_nodes=("/dev/nvidia0",)))
    core.prepare(allocated(name("one"), A))
    core.cdi = CdiSpecs(
        (CdiSpec("/var/run/cdi/theirs.yaml", ("k8s.gpu.nvidia.com/claim=u-gpu-0",), ("/dev/nvidia0",)),)
    )
    core.strangers = (
        ClaimedDevice(
            "gpu.nvidia.com", "node", "gpu-0", "default/c-1", None, "u", ("k8s.gpu.nvidia.com/claim=u-gpu-0",)
        ),
    )
    core.pass_time(limits.LEDGER_S)
    assert (
        core.state.index.owners[device_key(A)].message(ResourceName("")) == "in use by the claim default/one"
    )
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia"


def test_the_uuid_is_known_while_the_gpu_is_on_vfio_and_not_of_its_successor() -> None:
    core = ClaimCore(on_host())
    vfio = replace(gpu(A, 1), gpu_uuid=None)
    core.changed(vfio)
    core.others = {(PLUGIN, UUID): "train-0"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Unhealthy"}
    assert core.reason(A) == f"allocated to pod default/train-0 as {PLUGIN}"
    core.others.clear()
    core.unplugged(A)
    core.changed(vfio)
    core.others = {(PLUGIN, UUID): "train-0"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Healthy"}


def test_what_the_slice_says_of_a_gpu_does_not_change_with_its_driver() -> None:
    core = core_with(on_host(), one=(A,))
    before = offered(core)
    core.prepare(name("one"))
    assert core.driver(A) == "vfio-pci"
    assert (offered(core).attributes, offered(core).capacity) == (before.attributes, before.capacity)
    # uuid5 of the address in the namespace of DNS names, as NVIDIA's driver has it (uuid.NewSHA1).
    assert before.attributes["uuid"].value == "e7af2681-d4df-538a-9cde-d6ca12d67e90"
    assert before.capacity == {"addressableMemory": "128Gi"}


def test_memory_is_written_as_kubernetes_writes_quantities() -> None:
    sizes = (0, 1000, 1024, 1536, 1 << 28, 3 << 30, 1 << 38, 1 << 60)
    assert [quantity(s) for s in sizes] == ["0", "1000", "1Ki", "1536", "256Mi", "3Gi", "256Gi", "1Ei"]


def test_the_uuid_in_an_id() -> None:
    assert gpu_uuid(UUID) == gpu_uuid(f"{UUID}::0") == gpu_uuid(f"MIG-{UUID}/7/0") == UUID
    assert [gpu_uuid(i) for i in ("", "51", str(A), UUID.upper(), f"{UUID}\n")] == [None] * 5
