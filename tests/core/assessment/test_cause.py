"""Every cause occurs, each kind of message has one, and the table in the docs is what the code says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.assessment import assess
from gpuactors.core.events.daemon import ConfigUsed, ShutdownRequested, Ticked
from gpuactors.core.events.deviceplugin import (
    PreferenceAsked,
    PreferenceRequest,
)
from gpuactors.core.events.host import (
    GroupsObserved,
    HostScanned,
    InspectionFailed,
)
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.kinds.sets import not_a_set
from gpuactors.core.partitions import outputs
from gpuactors.core.reports.snapshot import project, report
from gpuactors.core.state.claims import Claims
from gpuactors.core.state.gpus import Gpus
from gpuactors.core.values import memo
from gpuactors.core.values.cause import AS_BEFORE, MEANINGS, Cause
from gpuactors.core.values.cdi import NO_SPECS, CdiSpec, CdiSpecs
from gpuactors.core.values.effects import Refused, Reply
from gpuactors.core.values.model import (
    CachedAnswer,
    DeviceId,
    GroupUse,
    Health,
    Holder,
    PciAddress,
    PciFunction,
    Token,
    device_key,
    pci_address,
)
from gpuactors.core.values.own_resources import parse_model_rule
from gpuactors.core.values.vgpu import VendorVgpu
from tests.core.builders import (
    H100,
    SETTINGS,
    A,
    B,
    Core,
    allocate_call,
    audio,
    disk,
    gpu,
    node,
    pre_start_call,
)
from tests.core.claims.test_causes import CLAIMS
from tests.core.domains.test_causes import DOMAINS
from tests.core.gpus.claim_core import CLAIM_SETTINGS, ClaimCore
from tests.core.kinds.boards import board, key
from tests.core.partitions import fabric
from tests.core.test_asking import Kubelet

T = Token(1)
QEMU = Holder(4711, "qemu-system-x86", None)


def found(core: Core, *functions: PciFunction, at: PciAddress = A) -> None:
    core.feed(core.inspected(at, *functions))


def listed(core: Core, device: str = A) -> set[Cause]:
    """What is said of the device, in the list and to an operator; kubelet is told what the table says."""
    (entry,) = (a for a in core.state.published.device_lists[H100] if a.id == device)
    assert MEANINGS[entry.cause].health in (entry.health, AS_BEFORE)
    assert entry.cause in {change.cause for change in core.state.published.history[entry.key]}
    lines = [e.fields for e in core.logged("device.changed")]
    told = [fields["cause"] for fields in lines if (fields["device"], fields["resource"]) == (device, H100)]
    assert told[-1] == str(entry.cause), "and the log has it"
    return {entry.cause, *(r.cause for r in report(core.state) if (r.id, r.resource) == (device, H100))}


def unlisted(core: Core, device: str = A) -> set[Cause]:
    """Why the device left the list, by the log."""
    lines = [e.fields for e in core.logged("device.gone")]
    return {Cause(str(fields["cause"])) for fields in lines if fields["device"] == device}


def asked(core: Core, *devices: str) -> Core:
    core.feed(allocate_call(*devices))
    return core


def refused(core: Core) -> set[Cause]:
    (answer,) = (e.answer for e in core.effects if isinstance(e, Reply))
    (line,) = (e.fields for e in core.logged("call.refused"))
    assert isinstance(answer, Refused)
    assert line["causes"] == tuple(map(str, answer.causes)), "and the log has them"
    return set(answer.causes)


def late(core: Core) -> set[Cause]:
    core.silent = True
    core.feed(Ticked(), after_s=limits.CALL_DEADLINE_S)
    return refused(core)


# --- states, each with its cause --------------------------------------------------------------------------


def just_allocated() -> set[Cause]:
    core = asked(node(), A)
    found(core, gpu(A))
    return listed(core)


def claimed_elsewhere() -> set[Cause]:
    core = node()
    core.claims = {"gpu-0000-01-00-0": "claim-1"}
    core.feed(KubeletAppeared("k1"))
    return listed(core)


def of_another_resource() -> set[Cause]:
    core = Core()
    core.others = {("example.com/gpu", A): "vm-1"}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    return listed(core)


def orphaned() -> set[Cause]:
    core = Core()
    core.ledger, core.enabled = {A: "vm-1"}, {A: 1}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    core.ledger = {}
    core.feed(KubeletAppeared("k1"))
    return listed(core)


def held_by_other() -> set[Cause]:
    core = node()
    core.holders = {1: (QEMU,)}
    core.pass_time(POLL_S)
    return listed(core)


def holder_unknown() -> set[Cause]:
    core = node()
    core.holders, core.ledger_problem = {1: (QEMU,)}, "connection refused"
    core.pass_time(POLL_S)
    return listed(core)


def unbinding() -> set[Cause]:
    core = Core()
    core.enabled = {A: 1}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    core.inspect(A, gpu(A, driver=None, has_node=True))
    return listed(core)


def lost(*now: PciFunction) -> set[Cause]:
    """A pod has it."""
    core = node(ledger={A: "vm-1"})
    core.inspect(A, *now)
    return listed(core)


def gone_unallocated(*now: PciFunction) -> set[Cause]:
    core = node()
    core.inspect(A, *now)
    return unlisted(core)


def broken(*functions: PciFunction) -> set[Cause]:
    return listed(node(*functions, gpu(B)))


def with_one_name_for_a_model() -> set[Cause]:
    core = node(
        replace(gpu(A), physical=pci_address("0000:01:00.7")),
        replace(gpu("01:00.7", 9, driver="nvidia", device="2331"), has_virtual_functions=True),
        gpu("02:00.0", 10),
    )
    selectors = (*SETTINGS.selectors, parse_model_rule(f"10de:2330={H100}"))
    core.feed(ConfigUsed(("resource_name",), selectors, ()))
    return listed(core)


def use_unreadable() -> set[Cause]:
    core = node()
    core.silent = True
    core.pass_time(POLL_S)
    poll = project(core.state).inspections.poll
    assert poll.poll is not None
    core.feed(GroupsObserved(poll.poll, (GroupUse(1, {}, frozenset(), None, None, unseen="no enable"),)))
    return listed(core)


def listed_as_other() -> set[Cause]:
    core = Core()
    core.ledger_problem = "connection refused"
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    core.feed(PreferenceAsked(T, H100, (PreferenceRequest((DeviceId(A),), (), 1),)))
    core.ledger_problem, core.ledger = None, {"1": "vm-1"}
    core.feed(KubeletAppeared("1"))
    (entry,) = (a for a in core.state.published.device_lists[H100] if a.id == DeviceId(A))
    return {entry.cause}


def id_released() -> set[Cause]:
    core = node(ledger={"1": "vm-1", A: "vm-2"})
    core.ledger = {A: "vm-2"}
    core.feed(KubeletAppeared("k1"))
    return unlisted(core, "1")


def in_the_hosts_fabric() -> set[Cause]:
    core = ClaimCore(
        gpu(A, 1, driver="nvidia"), replace(gpu(B, 2, driver="nvidia-nvswitch"), class_code="068000")
    )
    offered = core.state.offered.devices[device_key(A)]
    assert offered is not None
    assert offered.blocked is not None
    return {Cause(offered.blocked.cause)}


def set_aside() -> set[Cause]:
    right = assess.status_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assess, "status_of", lambda *a: replace(right(*a), health=Health.UNHEALTHY))
        core = Core(settings=replace(SETTINGS, strict=False))
        core.ledger = {A: "vm-1"}
        memo.forget()
        core.feed(HostScanned(1, (gpu(A), gpu(B))))
    memo.forget()
    return listed(core)


def refused_as(*now: PciFunction) -> set[Cause]:
    core = asked(node(), A)
    found(core, *now)
    return refused(core)


def refused_as_held() -> set[Cause]:
    core = node()
    core.holders = {1: (QEMU,)}
    found(asked(core, A), gpu(A))
    return refused(core)


def refused_for_the_group() -> set[Cause]:
    core = asked(node(gpu(A, 7), gpu(B, 7), ledger={B: "vm-1"}), A)
    found(core, gpu(A, 7), gpu(B, 7))
    return refused(core)


def its_virtual_function_was_unmade() -> set[Cause]:
    """A pod had it."""
    core = node(gpu(A), replace(gpu(B), physical=A), ledger={B: "vm-1"})
    core.inspect(B)
    return listed(core)


def refused_for_another_resource() -> set[Cause]:
    core = node()
    core.at += 1
    core.others = {("example.com/gpu", A): "vm-1"}
    found(asked(core, A), gpu(A))
    return refused(core)


def still_allocated() -> set[Cause]:
    core = Kubelet()
    core.runs()
    core.effects.clear()
    core.allocate(token=Token(9))
    return refused(core)


def stale_nodes() -> set[Cause]:
    core = node(gpu(A, 82), gpu(B, 81), ledger={A: "vm-1"})
    core.cached = (CachedAnswer(H100, DeviceId(A), ("/dev/vfio/81",)),)
    core.at += 1
    core.feed(pre_start_call(A))
    found(core, gpu(A, 82))
    return refused(core)


def shortage() -> set[Cause]:
    core = asked(node(), A)
    core.feed(InspectionFailed(core.state.host.inspections.functions[A], A, "no descriptors", shortage=True))
    return late(core)


def use_late() -> set[Cause]:
    core = node()
    core.silent = True
    found(asked(core, A), gpu(A))
    core.feed(core.ledger_event(core.read))
    return late(core)


def ledger_late() -> set[Cause]:
    core = node()
    core.at += 1
    core.silent = True
    asked(core, A)
    core.feed(core.poll_event(core.poll))
    found(core, gpu(A))
    return late(core)


def checkpoint_late() -> set[Cause]:
    core = node()
    core.state = replace(core.state, gpus=Gpus(claims=Claims(CLAIM_SETTINGS)))
    asked(core, A)
    found(core, gpu(A))
    return late(core)


def not_serving() -> set[Cause]:
    core = node()
    core.feed(ShutdownRequested())
    return refused(asked(core, A))


def no_partition() -> set[Cause]:
    reason = not_a_set((key(1), key(3)), board(4))
    assert reason is not None
    return {reason.cause}


def lost_partition() -> set[Cause]:
    """The fabric manager was restarted under its virtual machine."""
    owned = fabric.settled(fabric.comes(fabric.fabric(), fabric.P1))
    restarted = fabric.fabric_manager_restarts(fabric.opens(owned, fabric.P1))
    why = outputs.conflict(fabric.settled(restarted, ticks=1).partitions, f"owner of {fabric.P1}")
    return {why.why.cause} if why is not None else set()


def partition_refused(world: fabric.Fabric, queries: int) -> set[Cause]:
    world = fabric.comes(world, fabric.P1)
    for _ in range(queries):
        world = fabric.queried(world)
    why = outputs.conflict(world.partitions, f"owner of {fabric.P1}")
    return {why.why.cause} if why is not None else set()


ANOTHER = replace(gpu(A), device="20b0", model="GA100 [A100 PCIe 80GB]")


def without_a_cdi_file(function: PciFunction, cdi: CdiSpecs = NO_SPECS) -> set[Cause]:
    """Allocate answers by CDI names, and no file is written."""
    core = Core(function, settings=replace(SETTINGS, allocates_by_cdi=True))
    core.cdi = cdi
    core.pass_time(limits.LEDGER_QUIET_S)
    return {entry.cause for entries in core.state.published.device_lists.values() for entry in entries}


def cdi_name_taken() -> set[Cause]:
    return without_a_cdi_file(gpu(A), CdiSpecs((CdiSpec("/var/run/cdi/theirs.yaml", (f"{H100}={A}",)),)))


STATES: Final[dict[str, tuple[Cause, Callable[[], set[Cause]]]]] = {
    "nobody has it": (Cause.FREE, lambda: listed(node())),
    "a pod has it": (Cause.ALLOCATED, lambda: listed(node(ledger={A: "vm-1"}))),
    "just allocated": (Cause.JUST_ALLOCATED, just_allocated),
    "a claim has it": (Cause.CLAIMED_ELSEWHERE, claimed_elsewhere),
    "another resource's pod has it": (Cause.CLAIMED_ELSEWHERE, of_another_resource),
    "a pod has the other GPU of the group": (
        Cause.GROUP_IN_USE,
        lambda: listed(node(gpu(A, 7), gpu(B, 7), ledger={B: "vm-1"})),
    ),
    "a pod has a virtual function of it": (Cause.CARD_IN_USE, its_virtual_function_was_unmade),
    "its pod is gone, its process is not": (Cause.ORPHANED, orphaned),
    "a process has it": (Cause.HELD_BY_OTHER, held_by_other),
    "a process has it, and the ledger is unreadable": (Cause.HOLDER_UNKNOWN, holder_unknown),
    "a file of it is unreadable": (Cause.UNREADABLE, lambda: broken(gpu(A, fault="cannot read config"))),
    "it does not answer": (Cause.DEAD, lambda: broken(replace(gpu(A), is_silent=True))),
    "it has had a fatal error": (Cause.DEAD, lambda: broken(replace(gpu(A), has_fatal_errors=True))),
    "its unbind waits": (Cause.UNBINDING, unbinding),
    "a pod has it, and it was unbound": (Cause.NOT_BOUND, lambda: lost(gpu(A, driver=None))),
    "it went to a driver of the host": (Cause.NOT_BOUND, lambda: gone_unallocated(gpu(A, driver="nvidia"))),
    "nothing selects it any more": (
        Cause.NOT_SELECTED,
        lambda: gone_unallocated(replace(gpu(A), class_code="0b4000")),
    ),
    "no-IOMMU mode": (
        Cause.NO_IOMMU_MODE,
        lambda: broken(replace(gpu(A, has_node=False), without_iommu=True)),
    ),
    "no IOMMU group": (Cause.NO_IOMMU_GROUP, lambda: broken(replace(gpu(A), iommu_group=None))),
    "behind VMD": (
        Cause.BEHIND_VMD,
        lambda: listed(
            node(replace(gpu(A), address=pci_address("10000:01:00.0"), iommu_group=None)), "10000:01:00.0"
        ),
    ),
    "a function of the group is on a driver of the host": (
        Cause.GROUP_NOT_VIABLE,
        lambda: broken(gpu(A, 7), audio("01:00.1", 7, driver="snd_hda_intel")),
    ),
    "the host has a disk in its group": (
        Cause.GROUP_NOT_VIABLE,
        lambda: broken(gpu(A, 7), disk("03:00.0", 7)),
    ),
    "firmware has memory in its group": (
        Cause.RESERVED_REGION,
        lambda: broken(replace(gpu(A, 7), direct_region="0xa000 to 0xafff")),
    ),
    "its node is missing": (Cause.NODE_MISSING, lambda: broken(gpu(A, has_node=False))),
    "it is a virtual function on NVIDIA's driver": (
        Cause.VIRTUAL_FUNCTION,
        lambda: gone_unallocated(
            replace(gpu(A, driver="nvidia"), vfio_bound=True, physical=pci_address("0000:01:00.7"))
        ),
    ),
    "it is a vGPU of a type without a name": (
        Cause.VGPU_UNNAMED,
        lambda: gone_unallocated(
            replace(
                gpu(A, driver="nvidia"),
                vfio_bound=True,
                physical=pci_address("0000:01:00.7"),
                vgpu=VendorVgpu(1147, driver_bind=7),
            )
        ),
    ),
    "it is a virtual function of one that is on vfio": (
        Cause.PHYSICAL_FUNCTION_ON_VFIO,
        lambda: broken(
            replace(gpu(A), physical=pci_address("0000:01:00.7")),
            replace(gpu("01:00.7", 9, device="2331", model="B"), has_virtual_functions=True),
        ),
    ),
    "it is a virtual function of one that is not known": (
        Cause.PHYSICAL_FUNCTION_NOT_READY,
        lambda: broken(replace(gpu(A), physical=pci_address("0000:01:00.7"))),
    ),
    "it has virtual functions": (
        Cause.VIRTUAL_FUNCTIONS,
        lambda: broken(replace(gpu(A), has_virtual_functions=True)),
    ),
    "it is a virtual function with the name of a whole one": (
        Cause.RESOURCE_MIXED,
        with_one_name_for_a_model,
    ),
    "all nodes are missing": (Cause.NODE_MISSING, lambda: broken(replace(gpu(A), nodes=()))),
    "its use cannot be seen": (Cause.USE_UNREADABLE, use_unreadable),
    "a claim would take it from the host's NVLink fabric": (Cause.FABRIC_OF_HOST, in_the_hosts_fabric),
    "its CDI file is not written": (Cause.CDI_FILE_UNWRITTEN, lambda: without_a_cdi_file(gpu(A))),
    "its resource is no CDI kind": (Cause.CDI_NAME_INVALID, lambda: without_a_cdi_file(gpu(A, model=""))),
    "another program's CDI file has its name": (Cause.CDI_NAME_TAKEN, cdi_name_taken),
    "a pod has it, and it is gone": (Cause.GONE, lost),
    "it is gone": (Cause.GONE, gone_unallocated),
    "a pod has it, and another is there": (Cause.REPLACED_BY_ANOTHER, lambda: lost(ANOTHER)),
    "another is there": (Cause.REPLACED_BY_ANOTHER, lambda: gone_unallocated(ANOTHER)),
    "a pod has an ID that means nothing": (Cause.UNKNOWN_ID, lambda: listed(node(ledger={"99": "vm"}), "99")),
    "it has another ID now": (Cause.LISTED_AS_OTHER, listed_as_other),
    "its second ID is not needed any more": (Cause.ID_RELEASED, id_released),
    "a rule is broken": (Cause.SET_ASIDE, set_aside),
    "asked for, and held": (Cause.HELD_BY_OTHER, refused_as_held),
    "asked for, and a pod has the other GPU of the group": (Cause.GROUP_IN_USE, refused_for_the_group),
    "asked for, and another resource's": (Cause.CLAIMED_ELSEWHERE, refused_for_another_resource),
    "asked for, and gone": (Cause.GONE, refused_as),
    "asked for, and another": (Cause.REPLACED_BY_ANOTHER, lambda: refused_as(ANOTHER)),
    "asked for, and unbound": (Cause.NOT_BOUND, lambda: refused_as(gpu(A, driver=None))),
    "asked for, and in another group": (Cause.GROUP_CHANGED, lambda: refused_as(gpu(A, 9))),
    "asked for by no ID": (Cause.UNKNOWN_ID, lambda: refused(asked(node(), "0000:99:00.0"))),
    "its container has old nodes": (Cause.STALE_NODES, stale_nodes),
    "asked for, and a pod that lives has it": (Cause.STILL_ALLOCATED, still_allocated),
    "no descriptors": (Cause.SHORTAGE, shortage),
    "no inspection returns": (Cause.INSPECTION_LATE, lambda: late(asked(node(), A))),
    "no poll comes back": (Cause.USE_LATE, use_late),
    "no read comes back": (Cause.LEDGER_LATE, ledger_late),
    "the checkpoint of the claims is not read": (Cause.CHECKPOINT_LATE, checkpoint_late),
    "nothing was requested": (Cause.INVALID_REQUEST, lambda: refused(asked(node()))),
    "requested twice": (Cause.INVALID_REQUEST, lambda: refused(asked(node(), A, A))),
    "stopping": (Cause.NOT_SERVING, not_serving),
    "no partition was requested": (Cause.NOT_A_SET, no_partition),
    "its partition is not active yet": (
        Cause.PARTITION_LATE,
        lambda: partition_refused(fabric.fabric(), 1),
    ),
    "another program has activated its partition": (
        Cause.PARTITION_IN_USE,
        lambda: partition_refused(fabric.others_activate(fabric.fabric(), fabric.P1), 3),
    ),
    "its partition is lost": (Cause.PARTITION_LOST, lost_partition),
}
"""What is done, and the one cause that it has."""


@pytest.mark.parametrize("state", STATES)
def test_a_state_has_its_one_cause(state: str) -> None:
    cause, causes_in = STATES[state]
    assert causes_in() == {cause}


def test_every_cause_occurs_and_has_a_row() -> None:
    of_claims = {*(cause for cause, _ in CLAIMS.values()), *(cause for cause, _ in DOMAINS.values())}
    assert {cause for cause, _ in STATES.values()} | of_claims == set(Cause) == set(MEANINGS)
