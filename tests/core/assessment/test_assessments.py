"""A device's assessment is derived when something of its group changes, and then for this group alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.host import HostScanned
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.values import memo
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.model import Holder, PciFunction, device_key, pci_address
from tests.core.builders import A, B, C, Core, audio, gpu

QEMU = Holder(4711, "qemu-system-x86", None)


def node(*functions: PciFunction) -> Core:
    core = Core(*(functions or (gpu(A), gpu(B), gpu(C))))
    core.pass_time(60)
    return core


def derived_anew(before: Core, core: Core) -> set[str]:
    was, now = before.state.assessments, core.state.assessments
    return {a for a in was.keys() | now.keys() if was.get(a) is not now.get(a)}


def after(core: Core) -> Core:
    """What is known now, to compare with."""
    kept = Core()
    kept.state = core.state
    return kept


def test_what_has_not_changed_is_the_very_assessment_that_it_was() -> None:
    core = node()
    before = after(core)
    core.pass_time(60)
    core.inspect(A, gpu(A))
    assert core.state.assessments is before.state.assessments, "polls and reads that find what was known"
    core.inspect(A, gpu(A, driver=None))
    assert derived_anew(before, core) == {A}


def test_a_function_of_a_group_changes_all_of_it() -> None:
    core = node(gpu(A, 7), gpu(B, 7), gpu(C, 8), audio("01:00.1", 7))
    before = after(core)
    core.inspect(pci_address("0000:01:00.1"), audio("01:00.1", 7, driver="snd_hda_intel"), gpu(A, 7))
    assert derived_anew(before, core) == {A, B}
    assert core.state.assessments[device_key(B)].status.cause is Cause.GROUP_NOT_VIABLE


def test_an_owner_changes_the_group_and_nobody_else() -> None:
    core = node(gpu(A, 7), gpu(B, 7), gpu(C, 8))
    before = after(core)
    core.ledger = {A: "vm-1"}
    core.feed(KubeletAppeared("k1"))
    assert derived_anew(before, core) == {A, B}
    causes = {a: found.status.cause for a, found in core.state.assessments.items()}
    assert causes == {
        device_key(A): Cause.ALLOCATED,
        device_key(B): Cause.GROUP_IN_USE,
        device_key(C): Cause.FREE,
    }


def test_who_holds_a_group_changes_that_group() -> None:
    core = node()
    before = after(core)
    core.holders = {2: (QEMU,)}
    core.pass_time(POLL_S)
    assert derived_anew(before, core) == {B}
    assert core.state.assessments[device_key(B)].status.holders == (QEMU,)


def test_lists_calls_and_views_read_the_same_value() -> None:
    core = node()
    core.holders = {2: (QEMU,)}
    core.pass_time(POLL_S)
    assert replace(core.state).assessments is core.state.assessments, "nobody derives it again"
    statuses = {a: found.status for a, found in core.state.assessments.items()}
    (device_list,) = core.state.published.device_lists.values()
    assert {a.key: (a.health, a.cause, a.reason) for a in device_list} == {
        a: (s.health, s.cause, s.message) for a, s in statuses.items()
    }


@pytest.mark.parametrize("first", ["Healthy", "Unhealthy"])
def test_what_nobody_can_know_stays_what_it_was_listed_as(first: str) -> None:
    """The one status that follows from the list: it is the same whether it is carried or derived from nothing."""
    core = Core()
    core.holders = {1: (QEMU,)} if first == "Unhealthy" else {}
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    core.pass_time(POLL_S)
    assert core.device_list()[A] == first
    core.holders, core.ledger_problem = {1: (replace(QEMU, pid=4712),)}, "connection refused"
    core.pass_time(POLL_S)
    status = core.state.assessments[device_key(A)].status
    assert (status.cause, str(status.health), core.device_list()[A]) == (Cause.HOLDER_UNKNOWN, first, first)
    memo.forget()
    assert replace(core.state).assessments[device_key(A)].status == status


def test_a_poll_after_the_first_of_two_pods_settles_nothing_about_the_second() -> None:
    """Both had a GPU of the group, and leave one after the other: only a poll since the later read shows whether that
    pod still has the group open."""
    core = Core(gpu(A, 7), gpu(B, 7))
    core.ledger, core.enabled = {A: "vm-1", B: "vm-2"}, {A: 1, B: 1}
    core.feed(KubeletAppeared("1"))
    core.pass_time(limits.LEDGER_S)
    core.ledger = {B: "vm-2"}
    core.pass_time(limits.LEDGER_S + POLL_S)
    assert set(core.state.kubelet.orphans) == {device_key(A)}
    core.silent = True
    core.pass_time(limits.LEDGER_S)
    read = core.read
    core.ledger = {}
    core.feed(core.ledger_event(read))
    assert set(core.state.kubelet.orphans) == {device_key(A), device_key(B)}
    assert core.state.assessments[device_key(B)].status.cause is Cause.HOLDER_UNKNOWN
    core.silent = False
    core.feed(Ticked())
    core.pass_time(POLL_S)
    assert core.state.assessments[device_key(B)].status.cause is Cause.ORPHANED
