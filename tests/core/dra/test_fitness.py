"""A GPU that no claim could bind is not offered: it is looked at before one is allocated, and again until one could."""

from __future__ import annotations

import pytest

from gpuactors import limits
from gpuactors.core.dra.claim import ActFault, Prepared
from gpuactors.core.dra.slices import Blocked, BlockKind
from gpuactors.core.events import ActDone, ActFailed
from gpuactors.core.model import PciAddress
from tests.core.builders import gpu
from tests.core.dra.claim_core import ClaimCore, name, on_driver
from tests.core.dra.test_claims import ON_HOST, PRE_BOUND, A, B, core_with

ONE, TWO = name("one"), name("two")
GPU = PciAddress(A)


def core_of(function: object = ON_HOST) -> ClaimCore:
    core = core_with(function, one=(A,), two=(A,))
    core.pass_time(1)
    return core


def looked(core: ClaimCore, fault: ActFault | None = None, reason: str = "no") -> None:
    """The look that is outstanding comes back."""
    number = core.wanted.looks[GPU].number
    core.feed(ActDone(number) if fault is None else ActFailed(number, reason, fault))


def blocked(core: ClaimCore) -> Blocked | None:
    offer = core.state.offered.offer
    assert offer is not None
    (device,) = offer.devices
    return device.blocked


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (ActFault.NO_DRIVER, Blocked(BlockKind.UNHEALTHY, "DriverNotLoaded")),
        (ActFault.IN_USE, Blocked(BlockKind.HELD, "InUseOnHost")),
        (ActFault.VIRTUAL_FUNCTIONS, Blocked(BlockKind.UNHEALTHY, "VirtualFunctions")),
    ],
)
def test_a_gpu_that_no_claim_could_bind_is_not_offered_until_one_could(fault: ActFault, why: Blocked) -> None:
    core = core_of()
    looked(core, fault)
    assert blocked(core) == why
    core.pass_time(limits.UNFIT_LOOK_S)
    looked(core, fault, "still not")
    assert blocked(core) == why
    core.pass_time(limits.UNFIT_LOOK_S)
    looked(core)
    assert blocked(core) is None
    (said,) = core.logged("device.unclaimable")[:1]
    assert said.fields["reason"] == "no"
    assert len(core.logged("device.claimable")) == 1


def test_it_is_looked_at_again_now_and_then_while_one_could() -> None:
    core = core_of()
    looked(core)
    assert not core.wanted.looks
    core.pass_time(limits.FIT_LOOK_S)
    looked(core, ActFault.IN_USE)
    assert blocked(core) is not None


def test_what_a_claims_own_act_has_met_counts_when_the_claim_is_gone() -> None:
    """Else the next claim is allocated to it at once."""
    core = core_of()
    looked(core)
    core.held_back = {"device"}
    core.prepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "process 99 has it open", ActFault.IN_USE))
    assert not core.wanted.looks, "its claim tries it"
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
    core.feed(ActFailed(act.number, "process 99 has it open", ActFault.IN_USE))
    core.unprepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActDone(act.number))
    assert blocked(core) == Blocked(BlockKind.HELD, "InUseOnHost")


def test_gpus_are_looked_at_one_after_the_other() -> None:
    core = core_with(ON_HOST, gpu(B, 2, driver="nvidia"))
    core.pass_time(1)
    seen = []
    for _ in range(2):
        ((address, look),) = core.wanted.looks.items()
        seen.append(address)
        core.feed(ActDone(look.number))
        core.pass_time(1)
    assert seen == [A, B]
    assert not core.wanted.looks


def test_a_fault_of_one_act_is_no_reason() -> None:
    core = core_of()
    looked(core, ActFault.REFUSED)
    assert blocked(core) is None


def test_a_gpu_on_vfio_needs_no_look() -> None:
    assert not core_of(PRE_BOUND).wanted.looks


def test_the_reason_goes_when_the_gpu_is_bound_to_vfio_by_hand() -> None:
    core = core_of()
    looked(core, ActFault.NO_DRIVER)
    core.changed(on_driver(ON_HOST, "vfio-pci"))
    assert blocked(core) is None
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
