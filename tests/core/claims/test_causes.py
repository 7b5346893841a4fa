"""Each reason for which a prepare is refused has its own cause, in the answer and in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActFailed, CheckpointRefused, CheckpointWritten, ClaimRead
from gpuactors.core.events.daemon import HandOverRequested, ShutdownRequested
from gpuactors.core.events.host import GroupsObserved
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.step import initial_state
from gpuactors.core.values import claim_states as table
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import (
    ActFault,
    AllocatedDevice,
    Claim,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    OpaqueConfig,
)
from gpuactors.core.values.claim_states import ClaimState, ClaimTrigger
from gpuactors.core.values.model import Holder, PciFunction
from gpuactors.core.values.selector import parse_selector
from tests.core.builders import SETTINGS, A, B, disk, gpu
from tests.core.gpus.claim_core import ON_HOST, POOL, PRE_BOUND, ClaimCore, allocated, core_with, name
from tests.core.kinds.toy import CARD, card, registered

ONE, TWO = name("one"), name("two")


def silent(held_back: str, *functions: PciFunction) -> Cause:
    """What is held back never comes."""
    core = core_with(*(functions or (ON_HOST,)), one=(A,))
    core.held_back = {held_back}
    return core.cause_of(ONE, late=True)


def of_device(device: str, *others: PciFunction) -> Cause:
    core = ClaimCore(ON_HOST, *others)
    core.created(Claim(ONE, None, 1, (AllocatedDevice("a", POOL, device),)))
    return core.cause_of(ONE)


def of_a_card_with_halves() -> Cause:
    with registered(pytest.MonkeyPatch()):
        core = ClaimCore(card(), settings=replace(SETTINGS, selectors=(parse_selector("vendor=f00d"),)))
        core.created(allocated(ONE, CARD))
        return core.cause_of(ONE)


def of_content(claim: Claim) -> Cause:
    core = ClaimCore(ON_HOST)
    core.created(claim)
    return core.cause_of(ONE)


def failed(fault: ActFault | None) -> Cause:
    """The act on the device, or without a fault that on the files, fails each time."""
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"files" if fault is None else "device"}
    token = core.prepare(ONE)
    while core.answer(token) is None:
        devices, files = core.wanted.devices.values(), core.wanted.files.values()
        for number in [*(act.number for act in devices), *(act.number for act in files)]:
            core.feed(ActFailed(number, "a sentence", fault, driver_kind=ClaimsOf.GPUS))
        core.pass_time(limits.CLAIM_RETRY_S)
    (cause,) = core.refused(token).causes
    return cause


def api_server_away() -> Cause:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"read"}
    token = core.prepare(ONE)
    (wanted,) = core.wanted.reads
    core.feed(ClaimRead(wanted.number, "the API server does not answer", ClaimsOf.GPUS))
    core.pass_time(limits.CLAIM_ANSWER_S)
    (cause,) = core.refused(token).causes
    return cause


def another_claim_has(function: PciFunction, wanted: str) -> Cause:
    core = core_with(function, gpu(B, 1), one=(wanted,), two=(A,))
    core.prepare(TWO)
    return core.cause_of(ONE, late=True)


def a_pod_has(wanted: str) -> Cause:
    core = core_with(gpu(A, 1), gpu(B, 1), one=(wanted,))
    core.ledger[A] = "vm-1"
    core.allocate(A)
    return core.cause_of(ONE, late=True)


def a_process_has() -> Cause:
    core = core_with(PRE_BOUND, one=(A,))
    core.enabled[A], core.holders[1] = 1, (Holder(77, "vfio-tool", None),)
    core.pass_time(POLL_S)
    return core.cause_of(ONE, late=True)


def its_pod_has_left() -> Cause:
    core = core_with(PRE_BOUND, one=(A,))
    core.enabled[A], core.ledger[A] = 1, "vm-1"
    core.allocate(A)
    core.pass_time(limits.LEDGER_S)
    core.ledger.clear()
    core.pass_time(limits.LEDGER_S + POLL_S)
    return core.cause_of(ONE, late=True)


def in_the_hosts_fabric() -> Cause:
    switch = replace(gpu("0000:05:00.0", 5, device="22a3", driver="nvidia-nvswitch"), class_code="068000")
    return core_with(ON_HOST, switch, one=(A,)).cause_of(ONE)


def unread_node() -> Cause:
    core = ClaimCore()
    core.created(allocated(ONE, A))
    core.feed_answers()
    return core.cause_of(ONE, late=True)


class Muted(ClaimCore):
    """Neither kubelet's ledger nor the users of the groups are heard of any more, once it is `muted`."""

    muted = False

    def _answer(self) -> Event | None:
        event = super()._answer()
        return None if self.muted and isinstance(event, LedgerRead | GroupsObserved) else event


def unheard(function: PciFunction) -> Cause:
    core = Muted(function)
    core.created(allocated(ONE, A))
    core.muted = True
    return core.cause_of(ONE, late=True)


def newer_checkpoint() -> Cause:
    core = ClaimCore()
    core.held_back = {"load"}
    core.feed(CheckpointRefused("the checkpoint is of version 7: install that version", ClaimsOf.GPUS))
    return core.cause_of(ONE)


def disk_full() -> Cause:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"checkpoint"}
    token = core.prepare(ONE)
    assert core.wanted.disk.checkpoint is not None
    core.feed(
        CheckpointWritten(
            core.wanted.disk.checkpoint.number, ClaimsOf.GPUS, "no space left on device: free some"
        )
    )
    core.pass_time(limits.CLAIM_ANSWER_S)
    (cause,) = core.refused(token).causes
    return cause


def unprepared_meanwhile() -> Cause:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    token = core.prepare(ONE)
    core.unprepare(ONE)
    (cause,) = core.refused(token).causes
    return cause


def stopping() -> Cause:
    core = core_with(ON_HOST, one=(A,))
    core.feed(ShutdownRequested())
    return core.cause_of(ONE)


def handed_over() -> Cause:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"read"}
    token = core.prepare(ONE)
    core.feed(HandOverRequested())
    (cause,) = core.refused(token).causes
    return cause


def released_again() -> Cause:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    core.unprepare(ONE)
    return core.cause_of(ONE, late=True)


def without_row() -> Cause:
    core = ClaimCore(ON_HOST, settings=replace(SETTINGS, strict=False))
    core.created(allocated(ONE, A))
    with pytest.MonkeyPatch.context() as planted:
        missing = {k: v for k, v in table.TRANSITIONS.items() if k != (ClaimState.BINDING, ClaimTrigger.DONE)}
        planted.setattr(table, "TRANSITIONS", missing)
        return core.cause_of(ONE)


def switched_off() -> Cause:
    core = ClaimCore(ON_HOST)
    core.state = initial_state(SETTINGS)
    return core.cause_of(ONE)


def unknown_field() -> Claim:
    odd = OpaqueConfig(False, (), {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "Odd"})
    return replace(allocated(ONE, A), configs=(odd,))


CLAIMS: Final[dict[str, tuple[Cause, Callable[[], Cause]]]] = {
    "another claim has it": (Cause.CLAIMED_ELSEWHERE, lambda: another_claim_has(ON_HOST, A)),
    "another claim has the other GPU of the group": (
        Cause.GROUP_IN_USE,
        lambda: another_claim_has(ON_HOST, B),
    ),
    "a pod has it": (Cause.CLAIMED_ELSEWHERE, lambda: a_pod_has(A)),
    "a pod has the other GPU of the group": (Cause.GROUP_IN_USE, lambda: a_pod_has(B)),
    "a process has it": (Cause.HELD_BY_OTHER, a_process_has),
    "its pod is gone, its process is not": (Cause.ORPHANED, its_pod_has_left),
    "the host uses a function of its group": (
        Cause.GROUP_NOT_VIABLE,
        lambda: of_device("gpu-0000-01-00-0", disk("03:00.0", 1)),
    ),
    "firmware has memory in its group": (
        Cause.RESERVED_REGION,
        lambda: of_device("gpu-0000-01-00-0", replace(ON_HOST, direct_region="0xa000 to 0xafff")),
    ),
    "it is dead": (
        Cause.DEAD,
        lambda: of_device("gpu-0000-01-00-0", replace(ON_HOST, has_fatal_errors=True)),
    ),
    "it is in the host's fabric": (Cause.FABRIC_OF_HOST, in_the_hosts_fabric),
    "mediated devices were made of it": (Cause.MEDIATED_DEVICES, of_a_card_with_halves),
    "it is no device of ours": (Cause.UNKNOWN_ID, lambda: of_device("mig-1g")),
    "it is gone": (Cause.GONE, lambda: of_device("gpu-0000-09-00-0")),
    "nothing selects it": (
        Cause.NOT_SELECTED,
        lambda: of_device("gpu-0000-03-00-0", replace(gpu("0000:03:00.0", 3), vendor="1002")),
    ),
    "it is in no group": (
        Cause.NO_IOMMU_GROUP,
        lambda: of_device("gpu-0000-04-00-0", replace(gpu("0000:04:00.0", 4), iommu_group=None)),
    ),
    "it has no IOMMU": (
        Cause.NO_IOMMU_MODE,
        lambda: of_device("gpu-0000-04-00-0", replace(gpu("0000:04:00.0", 4), without_iommu=True)),
    ),
    "it is not allocated": (Cause.CLAIM_NOT_ALLOCATED, lambda: of_content(Claim(ONE, None, 1, None))),
    "nothing of it is ours": (Cause.CLAIM_NOT_ALLOCATED, lambda: of_content(Claim(ONE, None, 1, ()))),
    "its configuration is unknown": (Cause.INVALID_CONFIGURATION, lambda: of_content(unknown_field())),
    "it was made anew": (Cause.CLAIM_NOT_FOUND, lambda: of_content(allocated(name("one", uid="uid-2"), A))),
    "it was deleted": (Cause.CLAIM_NOT_FOUND, lambda: ClaimCore(ON_HOST).cause_of(ONE)),
    "its name makes no path": (
        Cause.INVALID_REQUEST,
        lambda: ClaimCore(ON_HOST).cause_of(ClaimName("default", "one", ClaimUid("../../etc"))),
    ),
    "the API server is away": (Cause.API_SERVER_FAILED, api_server_away),
    "the API server is silent": (Cause.API_SERVER_FAILED, lambda: silent("read")),
    "the node was not read": (Cause.INSPECTION_LATE, unread_node),
    "sysfs is silent": (Cause.INSPECTION_LATE, lambda: silent("inspection")),
    "the users are not known": (Cause.USE_LATE, lambda: unheard(PRE_BOUND)),
    "kubelet's ledger does not come": (Cause.LEDGER_LATE, lambda: unheard(ON_HOST)),
    "the checkpoint was not read": (
        Cause.CHECKPOINT_LATE,
        lambda: core_with(PRE_BOUND, one=(A,)).restarted("load").cause_of(ONE),
    ),
    "the checkpoint is of a newer version": (Cause.CLAIMS_UNSERVED, newer_checkpoint),
    "claims are off": (Cause.CLAIMS_UNSERVED, switched_off),
    "the disk is full": (Cause.CHECKPOINT_UNWRITTEN, disk_full),
    "the disk is silent": (Cause.CHECKPOINT_UNWRITTEN, lambda: silent("checkpoint")),
    "its files cannot be written": (Cause.FILES_UNWRITTEN, lambda: failed(None)),
    "its files do not come": (Cause.FILES_UNWRITTEN, lambda: silent("files")),
    "the bind does not come": (Cause.WRITE_HANGS, lambda: silent("device")),
    "its release does not come": (Cause.WRITE_HANGS, released_again),
    "the bind hangs": (Cause.WRITE_HANGS, lambda: failed(ActFault.HANGS)),
    "another bind hangs": (Cause.WRITE_HANGS, lambda: failed(ActFault.BLOCKED)),
    "a process of the host has it": (Cause.IN_USE_ON_HOST, lambda: failed(ActFault.IN_USE)),
    "virtual functions are active": (Cause.VIRTUAL_FUNCTIONS, lambda: failed(ActFault.VIRTUAL_FUNCTIONS)),
    "vfio is not loaded": (Cause.DRIVER_NOT_LOADED, lambda: failed(ActFault.NO_DRIVER)),
    "the host has taken a function of its group": (
        Cause.GROUP_NOT_VIABLE,
        lambda: failed(ActFault.NOT_VIABLE),
    ),
    "its group has another function": (Cause.GROUP_CHANGED, lambda: failed(ActFault.UNKNOWN_FUNCTION)),
    "it vanished": (Cause.GONE, lambda: failed(ActFault.GONE)),
    "the kernel refuses": (Cause.WRITE_REFUSED, lambda: failed(ActFault.REFUSED)),
    "it was unprepared meanwhile": (Cause.UNPREPARED, unprepared_meanwhile),
    "the daemon stops": (Cause.NOT_SERVING, stopping),
    "the daemon hands over": (Cause.NOT_SERVING, handed_over),
    "a transition is missing": (Cause.SET_ASIDE, without_row),
}
"""What is wrong, and the one cause of the refusal."""


@pytest.mark.parametrize("wrong", CLAIMS)
def test_a_refused_prepare_has_its_one_cause(wrong: str) -> None:
    cause, refused = CLAIMS[wrong]
    assert refused() is cause
