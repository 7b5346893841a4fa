"""What follows from the state is derived when its inputs change, and what is dear for what has changed alone."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from gpuactors import core as core_package
from gpuactors.core import step
from gpuactors.core.assessment import assess
from gpuactors.core.deviceplugin import calls
from gpuactors.core.devices import inventory
from gpuactors.core.events.host import HostChanged
from gpuactors.core.host import schedule, usage
from gpuactors.core.kinds import pci_function
from gpuactors.core.ledger import identity
from gpuactors.core.reports import snapshot
from gpuactors.core.reports.snapshot import report
from gpuactors.core.state import NodeState
from gpuactors.core.values import memo
from gpuactors.core.values.model import (
    AdvertisedDevice,
    PciAddress,
    PciFunction,
    device_key,
)
from gpuactors.limits import LEDGER_QUIET_S
from tests.core.builders import H100, SETTINGS, Core, allocate_call, audio, gpu
from tests.support.in_order import check_sorted

GPU, NEXT = PciAddress("0000:01:00.0"), PciAddress("0000:01:01.0")


def address(number: int) -> PciAddress:
    return PciAddress(f"0000:{number // 32 + 1:02x}:{number % 32:02x}.0")


def node(gpus: int, *, full: bool = False) -> Core:
    """A node at rest; `full`: a pod has each GPU but the first. What is carried is compared by its own tests here, not
    at every step."""
    settings = replace(SETTINGS, strict=False)
    core = Core(*(gpu(address(i), 100 + i) for i in range(gpus)), settings=settings)
    if full:
        core.ledger = {address(i): f"vm-{i}" for i in range(1, gpus)}
    core.pass_time(60)
    core.pass_time(core.state.host.polls.refresh.due_at - core.at)  # no poll of all groups is due soon
    return core


def allocate(core: Core) -> None:
    core.feed(allocate_call(GPU))
    core.ledger[GPU] = "vm-1"
    answers = core.answers(core.inspected(GPU, gpu(GPU, 100)))
    assert len(answers) == 1, "granted"
    core.pass_time(1)  # kubelet's ledger is read, which names it now


def late_bind(core: Core) -> None:
    core.feed(HostChanged(GPU, None, "unbind pci"))
    core.feed(core.inspected(GPU, gpu(GPU, 100, driver=None)))
    core.feed(HostChanged(GPU, None, "bind pci"))
    core.feed(core.inspected(GPU, gpu(GPU, 100)))
    assert core.device_list()[GPU] == "Healthy"


def ledger_read(core: Core) -> None:
    """One that says what the last one said, and no poll of all groups beside it."""
    core.silent = True
    core.state = schedule.ask_ledger(core.state, core.at)
    number = core.read
    core.feed(core.ledger_event(number))
    assert core.state.kubelet.ledger.done == number


def renamed_list(core: Core) -> None:
    """A pod has a device by an older plugin's ID: it is listed by that."""
    core.ledger["100"] = "vm-1"
    ledger_read(core)
    assert core.device_list()["100"] == "Healthy"


DEAR = (
    (pci_function, "is_selected"),
    (assess, "status_of"),
    (snapshot, "PollTarget"),
    (usage, "_observed"),
)
"""What runs only for the functions, devices and groups of which something changes."""


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each of these ran."""
    times: Counter[str] = Counter()

    def counting(module: Any, name: str) -> None:
        right: Callable[..., Any] = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            times[name.strip("_")] += 1
            return right(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    for module, name in DEAR:
        counting(module, name)
    yield times
    monkeypatch.undo()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("what", [allocate, late_bind, renamed_list, ledger_read])
def test_other_gpus_are_not_judged_again(
    full: bool, what: Callable[[Core], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are at 8 as at 256 GPUs, whether the others are free or in pods' hands."""
    few_and_many = list[Counter[str]]()
    for gpus in (8, 256):
        memo.forget()
        core = node(gpus, full=full)
        with counted(monkeypatch) as times:
            what(core)
        few_and_many.append(times)
    assert few_and_many[0] == few_and_many[1]


@pytest.mark.parametrize("gpus", [8, 256])
def test_a_start_judges_each_function_once(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs are in each group, which is assessed when the poll that the scan asks for is back."""
    functions = [gpu(address(n), group=n // 2) for n in range(gpus)]
    with counted(monkeypatch) as times:
        Core(*functions, settings=replace(SETTINGS, strict=False))
    groups = gpus // 2
    assert times == {"is_selected": gpus, "status_of": gpus, "PollTarget": groups, "observed": groups}


@contextmanager
def counted_bytecodes() -> Iterator[Counter[str]]:
    """How many of them the interpreter carries out in the core, by file."""
    of_core, before, found = os.path.dirname(step.__file__), sys.gettrace(), Counter[str]()

    def traced(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(of_core):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            found[frame.f_code.co_filename] += 1
        return traced

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for this of any frame when tracing begins
    sys.settrace(traced)
    try:
        yield found
    finally:
        sys.settrace(before)


def test_an_allocate_takes_as_much_for_each_other_gpu_however_many_there_are() -> None:
    """Each other one was just granted, and kubelet's ledger does not list it yet."""
    counts = list[int]()
    for gpus in (8, 32, 56):
        core = node(gpus)
        for number in range(1, gpus - 1):
            core.feed(allocate_call(address(number), token=number))
            core.feed(core.inspected(address(number), gpu(address(number), 100 + number)))
        assert len(core.state.kubelet.pending_allocations) == gpus - 2
        core.silent = True
        core.feed(allocate_call(GPU, token=gpus))
        inspection, poll = core.inspected(GPU, gpu(GPU, 100)), core.state.host.polls.refresh.outstanding
        assert poll is not None
        observation = core.poll_event(poll)
        with counted_bytecodes() as found:
            core.feed(inspection, observation)
        assert len(core.state.kubelet.pending_allocations) == gpus - 1, "granted"
        counts.append(found.total())
    few, more, many = counts
    assert 0 < many - more < 1.1 * (more - few)


def test_the_collector_of_cycles_goes_through_no_value_of_the_core() -> None:
    """None is part of a cycle, as each is made of values that were there before. With 256 GPUs the collector took
    100 µs of a call."""
    names = [
        found.name for found in pkgutil.walk_packages(core_package.__path__, f"{core_package.__name__}.")
    ]
    structs = {
        value
        for name in names
        for value in vars(import_module(name)).values()
        if isinstance(value, type) and issubclass(value, Struct) and value.__module__ == name
    }
    assert len(structs) > 200
    assert [struct for struct in structs if struct.__struct_config__.gc] == [NodeState], (
        "one object, which keeps what was derived of it"
    )


def test_a_state_keeps_what_was_derived_of_it_and_the_next_one_has_its_own() -> None:
    core = node(2)
    before = core.state
    index, assessments = before.index, before.assessments
    core.feed(allocate_call(GPU, token=1))
    core.feed(core.inspected(GPU, gpu(GPU, 100, driver=None)))
    assert (before.index, before.assessments) == (index, assessments)
    assert before.index is index
    assert before.assessments is assessments
    assert core.state.index != index
    assert replace(before).index == index


class Read(dict[Any, Any]):
    """Counts what is read of it, by key or one after the other."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        super().__init__(values)
        self.times = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.times += 1
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.times += 1
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.times += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in super().__iter__())


def test_a_call_that_comes_takes_no_bytecode_for_each_one_that_waits() -> None:
    """It brings no fact that they wait for, but of the first, which requests a read of kubelet's ledger."""
    counts = list[int]()
    for callers in (2, 32):
        core = node(64)
        core.silent = True
        core.feed(*(allocate_call(address(i), token=i) for i in range(callers)))
        with counted_bytecodes() as found:
            core.feed(allocate_call(address(callers), token=callers))
        assert len(core.state.calls.waiting) == callers + 1
        counts.append(found.total())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("gpus", [16, 256])
def test_calls_that_wait_poll_only_the_groups_of_their_own_devices(gpus: int) -> None:
    core, callers = node(gpus), 16
    core.silent = True
    core.feed(*(allocate_call(address(i), token=i) for i in range(callers)))
    core.feed(*(core.inspected(address(i), gpu(address(i), 100 + i)) for i in range(callers)))
    ledger_read(core)
    seen = Read(core.state.host.polls.seen)
    polls = replace(core.state.host.polls, seen=seen)
    state = replace(core.state, host=replace(core.state.host, polls=polls))
    assert calls.completed(state, core.at)[1] == [], "each waits for a poll"
    assert seen.times == callers


@pytest.mark.parametrize("event", [allocate, ledger_read])
def test_the_devices_of_other_plugins_are_looked_for_by_no_event(
    event: Callable[[Core], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's other plugins may have thousands of devices in kubelet's ledger, whose IDs mean nothing here."""
    core, looked_for = node(8), list[object]()

    def resolved_older(*names: object) -> dict[object, object]:
        looked_for.append(names)
        return {}

    core.others = {("example.org/nic", f"port-{i}"): f"pod-{i}" for i in range(100)}
    core.pass_time(LEDGER_QUIET_S)
    monkeypatch.setattr(identity, "_resolved_older", resolved_older)
    event(core)
    assert looked_for == []
    core.others = {(H100, "another-plugin's"): "pod"}
    ledger_read(core)
    assert looked_for, "one of a resource that is served here may be an older plugin's ID"


@pytest.mark.parametrize("gpus", [8, 256])
def test_a_report_goes_through_each_list_once(gpus: int) -> None:
    core, rounds = node(gpus), Counter[str]()

    class Entries(tuple[AdvertisedDevice, ...]):
        def __iter__(self) -> Iterator[AdvertisedDevice]:
            rounds["all"] += 1
            return super().__iter__()

        def __reversed__(self) -> Iterator[AdvertisedDevice]:
            rounds["all"] += 1
            return reversed(tuple(super().__iter__()))

    state = replace(
        core.state,
        published=replace(
            core.state.published,
            device_lists={r: Entries(listed) for r, listed in core.state.published.device_lists.items()},
        ),
    )
    assert state.index.devices
    rounds.clear()
    assert len(report(state)) == gpus
    assert rounds == {"all": 1}


def test_an_inspection_that_finds_what_is_known_derives_nothing_anew() -> None:
    core = Core(gpu(GPU), gpu(NEXT))
    core.pass_time(60)
    before = core.state.index
    core.feed(HostChanged(GPU, None, "change pci"))
    core.feed(core.inspected(GPU, gpu(GPU)))
    now = core.state.index
    assert core.state.host.seen[GPU].at == core.at
    for name in ("present", "groups", "names", "devices", "by_id", "owners", "polled"):
        assert getattr(now, name) is getattr(before, name), name


def test_another_function_of_its_group_is_part_of_a_device() -> None:
    core = Core(gpu(GPU, 7), audio("0000:01:00.1", 7), gpu(NEXT, 8))
    core.pass_time(60)
    before = core.state.index.devices
    core.feed(HostChanged(PciAddress("0000:01:00.1"), None, "unbind pci"))
    core.feed(core.inspected("0000:01:00.1", audio("0000:01:00.1", 7, driver=None), gpu(GPU, 7)))
    now = core.state.index.devices
    assert [key for key in now if now[key] != before[key]] == [device_key(GPU)]
    assert [m.driver for m in now[device_key(GPU)].members] == ["vfio-pci", None]


def test_a_function_that_has_turned_into_another_model_has_the_name_of_that() -> None:
    """A GPU that is swapped between two inspections."""
    core = Core(gpu(GPU), gpu(NEXT))
    core.pass_time(60)
    core.feed(HostChanged(GPU, None, "change pci"))
    core.feed(core.inspected(GPU, gpu(GPU, device="20b5", model="GA100 [A100 PCIe 80GB]")))
    names = core.state.index.names
    assert (names[device_key(GPU)], names[device_key(NEXT)]) == ("nvidia.com/GA100_A100_PCIE_80GB", H100)


@pytest.mark.parametrize(("first", "second"), [(GPU, NEXT), (NEXT, GPU)])
def test_the_names_are_in_the_order_of_the_addresses_whichever_came_first(
    first: PciAddress, second: PciAddress
) -> None:
    core = Core(gpu(first), settings=replace(SETTINGS, strict=False))
    core.feed(HostChanged(second, None, "add pci"))
    core.feed(core.inspected(second, gpu(second)))
    assert list(core.state.index.names) == [device_key(GPU), device_key(NEXT)]


@pytest.mark.parametrize("name", ["present", "names", "devices", "polled"])
def test_an_index_that_is_in_another_order_is_a_bug_that_is_found(name: str) -> None:
    core = Core(gpu(GPU, 7), gpu(NEXT, 8))
    core.pass_time(60)
    turned = dict(reversed(getattr(core.state.index, name).items()))
    assert len(turned) == 2
    with pytest.raises(AssertionError, match=f"{name} is not sorted"):
        check_sorted(replace(core.state.index, **{name: turned}))


def test_the_index_of_a_state_that_has_moved_on_is_of_that() -> None:
    core = Core(gpu(GPU), gpu(NEXT))
    core.pass_time(60)
    moved = replace(
        core.state,
        host=replace(core.state.host, functions={GPU: core.state.host.functions[GPU]}),
    )
    assert list(moved.index.devices) == [device_key(GPU)]
    assert list(core.state.index.devices) == [device_key(GPU), device_key(NEXT)]


def test_a_claim_of_another_driver_that_has_ended_is_no_owner_any_more() -> None:
    core = Core(gpu(GPU), gpu(NEXT))
    core.claims = {"gpu-0000-01-00-0": "train"}
    core.pass_time(LEDGER_QUIET_S)
    assert list(core.state.index.owners) == [device_key(GPU)]
    core.claims = {}
    core.pass_time(LEDGER_QUIET_S)
    assert core.state.index.owners == {}


def test_a_function_that_begins_to_leave_its_driver_is_polled() -> None:
    core = Core(gpu(GPU, 7), gpu(NEXT, 7, driver=None))
    core.pass_time(60)
    polls = replace(core.state.host.polls, leaving=frozenset({NEXT}))
    assert NEXT not in core.state.index.polled[7]
    begun = replace(core.state, host=replace(core.state.host, polls=polls))
    assert list(begun.index.polled[7]) == [GPU, NEXT]


class Counting(dict[PciAddress, PciFunction]):
    """Counts how often all of it is gone through."""

    rounds = 0

    def values(self) -> Any:
        self.rounds += 1
        return super().values()


@pytest.mark.parametrize("gpus", [4, 32, 256])
def test_a_start_goes_through_the_functions_a_few_times_however_many_groups_they_are_in(gpus: int) -> None:
    """It went through all of them for each group: 56 ms with 512 GPUs."""
    found = [gpu(address(n), group=n // 2) for n in range(gpus)]
    functions = Counting({f.address: f for f in found})
    known = inventory.inventory_of(functions, {}, SETTINGS.selectors)
    assert functions.rounds <= 4
    assert known.groups == {n: (found[2 * n], found[2 * n + 1]) for n in range(gpus // 2)}


def test_a_function_that_moves_to_another_group_leaves_its_own() -> None:
    """After a reboot of the IOMMU's numbers, or a hot plug into another slot."""
    first, second, moved = gpu(address(1), 11), gpu(address(2), 12), gpu(address(1), 12)
    before = inventory.inventory_of({address(1): first, address(2): second}, {}, SETTINGS.selectors)
    assert before.groups == {11: (first,), 12: (second,)}
    now = inventory.inventory_of({address(1): moved, address(2): second}, {}, SETTINGS.selectors)
    assert now.groups == {12: (moved, second)}
