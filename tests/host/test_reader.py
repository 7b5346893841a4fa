"""The reader in threads: deadlines, and what a read that hangs does to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from gpuactors.core.values.mediated import functions_of
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.core.values.selector import parse_selector
from gpuactors.host import reader as reader_module
from gpuactors.host import threads
from gpuactors.host.mdev import PartsReader
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.reader import INSPECTION_CONCURRENCY, ThreadedReader
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.threads import start_thread
from gpuactors.ports.errors import HostError, HostShortError
from gpuactors.ports.node import HostReader
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.support.inline_host import InlineReader
from tests.support.patience import patient

SHORT_S = 0.05
"""A deadline for reads that hang; a sound read takes a thousandth of a test's patience."""

PATIENCE_S = patient(10.0)


def sysfs(tree: HostTree) -> PartsReader:
    root = HostRoot(str(tree.root))
    return PartsReader(root, SysfsReader(root, (parse_selector("vendor=10de"),), PciIds.open(None)))


def spec(number: int) -> PciSpec:
    return PciSpec(f"0000:{number:02x}:00.0", "10de", "2330", "030200", number, driver="vfio-pci")


def address(number: int) -> PciAddress:
    return PciAddress(spec(number).address)


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    for number in range(INSPECTION_CONCURRENCY + 2):
        tree.plug(spec(number))
    return tree


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what threads do, which nothing announces."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 -- a thread's end sets no event
            await trio.sleep(0.001)


@pytest.mark.trio
@pytest.mark.parametrize("kind", [ThreadedReader, InlineReader])
async def test_answers_what_sysfs_says(tree: HostTree, kind: Callable[[PartsReader], HostReader]) -> None:
    reader = kind(sysfs(tree))
    with trio.fail_after(PATIENCE_S):
        assert await reader.scan() == sysfs(tree).scan()
        assert await reader.inspect(address(3)) == sysfs(tree).inspect(address(3)) != ()


@pytest.mark.trio
@pytest.mark.parametrize("kind", [ThreadedReader, InlineReader])
async def test_passes_errors_on(tmp_path: Path, kind: Callable[[PartsReader], HostReader]) -> None:
    root = HostRoot(str(tmp_path))
    reader = kind(PartsReader(root, SysfsReader(root, (), PciIds.open(None))))
    with trio.fail_after(PATIENCE_S), pytest.raises(HostError, match="--host-root"):
        await reader.scan()


@pytest.mark.trio
async def test_an_inspection_that_hangs_is_given_up_with_its_reason(tree: HostTree) -> None:
    reader = ThreadedReader(sysfs(tree), inspection_deadline_s=SHORT_S)
    tree.make_hang(address(1), "device")
    with (
        trio.fail_after(PATIENCE_S),
        pytest.raises(HostError, match=r"0000:01:00\.0 did not end within 0\.05 s"),
    ):
        await reader.inspect(address(1))
    tree.end_hang(address(1), "device", b"0x2330\n")


@pytest.mark.trio
async def test_a_scan_that_hangs_is_given_up_and_holds_up_no_look(tree: HostTree) -> None:
    reader = ThreadedReader(sysfs(tree), scan_deadline_s=SHORT_S)
    tree.make_hang(address(1), "device")
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(HostError, match=r"scan .* did not end within 0\.05 s"):
            await reader.scan()
        assert len(await reader.inspect(address(2))) == 1
    tree.end_hang(address(1), "device", b"0x2330\n")


ANSWERS = {"vendor": b"0x10de\n", "device": b"0x2330\n", "class": b"0x030200\n", "numa_node": b"-1\n"}
"""What the kernel says in the end."""


def scans() -> int:
    return sum(thread.name == "scan" for thread in threading.enumerate())


@pytest.mark.trio
@pytest.mark.parametrize("name", ["vendor", "device", "class", "numa_node"])
async def test_a_function_that_never_answers_costs_a_scan_that_function_only(
    tree: HostTree, name: str
) -> None:
    """Issue 24, 4: no GPU was served, 100 s and on."""
    reader = ThreadedReader(sysfs(tree), scan_function_s=SHORT_S)
    expected = functions_of(sysfs(tree).scan())
    tree.make_hang(address(1), name)
    tree.make_hang(address(5), name)
    with trio.fail_after(PATIENCE_S):
        for _ in range(3):
            found = functions_of(await reader.scan())
            assert [f.address for f in found] == [f.address for f in expected]
            assert [f for f in found if f.fault is None] == [
                f for f in expected if f.address not in (address(1), address(5))
            ]
            for silent in (found[1], found[5]):
                assert silent.fault is not None
                assert silent.fault.endswith("it is read again automatically")
                assert f"{silent.address} does not answer" in silent.fault
                assert (silent.iommu_group, silent.driver) == (int(silent.address[5:7], 16), "vfio-pci")
            assert scans() == 2, "a thread for each that hangs, however often it is scanned"
        for hangs in (1, 5):
            tree.end_hang(address(hangs), name, ANSWERS[name])
        await until(lambda: scans() == 0)
        assert await reader.scan() == expected


@pytest.mark.trio
async def test_a_companion_that_never_answers_is_in_its_group_all_the_same(tree: HostTree) -> None:
    """Else the GPU would be given away without what else is in its group."""
    audio = PciSpec("0000:02:00.1", "10df", "22ba", "040300", 2, driver="snd_hda_intel")
    tree.plug(audio)
    tree.make_hang(audio.address, "vendor")
    reader = ThreadedReader(sysfs(tree), scan_function_s=SHORT_S)
    with trio.fail_after(PATIENCE_S):
        found = {function.address: function for function in functions_of(await reader.scan())}
    companion = found[PciAddress(audio.address)]
    assert (companion.iommu_group, companion.driver, companion.fault is None) == (2, "snd_hda_intel", False)
    assert found[address(2)].fault is None
    tree.end_hang(audio.address, "vendor", b"0x10df\n")


@pytest.mark.trio
async def test_scans_that_hang_are_bounded(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "SCANS_HANGING_MAX", 3)
    reader = ThreadedReader(sysfs(tree), scan_function_s=0.01)
    for number in range(5):
        tree.make_hang(address(number), "vendor")
    with trio.fail_after(PATIENCE_S):
        for _ in range(3):
            with pytest.raises(HostError, match="3 functions do not answer"):
                await reader.scan()
        assert scans() == 3
        assert (await reader.inspect(address(7)))[0].fault is None
    for number in range(5):
        tree.end_hang(address(number), "vendor", b"0x10de\n")
    await until(lambda: scans() == 0)


@pytest.mark.trio
async def test_hanging_inspections_use_up_no_slots(tree: HostTree) -> None:
    """More functions hang than there are slots, and the next inspection returns all the same."""
    reader = ThreadedReader(sysfs(tree), inspection_deadline_s=1.0)
    hanging = [address(number) for number in range(INSPECTION_CONCURRENCY + 1)]
    for hangs in hanging:
        tree.make_hang(hangs, "device")

    async def give_up(at: PciAddress) -> None:
        with pytest.raises(HostError):
            await reader.inspect(at)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for hangs in hanging:
                nursery.start_soon(give_up, hangs)
        assert len(await reader.inspect(address(INSPECTION_CONCURRENCY + 1))) == 1
    for hangs in hanging:
        tree.end_hang(hangs, "device", b"0x2330\n")


@pytest.mark.trio
async def test_inspections_that_hang_hold_up_no_other_until_their_deadline(tree: HostTree) -> None:
    """More of them than slots: the queue before an inspection is no part of what it is late for."""
    reader, late = ThreadedReader(sysfs(tree), inspection_deadline_s=patient(2.0)), list[PciAddress]()
    hanging = [address(number) for number in range(INSPECTION_CONCURRENCY + 1)]
    for hangs in hanging:
        tree.make_hang(hangs, "device")

    async def inspect(at: PciAddress) -> None:
        try:
            await reader.inspect(at)
        except HostError:
            late.append(at)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for hangs in hanging:
                nursery.start_soon(inspect, hangs)
            await trio.testing.wait_all_tasks_blocked()
            assert len(await reader.inspect(address(INSPECTION_CONCURRENCY + 1))) == 1
            late_before = list(late)
            for hangs in hanging:
                tree.end_hang(hangs, "device", b"0x2330\n")
    assert late_before == []


@pytest.mark.trio
async def test_an_inspection_is_not_late_because_the_loop_is(tree: HostTree) -> None:
    """As while the registry works on what a thousand claims bring, or the process has no processor time."""
    reader, found = ThreadedReader(sysfs(tree), inspection_deadline_s=0.2), list[PciFunction]()
    tree.make_hang(address(1), "device")

    async def inspect() -> None:
        found.extend(functions_of(await reader.inspect(address(1))))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inspect)
            await trio.testing.wait_all_tasks_blocked()
            tree.end_hang(address(1), "device", b"0x2331\n")
            time.sleep(0.4)  # noqa: ASYNC251 -- it holds up the loop
    assert [function.address for function in found] == [address(1)]


@pytest.mark.trio
async def test_an_inspection_whose_thread_does_not_begin_is_no_read_that_hangs(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, turn = ThreadedReader(sysfs(tree), inspection_deadline_s=SHORT_S), threading.Event()

    def start(call: Callable[[], object], end: Callable[[object], None], *, name: str) -> None:
        start_thread(lambda: turn.wait(PATIENCE_S) and call(), end, name=name)

    monkeypatch.setattr(threads, "start_thread", start)
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(HostShortError, match=r"thread has not begun within 0\.05 s.*no processor time"):
            await reader.inspect(address(1))
        turn.set()
        await until(lambda: not reader._threads)
        assert len(await reader.inspect(address(1))) == 1


@pytest.mark.trio
async def test_looking_again_at_what_hangs_starts_no_second_thread(tree: HostTree) -> None:
    reader = ThreadedReader(sysfs(tree), inspection_deadline_s=SHORT_S)
    tree.make_hang(address(1), "device")

    def stuck() -> int:
        return sum(thread.name == f"inspect {address(1)}" for thread in threading.enumerate())

    with trio.fail_after(PATIENCE_S):
        for _ in range(4):
            with pytest.raises(HostError):
                await reader.inspect(address(1))
    assert stuck() == 1

    # Once the kernel answers, the next inspection finds what is there now, not what the hanging one read.
    tree.end_hang(address(1), "device", b"0x2331\n")
    await until(lambda: stuck() == 0)
    (function,) = functions_of(await reader.inspect(address(1)))
    assert (function.device, function.fault) == ("2331", None)


@pytest.mark.trio
async def test_a_cancelled_inspection_is_left_alone(tree: HostTree) -> None:
    reader = ThreadedReader(sysfs(tree))
    tree.make_hang(address(1), "device")
    with trio.fail_after(PATIENCE_S):
        with trio.move_on_after(SHORT_S) as scope:
            await reader.inspect(address(1))
        assert scope.cancelled_caught
        tree.end_hang(address(1), "device", b"0x2330\n")
        (function,) = functions_of(await reader.inspect(address(1)))
    assert function.device == "2330"


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that the reader starts from now on."""
    started: list[str] = []

    def start(call: Callable[[], object], end: Callable[[object], None], *, name: str) -> None:
        started.append(name)
        start_thread(call, end, name=name)

    monkeypatch.setattr(reader_module, "start_thread", start)
    return started


@pytest.mark.trio
@pytest.mark.parametrize("kind", [ThreadedReader, InlineReader])
async def test_several_functions_are_inspected_in_one_thread(
    tree: HostTree, kind: Callable[[PartsReader], HostReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, reader = _counted(monkeypatch), kind(sysfs(tree))
    asked = [address(number) for number in range(8)]
    with trio.fail_after(PATIENCE_S):
        found = await reader.inspect_all(asked)
    assert found == {a: sysfs(tree).inspect(a) for a in asked}
    assert started == ["inspect"] * (kind is ThreadedReader)


class Beside:
    """Implements `ports.node.Observation`: notes in which thread it was carried out."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.over = trio.Event()

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def run(self) -> None:
        self.threads.append(threading.current_thread().name)

    def ended(self) -> None:
        self.over.set()


@pytest.mark.trio
async def test_what_is_carried_out_beside_inspections_needs_no_thread_of_its_own(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, reader, beside = _counted(monkeypatch), ThreadedReader(sysfs(tree)), Beside()
    with trio.fail_after(PATIENCE_S):
        assert len(await reader.inspect_all([address(0), address(1)], (), beside)) == 2
    assert (beside.threads, beside.is_over, started) == (["inspect"], True, ["inspect"])


@pytest.mark.trio
async def test_nothing_is_begun_beside_an_inspection_that_hangs(tree: HostTree) -> None:
    reader, beside = ThreadedReader(sysfs(tree), inspection_stall_s=SHORT_S), Beside()
    tree.make_hang(address(0), "device")
    with trio.fail_after(PATIENCE_S):
        assert await reader.inspect_all([address(0)], (), beside) == {}
        assert not beside.is_over
        tree.end_hang(address(0), "device", b"0x2331\n")
        await beside.over.wait()
    assert beside.threads == []


@pytest.mark.trio
async def test_one_that_hangs_among_several_is_left_out_with_those_after_it(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _counted(monkeypatch)
    reader = ThreadedReader(sysfs(tree), inspection_deadline_s=SHORT_S, inspection_stall_s=SHORT_S)
    tree.make_hang(address(1), "device")
    asked = [address(number) for number in range(4)]
    with trio.fail_after(PATIENCE_S):
        while address(1) not in reader._threads:
            assert (await reader.inspect_all(asked)).keys() <= {address(0)}
        while (await reader.inspect_all(asked)).keys() != {address(0), address(2), address(3)}:
            assert address(1) in reader._threads
        began = len(started)
        assert await reader.inspect_all([address(1)]) == {}
        with pytest.raises(HostError, match="did not end"):
            await reader.inspect(address(1))
        assert len(started) == began, "no thread for what hangs already"
        assert len(await reader.inspect(address(2))) == 1
    tree.end_hang(address(1), "device", b"0x2331\n")
    with trio.fail_after(PATIENCE_S):
        await until(lambda: not reader._threads)
        found = (await reader.inspect_all(asked))[address(1)]
    assert not isinstance(found, HostError)
    assert [function.device for function in functions_of(found)] == ["2331"]
