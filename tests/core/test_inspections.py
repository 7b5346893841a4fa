"""Inspections: in any order of the results, the facts end with what the inspection that was requested last has
found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.host import (
    FunctionInspected,
    FunctionsInspected,
    HostChanged,
    HostScanned,
    InspectionFailed,
    ScanFailed,
    SomeGroupsObserved,
    UeventsLost,
    UeventsOpened,
    UeventsUnavailable,
)
from gpuactors.core.host import inspections
from gpuactors.core.host.inspections import SCAN_BACKOFF_S, SHORTAGE_INSPECTION_S, UNSETTLED_INSPECTIONS_S
from gpuactors.core.reports.snapshot import NO_POLL, InspectionsWanted, PollWanted, asks_more, project
from gpuactors.core.values.effects import Granted, Level, Log
from gpuactors.core.values.model import GroupUse, pci_address
from tests.core.builders import H100, A, B, Core, allocate_call, audio, gpu


def wanted(core: Core, address: str = A) -> int:
    return core.state.host.inspections.functions[pci_address(address)]


def test_a_scan_is_wanted_from_the_start_and_no_list_is_made_before_it_is_back() -> None:
    core = Core()
    assert core.state.host.inspections.whole.outstanding == 1
    core.feed(HostChanged(A, None, "bind pci"))
    core.feed(FunctionInspected(wanted(core), A, (gpu(A),)))
    assert core.state.published.device_lists == {}, (
        "in a list without the other devices these would be gone for kubelet"
    )
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_late_bind_adds_the_device_and_an_unbind_takes_it_away() -> None:
    core = Core(gpu(A))
    core.feed(HostChanged(B, None, "bind pci"))
    core.feed(FunctionInspected(wanted(core, B), B, (gpu(B),)))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    core.feed(HostChanged(A, None, "unbind pci"))
    core.feed(FunctionInspected(wanted(core), A, (gpu(A, driver=None),)))
    assert core.device_list() == {B: "Healthy"}


def test_a_group_hint_asks_for_an_inspection_of_each_known_member_only() -> None:
    core = Core(gpu(A, 7), audio("01:00.1", 7), gpu(B, 8))
    core.feed(HostChanged(None, 7, "remove vfio"))
    assert set(core.state.host.inspections.functions) == {A, "0000:01:00.1"}
    core.feed(HostChanged(None, 99, "add vfio"))
    assert set(core.state.host.inspections.functions) == {A, "0000:01:00.1"}


@pytest.mark.parametrize("scan_comes", [0, 1, 2])
def test_a_scan_that_comes_back_at_any_moment_ends_with_the_inspection_asked_for_last(
    scan_comes: int,
) -> None:
    """A scan is out; then an unbind and a removal: the scan, which read before both, comes back at each moment."""
    core = Core(gpu(A), gpu(B))
    core.feed(UeventsLost("overflow"))
    scan = core.scan
    steps: list[Callable[[], object]] = [
        lambda: core.feed(FunctionInspected(wanted(core), A, (gpu(A, driver=None),))),
        lambda: core.feed(FunctionInspected(wanted(core), A, ())),
    ]
    steps.insert(scan_comes, lambda: core.feed(HostScanned(scan, (gpu(A), gpu(B)))))
    core.feed(HostChanged(A, None, "unbind pci"), HostChanged(A, None, "remove pci"))
    for step in steps:
        step()
    assert core.device_list() == {B: "Healthy"}
    assert core.state.host.inspections.functions == {}
    assert A not in core.state.host.seen, "what is gone for good is forgotten"


def test_a_storm_of_hints_costs_two_inspections() -> None:
    core = Core(gpu(A))
    numbers = set()
    for _ in range(1000):
        core.feed(HostChanged(A, None, "change pci"))
        numbers.add(wanted(core))
    core.feed(FunctionInspected(wanted(core), A, (gpu(A, driver=None),)))
    numbers.add(wanted(core))
    core.feed(FunctionInspected(wanted(core), A, (gpu(A),)))
    assert core.state.host.inspections.functions == {}
    assert len(numbers) == 2
    assert core.device_list() == {A: "Healthy"}


def test_a_change_during_a_scan_is_followed_by_another_scan() -> None:
    core = Core(gpu(A))
    core.feed(UeventsLost("overflow"), UeventsLost("overflow"), UeventsLost("overflow"))
    first = core.scan
    core.feed(HostScanned(first, (gpu(A),)))
    second = core.scan
    assert second > first
    core.feed(HostScanned(second, (gpu(A), gpu(B))))
    assert core.state.host.inspections.whole.outstanding is None
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_result_nobody_waits_for_changes_nothing() -> None:
    core = Core(gpu(A))
    before = core.state
    core.feed(
        HostScanned(99, ()), ScanFailed(99, "x"), FunctionInspected(99, A, ()), InspectionFailed(99, A, "x")
    )
    assert core.state == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_inspections_that_come_back_together_mean_what_they_mean_one_after_the_other(
    order: tuple[int, ...],
) -> None:
    """Two functions of a group of which one is removed meanwhile, and one that is incomplete."""
    companion = pci_address("0000:01:00.1")
    one_by_one, together = Core(gpu(A, 7), gpu("01:00.1", 7)), Core(gpu(A, 7), gpu("01:00.1", 7))
    for core in (one_by_one, together):
        core.feed(*(HostChanged(a, None, "change pci") for a in (B, companion, A)))
    results = [
        FunctionInspected(wanted(together, companion), companion, (gpu(A, 7), gpu("01:00.1", 7))),
        FunctionInspected(wanted(together), A, (gpu("01:00.1", 7),)),
        FunctionInspected(wanted(together, B), B, (gpu(B, has_node=False),)),
    ]
    one_by_one.feed(*(results[i] for i in order))
    together.feed(FunctionsInspected(tuple(results[i] for i in order)))
    assert together.state.host == one_by_one.state.host
    assert together.device_list() == one_by_one.device_list()


@pytest.mark.parametrize("enabled", [0, 1])
@pytest.mark.parametrize("driver", ["vfio-pci", None])
def test_a_call_is_answered_by_an_inspection_and_a_poll_that_come_together(
    enabled: int, driver: str | None
) -> None:
    """Of a call: it is granted, or refused as somebody else has the device, or it has lost its driver."""
    core = Core(gpu(A, 7), gpu(B, 8))
    core.pass_time(60)
    core.silent = True
    core.feed(allocate_call(A))
    outstanding = project(core.state).inspections.poll
    assert not outstanding.whole, "carried out together"
    poll = outstanding.poll
    assert poll is not None
    inspected = FunctionInspected(wanted(core), A, (gpu(A, 7, driver=driver),))
    use = GroupUse(7, {A: enabled}, frozenset([A] if enabled else []), None, None)
    answers = core.answers(inspected, SomeGroupsObserved(poll, (use,)))
    core.silent, core.enabled = False, {A: enabled}
    assert len(answers + core.answers(Ticked())) == 1


@pytest.mark.parametrize("known", [False, True], ids=["opened just now", "known to be open"])
def test_a_poll_with_an_inspection_counts_the_function_that_lost_its_driver(known: bool) -> None:
    """Its unbind waits for the process that has it open, which nothing has said yet: the group is in use."""
    core = Core(gpu(A, 7), gpu(B, 7))
    core.pass_time(60)
    if known:
        core.enabled[A] = 1
        core.pass_time(60)
    core.silent = True
    core.feed(allocate_call(B))
    poll = project(core.state).inspections.poll.poll
    assert poll is not None
    both = (gpu(A, 7, driver=None, has_node=True), gpu(B, 7))
    inspected = FunctionInspected(wanted(core, B), B, both)
    observed = SomeGroupsObserved(poll, (GroupUse(7, {A: 1, B: 0}, frozenset([A]), None, None),))
    assert not [a for a in core.answers(inspected, observed) if isinstance(a, Granted)]
    assert core.state.host.polls.groups[7].in_use
    assert not known or core.device_list()[B] == "Unhealthy"


def test_an_inspector_is_woken_by_what_is_outstanding_anew() -> None:
    before = InspectionsWanted(1, {A: 2}, frozenset(), PollWanted(3, ()))
    for more in (
        replace(before, scan=4),
        replace(before, functions={A: 4}),
        replace(before, functions={A: 2, B: 4}),
        replace(before, functions={B: 4}),
        replace(before, poll=PollWanted(4, ())),
    ):
        assert asks_more(before, more)
    for less in (
        replace(before, scan=None),
        replace(before, functions={}),
        replace(before, poll=NO_POLL),
        replace(before, given=frozenset({A})),
    ):
        assert not asks_more(before, less)


def test_a_stale_result_does_not_bring_back_what_a_later_inspection_found_gone() -> None:
    core = Core(gpu(A, 7), gpu("01:00.1", 7))
    core.feed(HostChanged(pci_address("0000:01:00.1"), None, "change pci"))
    older = wanted(core, "0000:01:00.1")
    core.feed(HostChanged(A, None, "remove pci"))
    core.feed(FunctionInspected(wanted(core), A, (gpu("01:00.1", 7),)))
    core.feed(FunctionInspected(older, pci_address("0000:01:00.1"), (gpu(A, 7), gpu("01:00.1", 7))))
    assert core.device_list() == {"0000:01:00.1": "Healthy"}


def test_a_scan_drops_what_it_does_not_name_but_keeps_what_was_inspected_after_it_was_requested() -> None:
    core = Core(gpu(A))
    core.feed(UeventsLost("overflow"))
    scan = core.scan
    core.feed(HostChanged(B, None, "bind pci"))
    core.feed(FunctionInspected(wanted(core, B), B, (gpu(B),)))
    core.feed(HostScanned(scan, ()))
    assert core.device_list() == {B: "Healthy"}


def test_a_failed_scan_changes_nothing_and_is_repeated_ever_more_slowly() -> None:
    core = Core(gpu(A))
    waits = []
    core.feed(UeventsLost("overflow"))
    for _ in range(8):
        scan = core.scan
        core.feed(ScanFailed(scan, "/sys is not mounted"))
        waits.append(inspections.deadline(core.state.host.inspections) - core.at)
        core.feed(Ticked(), after_s=waits[-1])
    assert waits == pytest.approx([*SCAN_BACKOFF_S, *SCAN_BACKOFF_S[-1:] * 2])
    assert core.device_list() == {A: "Healthy"}
    core.feed(HostScanned(core.scan, (gpu(A), gpu(B))))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert inspections.deadline(core.state.host.inspections) == core.at + 300.0, "back to the resync interval"


def test_resync_is_the_only_deadline_of_a_settled_node() -> None:
    core = Core(gpu(A), gpu(B))
    for plugin in core.state.published.plugins.values():
        assert plugin.retry_at is None
    assert inspections.deadline(core.state.host.inspections) == core.at + 300.0
    core.feed(Ticked(), after_s=300.0)
    assert core.state.host.inspections.whole.outstanding is not None
    assert math.isinf(inspections.deadline(core.state.host.inspections)), (
        "while the scan is out nothing else is due"
    )


def test_an_incomplete_inspection_is_repeated_ever_more_slowly() -> None:
    core = Core(gpu(A, has_node=False))
    assert core.device_list() == {A: "Unhealthy"}
    assert "/dev/vfio/1 does not exist" in core.reason(A)
    waits = []
    for _ in range(6):
        waits.append(inspections.deadline(core.state.host.inspections) - core.at)
        core.feed(Ticked(), after_s=waits[-1])
        core.feed(FunctionInspected(wanted(core), A, (gpu(A, has_node=False),)))
    assert waits == pytest.approx([*UNSETTLED_INSPECTIONS_S, *UNSETTLED_INSPECTIONS_S[-1:] * 2])


def test_an_incomplete_inspection_that_becomes_complete_ends_the_repeating() -> None:
    core = Core(gpu(A, has_node=False))
    core.feed(Ticked(), after_s=UNSETTLED_INSPECTIONS_S[0])
    core.feed(FunctionInspected(wanted(core), A, (gpu(A),)))
    assert core.device_list() == {A: "Healthy"}
    assert core.state.host.inspections.retries == {}


def test_an_inspection_that_fails_leaves_the_device_listed_with_the_failure_as_its_reason() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(HostChanged(A, None, "unbind pci"))
    core.feed(InspectionFailed(wanted(core), A, "sysfs did not answer within 5 s"))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == "sysfs did not answer within 5 s"


def test_a_function_that_cannot_be_read_keeps_its_identity_and_its_place_in_the_list() -> None:
    core = Core(gpu(A))
    fault = "cannot read /sys/bus/pci/devices/0000:01:00.0/vendor: Input/output error"
    unreadable = gpu(A, driver=None, device="", class_code="", model=None, fault=fault)
    core.feed(HostChanged(A, None, "change pci"))
    core.feed(FunctionInspected(wanted(core), A, (unreadable,)))
    assert core.device_list(H100) == {A: "Unhealthy"}
    assert core.reason(A) == fault


def test_a_function_whose_id_was_never_readable_is_no_device_but_is_said_once() -> None:
    nameless = gpu(B, device="", model=None, fault="cannot read device: Input/output error")
    core = Core(gpu(A), nameless)
    assert core.device_list() == {A: "Healthy"}
    assert list(core.state.published.plugins) == [H100]

    def said() -> list[tuple[object, object]]:
        lines = core.logged("function.unreadable")
        return [(line.fields["address"], line.fields["reason"]) for line in lines]

    assert said() == [], "it may be just being plugged in"
    for _ in range(3):
        core.feed(HostChanged(B, None, "change pci"))
        core.feed(FunctionInspected(wanted(core, B), B, (nameless,)))
        assert said() == [(B, nameless.fault)]
    core.feed(HostChanged(B, None, "change pci"))
    core.feed(FunctionInspected(wanted(core, B), B, (gpu(B),)))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


SHORT = "/sys/bus/pci/devices/0000:01:00.0/vendor could not be read: no file descriptors left"


def test_a_shortage_of_ours_is_no_devices_fault() -> None:
    """Issue 10, 4: a free GPU became Unhealthy because the daemon had no descriptors to inspect it."""
    core = Core(gpu(A), gpu(B))
    known = core.state.host.functions[A]
    core.feed(HostChanged(A, None, "change pci"))
    for _ in range(5):
        core.feed(InspectionFailed(wanted(core), A, SHORT, shortage=True))
        assert core.device_list() == {A: "Healthy", B: "Healthy"}
        assert core.reason(A) == f"free; last known state, it cannot be inspected now: {SHORT}"
        assert core.state.host.functions[A] is known
        core.pass_time(SHORTAGE_INSPECTION_S)  # every second, for as long as it lasts
    lines = [
        (e.level, e.fields["reason"])
        for e in core.effects
        if isinstance(e, Log) and e.name == "inspection.failed"
    ]
    assert lines == [(Level.WARNING, SHORT), *[(Level.DEBUG, SHORT)] * 4]
    core.feed(FunctionInspected(wanted(core), A, (gpu(A),)))
    assert (core.device_list(), core.reason(A)) == ({A: "Healthy", B: "Healthy"}, "free")


def test_what_has_changed_in_a_shortage_is_found_after_it() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(HostChanged(A, None, "unbind pci"))
    core.feed(InspectionFailed(wanted(core), A, SHORT, shortage=True))
    core.pass_time(SHORTAGE_INSPECTION_S)
    core.feed(FunctionInspected(wanted(core), A, (gpu(A, driver=None),)))
    assert core.device_list() == {B: "Healthy"}


def test_a_scan_that_began_before_the_shortage_does_not_stand_in_for_the_inspections_that_failed() -> None:
    """It shows the device as it was before the hint, and no other hint will come."""
    core = Core(gpu(A), gpu(B))
    core.feed(UeventsLost("overflow"))
    scan = core.scan
    core.feed(HostChanged(A, None, "remove pci"))
    core.feed(InspectionFailed(wanted(core), A, SHORT, shortage=True))
    core.feed(HostScanned(scan, (gpu(A), gpu(B))))
    core.pass_time(SHORTAGE_INSPECTION_S)
    core.feed(FunctionInspected(wanted(core), A, ()))
    assert core.device_list() == {B: "Healthy"}


def test_a_shortage_takes_no_fault_away() -> None:
    core = Core(gpu(A, fault="vendor reads nonsense"), gpu(B))
    core.feed(HostChanged(A, None, "change pci"))
    core.feed(InspectionFailed(wanted(core), A, SHORT, shortage=True))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A).startswith("vendor reads nonsense; last known state")


def test_a_failed_inspection_of_a_function_never_seen_before_is_repeated() -> None:
    """Found by the orders: the only hint of a new card came while inspections failed, and nothing was inspected
    again."""
    core = Core(gpu(A))
    core.feed(HostChanged(B, None, "bind pci"))
    core.feed(InspectionFailed(wanted(core, B), B, "I/O error"))
    core.feed(Ticked(), after_s=UNSETTLED_INSPECTIONS_S[0])
    core.feed(FunctionInspected(wanted(core, B), B, (gpu(B),)))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.state.host.inspections.retries == {}


@pytest.mark.parametrize(
    "event", [UeventsOpened(scan_begun=False), UeventsUnavailable("off", scan_begun=False)]
)
def test_a_scan_that_has_not_begun_shows_what_uevents_missed(
    event: UeventsOpened | UeventsUnavailable,
) -> None:
    core = Core()
    first = core.state.host.inspections.whole.outstanding
    core.feed(event)
    assert core.state.host.inspections.whole.outstanding == first
    assert first is not None
    core.feed(HostScanned(first, (gpu(A),)))
    assert core.state.host.inspections.whole.outstanding is None, "no second one follows"
    core.feed(event)
    assert core.state.host.inspections.whole.outstanding is not None, (
        "where none is outstanding one is wanted all the same"
    )


def test_that_uevents_are_not_heard_is_kept_and_said_once() -> None:
    core = Core(gpu(A))
    core.feed(UeventsUnavailable("EPERM"))
    assert core.state.host.uevents == "EPERM"
    core.feed(UeventsUnavailable("EPERM"))
    said = [e.level for e in core.logged("uevents.unavailable")]
    assert said == [Level.WARNING, Level.DEBUG]
    core.feed(UeventsOpened())
    assert core.state.host.uevents == ""
    core.feed(UeventsLost("ENOBUFS"))
    assert core.state.host.uevents == "", "some were lost, the next ones are heard"
