"""A daemon that starts anew, takes over, or hands over while claims are under way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.outputs import ClaimsWanted, ServingWanted
from gpuactors.core.claims.restoration import gpus_by_name
from gpuactors.core.claims.view import with_claims
from gpuactors.core.events.claims import CheckpointRead, CheckpointRefused
from gpuactors.core.events.daemon import HandOverRequested, PredecessorGone, ShutdownRequested, SuccessorLost
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state.claims import ClaimedGpu, GpuReservation, StoredEntry, gpus_of
from gpuactors.core.state.gpus import GpuSettings
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimsOf, OpaqueConfig, OriginalDriver, Prepared, Target, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Elsewhere, Granted
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction, device_key
from gpuactors.core.values.prebound import OperatorsList
from tests.core.builders import SETTINGS, A, B, audio, disk, gpu, mediated_device
from tests.core.gpus.claim_core import (
    CLAIM_SETTINGS,
    ON_HOST,
    PRE_BOUND,
    ClaimCore,
    allocated,
    core_with,
    name,
)
from tests.support.mdev_files import UUID

AUDIO, DISK = "0000:01:00.1", PciAddress("0000:01:01.0")


# --- two identical GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "restart", [False, True], ids=["one daemon", "restart between prepare and unprepare"]
)
def test_of_two_identical_gpus_the_pre_bound_one_stays_and_the_other_one_is_returned(restart: bool) -> None:
    """NVIDIA issues 1099, 1089 and 1090: ids cannot decide, and what was found must outlive the daemon."""
    core = core_with(gpu(A, 1, driver="nvidia"), gpu(B, 2), one=(A,), two=(B,))
    core.prepare(name("one"))
    core.prepare(name("two"))
    assert (core.driver(A), core.driver(B)) == ("vfio-pci", "vfio-pci")
    core = core.restarted() if restart else core
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert isinstance(core.answer(core.unprepare(name("two"))), Unprepared)
    assert (core.driver(A), core.driver(B)) == ("nvidia", "vfio-pci")


def test_what_the_operator_says_overrides_both() -> None:
    settings = GpuSettings(OperatorsList(frozenset({PciAddress(A)})))
    core = ClaimCore(gpu(A, 1, driver="nvidia"), gpu(B, 2, driver="nvidia"), gpu_settings=settings)
    core.api = {"default/one": allocated(name("one"), A, B)}
    core.prepare(name("one"))
    core.unprepare(name("one"))
    assert (core.driver(A), core.driver(B)) == ("vfio-pci", "nvidia")


def test_what_the_operator_says_at_a_restart_counts_for_a_prepared_claim() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core = core.restarted(settings=GpuSettings(OperatorsList(everything=True)))
    core.unprepare(name("one"))
    assert core.driver(A) == "vfio-pci"


def test_a_companion_that_the_operator_names_stays_with_the_gpu() -> None:
    settings = GpuSettings(OperatorsList(everything=True))
    beside = "0000:01:00.1"
    core = ClaimCore(gpu(A, 1, driver="nvidia"), audio(beside, 1, driver="nvidia"), gpu_settings=settings)
    core.api = {"default/one": allocated(name("one"), A)}
    core.prepare(name("one"))
    core.unprepare(name("one"))
    assert (core.driver(A), core.driver(beside)) == ("vfio-pci", "vfio-pci")


# --- restart ------------------------------------------------------------------------------------------------------


def test_a_retry_after_our_own_bind_does_not_take_the_gpu_for_pre_bound() -> None:
    """Upstream notes the driver anew at each try."""
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"files"}
    core.prepare(name("one"))
    assert core.driver(A) == "vfio-pci"
    core = core.restarted("device")
    assert core.claim_state(name("one")) is ClaimState.BINDING, "how far the act came is not known"
    core.release("device")
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia"


def test_a_gpu_that_was_seen_on_vfio_by_our_own_bind_is_returned_after_the_next_claim_as_well() -> None:
    core = core_with(ON_HOST, one=(A,), two=(A,))
    for claim in (name("one"), name("two"), name("one")):
        core.prepare(claim)
        core.changed(*core.functions.values())
        core.unprepare(claim)
        assert core.driver(A) == "nvidia"


def test_a_prepared_claims_files_are_healed_at_the_start() -> None:
    """A running pod's container that restarts gets the CDI ids of kubelet's own checkpoint, without a call to us."""
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core = core.restarted("files")
    (act,) = core.wanted.files.values()
    assert act.claim is not None
    answer = core.prepare(name("one"))
    assert core.answer(answer) is None, "not before the files were seen"
    core.release("files")
    assert isinstance(core.answer(answer), Prepared)


def test_a_release_goes_on_after_a_restart() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.held_back = {"device"}
    core.unprepare(name("one"))
    core = core.restarted()
    assert core.driver(A) == "nvidia"
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)


def test_a_release_after_a_restart_waits_until_kubelet_has_been_asked_who_has_the_gpu() -> None:
    """The daemon was away: a pod may have got it by the device plugin meanwhile."""
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.held_back = {"device"}
    core.unprepare(name("one"))
    core.ledger[A] = "vm-1"
    core = core.restarted("ledger")
    assert core.claim_state(name("one")) is ClaimState.RELEASING
    assert (core.wanted.devices, core.acts) == ({}, [])
    core.release("ledger")
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    assert core.driver(A) == "vfio-pci"


def test_a_claim_that_waits_is_not_on_disk() -> None:
    core = core_with(ON_HOST, old=(A,), new=(A,))
    core.prepare(name("old"))
    core.prepare(name("new"))
    assert core.disk is not None
    core.unprepare(name("unknown"))
    assert [e.name for e in core.disk.entries] == [name("old")]
    assert core.restarted().claim_state(name("new")) is ClaimState.ABSENT


def test_when_the_checkpoint_is_lost_everything_on_vfio_stays() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.disk = None
    core = core.restarted()
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert core.driver(A) == "vfio-pci"
    core.prepare(name("one"))
    core.unprepare(name("one"))
    assert core.driver(A) == "vfio-pci"
    assert (Target.ORIGINAL_DRIVER, A) not in core.acts


def rebuilt(*addresses: str) -> CheckpointRead:
    """What is found out from the files of the claim `one`."""
    first = (OriginalDriver(PciAddress(a), None, vfio=True) for a in addresses)
    gpus = tuple(ClaimedGpu(device_key(f.address), (f,), "the checkpoint is lost") for f in first)
    return CheckpointRead(
        (StoredEntry(name("one"), ClaimState.PREPARED, None, GpuReservation(gpus)),),
        (),
        "it is lost",
        driver_kind=ClaimsOf.GPUS,
    )


def test_a_claim_found_out_from_its_files_has_no_device_with_admin_access() -> None:
    core = ClaimCore(gpu(A, 1))
    core.api = {
        "default/one": allocated(name("one"), A, admin=True),
        "default/two": allocated(name("two"), A),
    }
    core.feed(rebuilt(A))
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert isinstance(core.answer(core.prepare(name("two"))), Prepared)


def test_a_release_of_a_claim_found_out_from_its_files_goes_on_after_a_restart() -> None:
    """What it asks for was never read again: it is not to be bound again instead."""
    core = ClaimCore(gpu(A, 1))
    core.api = {"default/one": allocated(name("one"), A)}
    core.held_back = {"read", "files"}
    core.feed(rebuilt(A))
    core.unprepare(name("one"))
    core = core.restarted("read", "files")
    assert core.claim_state(name("one")) is ClaimState.RELEASING
    core.release("files")
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


def test_a_claim_found_out_from_its_files_that_is_not_allocated_any_more_is_not_prepared() -> None:
    core = ClaimCore(gpu(A, 1))
    core.api = {"default/one": replace(allocated(name("one"), A), results=None)}
    core.feed(rebuilt(A))
    assert "not allocated" in core.refusal(core.prepare(name("one")))
    entry = core.entry(name("one"))
    assert (core.claim_state(name("one")), entry and entry.has_files) == (ClaimState.DRIFTED, False)


def test_a_checkpoint_of_a_newer_version_is_not_touched_and_no_claim_is_served() -> None:
    core = ClaimCore()
    core.functions = {ON_HOST.address: ON_HOST}
    core.held_back = {"load"}
    core.scanned()
    core.feed(CheckpointRefused("the checkpoint is of version 7: install that version", ClaimsOf.GPUS))
    assert "version 7" in core.refusal(core.prepare(name("one")))
    assert "version 7" in core.refusal(core.unprepare(name("one")))
    assert core.wanted.disk.checkpoint is None
    assert not core.wanted.serving.is_serving


def test_the_gpu_of_a_claim_is_given_to_nobody_while_the_checkpoint_may_not_be_used() -> None:
    """Its files name it; kubelet's list may not, or not yet (issue 24)."""
    core = ClaimCore(gpu(A, 1), gpu(B, 2))
    entries = rebuilt(A).entries
    core.feed(
        CheckpointRefused(
            "the checkpoint is of version 7: install that version", entries=entries, driver_kind=ClaimsOf.GPUS
        )
    )
    assert "claim default/one" in core.refusal(core.allocate(A))
    assert isinstance(core.allocation(core.allocate(B)), Granted)
    assert core.acts == []
    core.feed(CheckpointRead((), (), load=2, driver_kind=ClaimsOf.GPUS))
    assert isinstance(core.allocation(core.allocate(A)), Granted), "the checkpoint knows of no claim"


def test_claims_that_were_known_stay_known_when_the_checkpoint_cannot_be_read_again() -> None:
    """At a hand-over it is read twice, and a claim that is being prepared has no file yet."""
    core = core_with(PRE_BOUND, gpu(B, 2), one=(B,), two=(A,))
    core.held_back = {"files"}
    core.prepare(name("two"))
    core.feed(CheckpointRefused("cannot read it", entries=rebuilt(B).entries, driver_kind=ClaimsOf.GPUS))
    assert "claim default/two" in core.refusal(core.allocate(A))
    assert "claim default/one" in core.refusal(core.allocate(B))


# --- before the checkpoint is read ----------------------------------------------------------------------------------


def not_loaded() -> ClaimCore:
    """A claim is prepared, and the daemon has just started."""
    core = core_with(PRE_BOUND, one=(A,))
    core.prepare(name("one"))
    return core.restarted("load")


def test_an_unprepare_before_the_checkpoint_is_read_is_no_success() -> None:
    """Kubelet would never ask again, and the claim keep its GPU."""
    core = not_loaded()
    assert "checkpoint" in core.refusal(core.unprepare(name("one")))
    core.release("load")
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


def test_an_allocate_before_the_checkpoint_is_read_waits_for_it() -> None:
    """It may say that the GPU belongs to a claim."""
    core = core_with(PRE_BOUND)
    core.state = with_claims(core.state, ClaimsOf.GPUS, replace(core.state.gpus.claims, loaded=False))
    core.held_back = {"load"}
    token = core.allocate(A)
    assert core.allocation(token) is None
    core.release("load")
    assert isinstance(core.allocation(token), Granted)


def test_an_allocate_is_refused_in_time_if_the_checkpoint_cannot_be_read() -> None:
    core = core_with(PRE_BOUND)
    core.state = with_claims(core.state, ClaimsOf.GPUS, replace(core.state.gpus.claims, loaded=False))
    core.held_back = {"load"}
    token = core.allocate(A)
    core.pass_time(limits.CALL_DEADLINE_S)
    assert "checkpoint" in core.refusal(token)


# --- hand-over --------------------------------------------------------------------------------------------------------


def taking_over(*functions: PciFunction, **claims: tuple[str, ...]) -> tuple[ClaimCore, ClaimCore]:
    """The daemon that serves, and the one that is about to take over."""
    before = core_with(*functions, **claims)
    after = ClaimCore(settings=replace(SETTINGS, hand_over=True))
    after.functions, after.api, after.at = before.functions, before.api, before.at
    after.disk = before.disk
    after.scanned()
    return before, after


def test_after_a_hand_over_the_checkpoint_is_read_again() -> None:
    before, after = taking_over(ON_HOST, one=(A,))
    before.prepare(name("one"))
    before.feed(HandOverRequested())
    assert not before.wanted.devices
    assert not before.wanted.files
    after.disk = before.disk
    after.feed(PredecessorGone("it handed over"))
    assert after.claim_state(name("one")) is ClaimState.PREPARED
    assert isinstance(after.answer(after.prepare(name("one"))), Prepared)
    after.unprepare(name("one"))
    assert after.driver(A) == "nvidia"


def test_a_daemon_that_takes_over_does_not_touch_what_its_predecessor_is_doing() -> None:
    before = core_with(ON_HOST, one=(A,))
    before.held_back = {"device"}
    before.prepare(name("one"))
    after = ClaimCore(settings=replace(SETTINGS, hand_over=True), disk=before.disk)
    after.functions = before.functions
    after.scanned()
    assert after.claim_state(name("one")) is ClaimState.BINDING
    assert not after.wanted.devices
    after.feed(PredecessorGone("it handed over"))
    assert after.driver(A) == "vfio-pci"


def test_a_gpu_that_the_predecessor_bound_is_not_taken_for_pre_bound() -> None:
    before, after = taking_over(ON_HOST, one=(A,))
    before.prepare(name("one"))
    after.changed(*before.functions.values())
    after.disk = before.disk
    after.feed(PredecessorGone("it handed over"))
    after.unprepare(name("one"))
    assert after.driver(A) == "nvidia"


def test_calls_that_wait_are_refused_at_a_hand_over() -> None:
    """Kubelet asks the successor; without an answer only after its 45 s, and 60 to 90 s more."""
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.held_back = {"device", "read"}
    unprepare, prepare = core.unprepare(name("one")), core.prepare(name("two"))
    core.feed(HandOverRequested())
    assert "handing over" in core.refusal(unprepare)
    assert "handing over" in core.refusal(prepare)


SIDE_BY_SIDE = replace(CLAIM_SETTINGS, side_by_side=True)


def side_by_side(*functions: PciFunction, **claims: tuple[str, ...]) -> ClaimCore:
    """A daemon whose successor has sockets beside its own."""
    core = core_with(*functions, **claims)
    core.state = with_claims(
        core.state, ClaimsOf.GPUS, replace(core.state.gpus.claims, settings=SIDE_BY_SIDE)
    )
    return core


def test_calls_that_wait_are_passed_on_at_a_hand_over_to_a_successor_beside_us() -> None:
    core = side_by_side(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.held_back = {"device", "read"}
    unprepare, prepare = core.unprepare(name("one")), core.prepare(name("two"))
    core.feed(HandOverRequested())
    assert core.answer(unprepare) == core.answer(prepare) == Elsewhere()
    assert not core.wanted.devices


def test_after_a_hand_over_calls_are_passed_on_until_kubelet_knows_the_successor() -> None:
    """The sockets stay that long, and the health stream says the same as the successor's."""
    core = side_by_side(ON_HOST, one=(A,))
    core.prepare(name("one"))
    health = core.wanted.health
    core.feed(HandOverRequested())
    wanted = core.wanted
    assert (wanted.serving.is_serving, wanted.health) == (True, health)
    assert health
    assert core.answer(core.prepare(name("one"))) == Elsewhere()
    core.pass_time(limits.RELAY_S)
    assert core.wanted == ClaimsWanted(ServingWanted(drain_s=limits.CLAIM_CALL_S))
    assert core.answer(core.prepare(name("one"))) == Elsewhere(), (
        "in the hands of a socket that is being closed"
    )


def test_a_daemon_that_is_told_to_stop_after_a_hand_over_passes_calls_on_to_the_end() -> None:
    core = side_by_side(ON_HOST, one=(A,))
    core.feed(HandOverRequested())
    core.feed(ShutdownRequested())
    assert core.wanted.serving.is_serving
    assert core.answer(core.prepare(name("one"))) == Elsewhere()


def test_a_daemon_that_serves_again_soon_keeps_its_sockets_and_answers_by_itself() -> None:
    core = side_by_side(ON_HOST, one=(A,))
    core.feed(HandOverRequested())
    core.held_back = {"load"}
    core.feed(SuccessorLost())
    assert core.wanted.serving.is_serving
    core.feed(PredecessorGone("none"))
    assert core.wanted.serving.is_serving
    assert core.answer(core.prepare(name("one"))) == Elsewhere(), "it is held until the checkpoint is read"
    core.release("load")
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def test_a_daemon_whose_successor_was_lost_reads_the_checkpoint_again() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.feed(HandOverRequested())
    core.feed(SuccessorLost(), PredecessorGone("there is none"))
    assert core.wanted.disk.load == 2
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia"


def test_an_earlier_read_of_the_checkpoint_does_not_count_after_the_hand_over() -> None:
    """It was begun while the predecessor wrote."""
    before, after = taking_over(ON_HOST, one=(A,))
    after.held_back = {"load"}
    before.prepare(name("one"))
    after.feed(PredecessorGone("it handed over"))
    after.feed(CheckpointRead(load=1, driver_kind=ClaimsOf.GPUS))
    assert not after.wanted.serving.is_serving
    after.disk = before.disk
    after.release("load")
    assert after.claim_state(name("one")) is ClaimState.PREPARED


# --- companions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci"], ids=["GPU on its host driver", "GPU pre-bound"])
def test_a_companion_is_bound_along_and_returned_to_its_own_driver(driver: str, restart: bool) -> None:
    """Upstream leaves the audio function without a driver for ever."""
    core = core_with(gpu(A, 1, driver=driver), audio(AUDIO, 1, driver="snd_hda_intel"), one=(A,))
    core.prepare(name("one"))
    assert (core.driver(A), core.driver(AUDIO)) == ("vfio-pci", "vfio-pci")
    core = core.restarted() if restart else core
    core.unprepare(name("one"))
    assert (core.driver(A), core.driver(AUDIO)) == (driver, "snd_hda_intel")


def test_a_companion_without_a_driver_is_returned_to_none() -> None:
    core = core_with(gpu(A, 1, driver="nvidia"), audio(AUDIO, 1, driver=None), one=(A,))
    core.prepare(name("one"))
    assert core.driver(AUDIO) == "vfio-pci"
    core.unprepare(name("one"))
    assert core.driver(AUDIO) is None


def test_a_gpu_without_a_driver_is_claimed_and_returned_to_none() -> None:
    core = core_with(gpu(A, 1, driver=None), one=(A,))
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    core.unprepare(name("one"))
    assert core.driver(A) is None


# --- a function of the host in the group --------------------------------------------------------------------------


def test_a_prepared_claim_is_not_prepared_again_while_the_host_uses_its_group() -> None:
    """Found by histories: kubelet had not waited for the first answer, and a disk came before it asked again."""
    core = core_with(gpu(A, 1), one=(A,))
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    core.changed(disk(DISK, 1))
    assert core.refused(core.prepare(name("one"))).causes == (Cause.GROUP_NOT_VIABLE,)
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    core.unplugged(DISK)
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


# --- files that nobody can place any more -------------------------------------------------------------------------


INVALID = OpaqueConfig(False, (), {"apiVersion": "gpuactors.io/v1", "kind": "Unknown"})
ANSWERS = {
    "it has no such claim": None,
    "it is not allocated": replace(allocated(name("one")), results=None),
    "its configuration is invalid": replace(allocated(name("one")), configs=(INVALID,)),
    "it is there": allocated(name("one")),
}


def found_out(device: DeviceKey, answer: str, *mediated: MediatedDevice) -> ClaimCore:
    """A daemon that starts without its checkpoint, beside the files of the claim `one`. Its device may have got another
    group while no daemon ran."""
    core = ClaimCore(gpu(A, 22, driver="nvidia" if mediated else "vfio-pci"))
    core.made(*mediated)
    core.listed(name("one"), device)
    if (claim := ANSWERS[answer]) is not None:
        own = allocated(name("one"), device)
        core.api = {"default/one": replace(claim, results=own.results if claim.results is not None else None)}
    gpus = GpuReservation(gpus_by_name([slice_name(device)]))
    entry = StoredEntry(name("one"), ClaimState.PREPARED, None, gpus)
    core.feed(CheckpointRead((entry,), (), "it is lost", driver_kind=ClaimsOf.GPUS))
    return core


@pytest.mark.parametrize("is_mediated", [False, True], ids=["function", "mediated device"])
@pytest.mark.parametrize("answer", [a for a in ANSWERS if a != "it is there"])
def test_files_of_a_claim_without_a_checkpoint_are_removed_if_it_cannot_be_prepared(
    answer: str, is_mediated: bool
) -> None:
    """The number in its files may be the next tenant's. Found by histories. It keeps its device, as kubelet lists it,
    and its files come back with the claim."""
    half = mediated_device(DeviceKey(UUID), 70, PciAddress(A), "NVIDIA A40-8Q")
    device = half.key if is_mediated else device_key(A)
    core = found_out(device, answer, *([half] if is_mediated else []))
    entry = core.entry(name("one"))
    assert (core.claim_state(name("one")), entry and entry.has_files) == (ClaimState.DRIFTED, False)
    assert "default/one" in core.state.index.owners[device].name
    core.pass_time(2 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.DRIFTED
    core.api = {"default/one": allocated(name("one"), device)}
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)


def test_files_stay_while_the_api_server_cannot_say_whether_the_claim_exists() -> None:
    core = ClaimCore(gpu(A, 22))
    core.held_back = {"read"}
    core.feed(rebuilt(A))
    core.pass_time(2 * limits.CLAIM_COLLECT_S)
    entry = core.entry(name("one"))
    assert (core.claim_state(name("one")), entry and entry.has_files) == (ClaimState.STOPPED, True)


def test_the_files_of_a_claim_whose_device_is_gone_come_back_with_it() -> None:
    core = found_out(device_key(B), "it is there")
    assert core.claim_state(name("one")) is ClaimState.DRIFTED
    core.changed(gpu(B, 23))
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_mediated_device_without_a_checkpoint_gets_files_with_its_present_group() -> None:
    half = mediated_device(DeviceKey(UUID), 70, PciAddress(A), "NVIDIA A40-8Q")
    core = found_out(half.key, "it is there", half)
    entry = core.entry(name("one"))
    assert entry is not None
    assert entry.state is ClaimState.PREPARED
    assert [gpu.group for gpu in gpus_of(entry).gpus] == [70]
