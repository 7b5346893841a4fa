"""A GPU that no claim could bind is not offered: it is looked at before one is allocated, and again until one could."""

from __future__ import annotations

import pytest

from gpuactors.core.events.claims import ActDone, ActFailed, FitnessChecked
from gpuactors.core.gpus.fitness import FITNESS_CHECK_S, FITNESS_RETRY_S
from gpuactors.core.values.claim import ActFault, ClaimsOf, FitnessFinding, Prepared
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction, device_key
from gpuactors.core.values.slices import BlockKind, BlockReason
from tests.core.builders import A, B, gpu
from tests.core.gpus.claim_core import ON_HOST, PRE_BOUND, ClaimCore, core_with, name, on_driver

ONE, TWO = name("one"), name("two")
GPU = PciAddress(A)
OTHER = gpu(B, 2, driver="nvidia")


def core_of(function: PciFunction = ON_HOST) -> ClaimCore:
    core = core_with(function, one=(A,), two=(A,))
    core.pass_time(1)
    return core


def looked(core: ClaimCore, fault: ActFault | None = None, reason: str = "no") -> None:
    """The look that is outstanding comes back, with this finding for the first GPU."""
    look = core.wanted.fitness_check
    assert look is not None
    faults = {} if fault is None else {device_key(GPU): (fault, reason)}
    core.feed(FitnessChecked(look.number, tuple(FitnessFinding(d, *faults.get(d, ())) for d in look.devices)))


def looked_at(core: ClaimCore) -> list[str]:
    """The GPUs of the look that is outstanding."""
    return sorted(core.wanted.fitness_check.devices) if core.wanted.fitness_check is not None else []


def blocked(core: ClaimCore) -> BlockReason | None:
    offer = core.state.offered.offer
    assert offer is not None
    (device,) = offer.devices
    return device.blocked


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (ActFault.NO_DRIVER, BlockReason(BlockKind.UNHEALTHY, "DriverNotLoaded")),
        (ActFault.IN_USE, BlockReason(BlockKind.HELD, "InUseOnHost")),
        (ActFault.VIRTUAL_FUNCTIONS, BlockReason(BlockKind.UNHEALTHY, "VirtualFunctions")),
    ],
)
def test_a_gpu_that_no_claim_could_bind_is_not_offered_until_one_could(
    fault: ActFault, why: BlockReason
) -> None:
    core = core_of()
    looked(core, fault)
    assert blocked(core) == why
    core.pass_time(FITNESS_RETRY_S)
    looked(core, fault, "still not")
    assert blocked(core) == why
    core.pass_time(FITNESS_RETRY_S)
    looked(core)
    assert blocked(core) is None
    (said,) = core.logged("device.unclaimable")[:1]
    assert said.fields["reason"] == "no"
    assert len(core.logged("device.claimable")) == 1


def test_it_is_looked_at_again_now_and_then_while_one_could() -> None:
    core = core_of()
    looked(core)
    assert core.wanted.fitness_check is None
    core.pass_time(FITNESS_CHECK_S)
    looked(core, ActFault.IN_USE)
    assert blocked(core) is not None


def test_what_a_claims_own_act_has_met_counts_when_the_claim_is_gone() -> None:
    """Else the next claim is allocated to it at once."""
    core = core_of()
    looked(core)
    core.held_back = {"device"}
    core.prepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "process 99 has it open", ActFault.IN_USE, driver_kind=ClaimsOf.GPUS))
    assert core.wanted.fitness_check is None, "its claim tries it"
    core.release("device")
    core.held_back = {"device"}
    core.unprepare(ONE)
    core.prepare(TWO)
    core.release("device")
    core.unprepare(TWO)
    assert blocked(core) is None, "it was bound meanwhile"
    core.held_back = {"device"}
    core.prepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "process 99 has it open", ActFault.IN_USE, driver_kind=ClaimsOf.GPUS))
    core.unprepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActDone(act.number, driver_kind=ClaimsOf.GPUS))
    assert blocked(core) == BlockReason(BlockKind.HELD, "InUseOnHost")


def test_one_look_is_at_all_that_are_due() -> None:
    core = core_with(*(gpu(f"0000:{i:02x}:00.0", i, driver="nvidia") for i in range(256)))
    core.pass_time(1)
    assert len(looked_at(core)) == 256
    core.pass_time(FITNESS_CHECK_S)
    looked(core)
    assert core.wanted.fitness_check is None


def test_what_is_due_soon_is_looked_at_with_what_is_due() -> None:
    """Else GPUs that came one by one would be looked at one by one for ever."""
    core = core_of()
    looked(core)
    core.pass_time(FITNESS_RETRY_S - 1)
    core.changed(OTHER)
    core.pass_time(1)
    assert looked_at(core) == [B]
    looked(core)
    core.pass_time(FITNESS_CHECK_S - FITNESS_RETRY_S)
    assert looked_at(core) == [A, B]


def test_a_gpu_that_changes_during_a_look_is_looked_at_again_and_hides_no_other() -> None:
    core = core_with(ON_HOST, OTHER)
    core.pass_time(1)
    look = core.wanted.fitness_check
    assert look is not None
    core.changed(on_driver(OTHER, None))
    assert looked_at(core) == [A]
    in_use = (
        FitnessFinding(device_key(GPU), ActFault.IN_USE, "open"),
        FitnessFinding(DeviceKey(B), ActFault.IN_USE, "open"),
    )
    core.feed(FitnessChecked(look.number, in_use))
    assert [line.fields["address"] for line in core.logged("device.unclaimable")] == [A]
    core.pass_time(0.1)
    assert B in looked_at(core)


def test_no_look_is_waited_for_whose_gpus_have_all_changed() -> None:
    core = core_of()
    before = core.wanted.fitness_check
    assert before is not None
    core.changed(on_driver(ON_HOST, None))
    core.pass_time(0.1)
    assert looked_at(core) == [A]
    core.feed(FitnessChecked(before.number, (FitnessFinding(device_key(GPU), ActFault.IN_USE, "open"),)))
    assert blocked(core) is None
    looked(core, ActFault.NO_DRIVER)
    assert blocked(core) is not None


def test_a_fault_of_one_act_is_no_reason() -> None:
    core = core_of()
    looked(core, ActFault.REFUSED)
    assert blocked(core) is None


def test_a_gpu_on_vfio_needs_no_look() -> None:
    assert core_of(PRE_BOUND).wanted.fitness_check is None


def test_the_reason_goes_when_the_gpu_is_bound_to_vfio_by_hand() -> None:
    core = core_of()
    looked(core, ActFault.NO_DRIVER)
    core.changed(on_driver(ON_HOST, "vfio-pci"))
    assert blocked(core) is None
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
