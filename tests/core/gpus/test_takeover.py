"""Claims of GPUs that NVIDIA's driver has prepared: their GPU is not given away, and stays where it is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.gpus.offer import offered
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state.claims import ClaimedGpu, GpuReservation, StoredEntry
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.core.values.claim import (
    AllocatedDevice,
    Claim,
    ClaimName,
    OriginalDriver,
    Prepared,
    PreparedDevice,
    Unprepared,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import ClaimedDevice, DeviceId, DeviceKey, Health, PciAddress, Pod, Token
from gpuactors.core.values.slices import BlockKind
from tests.core.builders import A, gpu
from tests.core.gpus.claim_core import DRIVER, ON_HOST, POOL, ClaimCore, allocated, name

OLD, NEW, LATER = name("old"), name("new"), name("later")
LISTED = (ClaimedDevice(DRIVER, POOL, "gpu-vfio-0", "default/old", Pod("default", "vm", "")),)
STAYS = "NVIDIA's DRA driver has prepared it: its driver stays as it is"


def theirs(*addresses: str, device: str = "gpu-vfio-0", unplaced: tuple[str, ...] = ()) -> StoredEntry:
    """A claim as it is in NVIDIA's checkpoint, without its name."""
    unnamed = ClaimName("", "", OLD.uid)
    gpus = tuple(
        ClaimedGpu(DeviceKey(a), (OriginalDriver(PciAddress(a), None, vfio=True),), STAYS) for a in addresses
    )
    given = (PreparedDevice(("gpu",), POOL, device, (f"k8s.gpu.nvidia.com/claim={OLD.uid}-{device}",)),)
    claim = Claim(unnamed, None, 0, (AllocatedDevice("gpu", POOL, device),))
    return StoredEntry(
        unnamed, ClaimState.TAKEN_OVER, claim, GpuReservation(gpus), given=given, unplaced=unplaced
    )


@pytest.fixture(params=["vfio-pci", "nvidia"])
def core(request: pytest.FixtureRequest) -> ClaimCore:
    """A daemon starts where NVIDIA's driver has prepared A: for a virtual machine, or for a container."""
    return taken_over(theirs(A), driver=request.param)


def taken_over(*entries: StoredEntry, driver: str = "nvidia") -> ClaimCore:
    function = replace(ON_HOST, driver=driver, vfio_bound=driver == "vfio-pci")
    core = ClaimCore(function, disk=CheckpointWanted(1, entries, ()))
    core.strangers = LISTED
    core.api = {str(NEW): allocated(NEW, A)}
    core.pass_time(30)
    return core


def prepared_in_vain(core: ClaimCore, why: str, claim: ClaimName = NEW) -> Token:
    """A prepare of the new claim, which waits for this reason."""
    token = core.prepare(claim)
    core.pass_time(5)
    assert core.answer(token) is None
    assert why in core.problem(claim)
    return token


def test_its_gpu_is_given_to_no_other_claim_nor_by_the_device_plugin(core: ClaimCore) -> None:
    prepared_in_vain(core, "it belongs, by NVIDIA's driver, to the claim default/old")
    devices = {d.id: d.health for of in core.state.published.device_lists.values() for d in of}
    assert devices.get(DeviceId(A)) is not Health.HEALTHY
    assert core.acts == []


def test_the_scheduler_is_told_as_it_knows_the_gpu_by_another_name(core: ClaimCore) -> None:
    offer = offered(core.state).offered.offer
    assert offer is not None
    (device,) = offer.devices
    assert device.name == slice_name(DeviceKey(A))
    assert device.blocked is not None
    assert (device.blocked.kind, device.claimed) == (BlockKind.HELD, False)


def test_a_repeated_prepare_is_answered_as_nvidias_driver_did_and_touches_nothing(core: ClaimCore) -> None:
    assert core.answer(core.prepare(OLD)) == Prepared(theirs(A).given)
    assert core.claim_state(OLD) is ClaimState.TAKEN_OVER
    assert core.acts == []


def test_a_claim_that_kubelet_lists_by_two_names_keeps_the_one_of_neither() -> None:
    """Two claims share the device (or one is another driver's leavings): a wrong name would be looked up, found to be
    gone, and a GPU that is in use would be released."""
    core = ClaimCore(ON_HOST, disk=CheckpointWanted(1, (theirs(A),), ()))
    core.strangers = (*LISTED, replace(LISTED[0], claim="default/another"))
    core.pass_time(600)
    assert not core.state.gpus.claims.entries[OLD.uid].name.is_known
    assert core.claim_state(OLD) is ClaimState.TAKEN_OVER


def test_when_it_is_unprepared_its_gpu_stays_on_its_driver_and_is_free(core: ClaimCore) -> None:
    before = core.driver(A)
    token = core.prepare(NEW)
    assert core.answer(core.unprepare(OLD)) == Unprepared()
    assert core.claim_state(OLD) is ClaimState.TOMBSTONE
    core.strangers = ()
    core.pass_time(10)
    assert isinstance(core.answer(token), Prepared), "the next claim gets it"
    if before == "vfio-pci":
        assert core.acts == [] or core.driver(A) == before


def test_a_restart_and_an_hour_change_nothing_while_kubelet_lists_it(core: ClaimCore) -> None:
    core.prepare(OLD)
    after = core.restarted()
    after.strangers = LISTED
    after.pass_time(3600)
    assert after.claim_state(OLD) is ClaimState.TAKEN_OVER
    assert str(after.state.gpus.claims.entries[OLD.uid].name) == "default/old"


def test_of_a_gpu_whose_place_nobody_says_no_gpu_is_given_to_a_claim() -> None:
    core = taken_over(theirs(unplaced=("gpu-vfio-0",)))
    token = prepared_in_vain(core, "nothing says which GPU")
    core.unprepare(OLD)
    assert isinstance(core.answer(token), Prepared)


def test_a_gpu_that_kubelet_lists_by_another_drivers_name_for_an_unknown_claim_is_not_given_away() -> None:
    core = taken_over()
    token = prepared_in_vain(core, "kubelet lists gpu-vfio-0 of gpu.nvidia.com for it, no CDI device")
    core.strangers = ()
    core.pass_time(40)
    assert isinstance(core.answer(token), Prepared)


# --- by the UID -------------------------------------------------------------------------------------------


def listed_with_uid(claim: ClaimName, device: str) -> ClaimedDevice:
    ids = (f"k8s.{DRIVER}/claim={claim.uid}-{device}",)
    return ClaimedDevice(DRIVER, POOL, device, str(claim), Pod("default", claim.name, ""), claim.uid, ids)


def unnamed(claim: ClaimName, entry: StoredEntry) -> StoredEntry:
    name_ = ClaimName("", "", claim.uid)
    assert entry.claim is not None
    return replace(entry, name=name_, claim=replace(entry.claim, name=name_))


def test_two_sharers_of_a_gpu_and_an_admin_block_no_other_claim() -> None:
    """Their completed claims have no name in the checkpoint, and one device: the UID decides."""
    sharer, admin = name("sharer"), name("admin")
    watching = replace(
        unnamed(admin, theirs()),
        claim=Claim(admin, None, 0, (AllocatedDevice("gpu", POOL, "gpu-vfio-0", admin_access=True),)),
    )
    function, other = replace(ON_HOST, driver="nvidia", vfio_bound=False), gpu("0000:02:00.0", 2)
    core = ClaimCore(
        function, other, disk=CheckpointWanted(1, (theirs(A), unnamed(sharer, theirs(A)), watching), ())
    )
    core.strangers = tuple(listed_with_uid(claim, "gpu-vfio-0") for claim in (OLD, sharer, admin))
    core.api = {str(NEW): allocated(NEW, other.address)}
    core.pass_time(30)
    names = {uid: str(e.name) for uid, e in core.state.gpus.claims.entries.items()}
    assert names == {c.uid: str(c) for c in (OLD, sharer, admin)}
    assert isinstance(core.answer(core.prepare(NEW)), Prepared)


def test_a_claim_of_nvidias_that_is_in_no_checkpoint_costs_its_own_gpu_alone() -> None:
    function, other = replace(ON_HOST, driver="vfio-pci", vfio_bound=True), gpu("0000:02:00.0", 2)
    core = ClaimCore(function, other)
    core.strangers = (listed_with_uid(OLD, "gpu-vfio-0"),)
    group = f"/dev/vfio/{function.iommu_group}"
    core.cdi = CdiSpecs((CdiSpec("/var/run/cdi/x.yaml", core.strangers[0].cdi_ids, (group,)),))
    core.api = {str(NEW): allocated(NEW, other.address), str(LATER): allocated(LATER, A)}
    core.pass_time(30)
    assert isinstance(core.answer(core.prepare(NEW)), Prepared)
    prepared_in_vain(core, "in use by the claim default/old of pod default/old", LATER)


@pytest.mark.parametrize("device", ["gpu-vfio-2", "gpu-1", "gpu-0-mig-1g24gb-19-0"])
def test_a_claim_that_is_allocated_by_nvidias_names_is_refused_with_what_to_do(device: str) -> None:
    """Its prepare had not ended, or the node has started again since."""
    core = ClaimCore(ON_HOST)
    core.api = {str(NEW): Claim(NEW, None, 1, (AllocatedDevice("gpu", POOL, device),))}
    refused = core.refusal(core.prepare(NEW))
    assert refused.startswith(
        f"{device} is a name by NVIDIA's DRA driver, which served this node when the claim"
    )
    assert "delete the pod, and the claim as well if no template made it" in refused


def test_another_name_is_no_device_of_this_driver() -> None:
    core = ClaimCore(ON_HOST)
    core.api = {str(NEW): Claim(NEW, None, 1, (AllocatedDevice("gpu", POOL, "nic-0"),))}
    assert core.refusal(core.prepare(NEW)) == "nic-0 is no device of this driver"
