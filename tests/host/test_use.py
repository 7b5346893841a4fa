"""What is seen of the groups' use, with each way to find the holders, and what a read that hangs does to the others."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import inotify_simple
import pytest
import trio
import trio.testing
from msgspec.structs import replace

from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.model import GroupUse, Holder, PciAddress
from gpuactors.host import procfs, sysfs, use
from gpuactors.host.procfs import ProcReader
from gpuactors.host.root import HostRoot
from gpuactors.host.use import Holders, OpenNode, SysfsUse
from gpuactors.ports.node import UseReader
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.support.inline_host import InlineUse
from tests.support.patience import patient

SHORT_S = 0.5
PATIENCE_S = patient(10.0)
Kind = type[SysfsUse] | type[InlineUse]
KINDS = [SysfsUse, InlineUse]


def spec(number: int, function: int = 0) -> PciSpec:
    return PciSpec(f"0000:{number:02x}:00.{function}", "10de", "2330", "030200", number, driver="vfio-pci")


def address(number: int, function: int = 0) -> PciAddress:
    return PciAddress(spec(number, function).address)


def target(number: int, *, may_open: bool = False, functions: int = 1) -> PollTarget:
    return PollTarget(number, tuple(address(number, f) for f in range(functions)), may_open)


GPU, AUDIO = address(1), address(1, 1)
ALL = (target(1, functions=2), target(2), target(3))


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    """Groups 1 (a GPU and its audio function), 2 and 3."""
    tree = HostTree(tmp_path)
    for plugged in (spec(1), spec(1, 1), spec(2), spec(3)):
        tree.plug(plugged)
    return tree


def root(tree: HostTree) -> HostRoot:
    return HostRoot(str(tree.root))


async def observe(reader: UseReader, *targets: PollTarget) -> dict[int, GroupUse]:
    with trio.fail_after(PATIENCE_S):
        uses = await reader.observe(targets or ALL, whole=True)
    by_group = {use.group: use for use in uses}
    assert len(by_group) == len(uses)
    return by_group


# --- passive ----------------------------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_passive_follows_the_kernels_table(tree: HostTree, kind: Kind) -> None:
    reader = kind(root(tree), "passive")
    free = {2: GroupUse(2, {address(2): 0}, frozenset(), None, None)}
    assert await observe(reader, target(2)) == free
    tree.open_group(2, 4711, device=False)
    assert await observe(reader, target(2)) == free  # not to be seen in sysfs
    tree.open_device(address(2), 4711)
    held = {2: GroupUse(2, {address(2): 1}, frozenset({address(2)}), None, None)}
    assert await observe(reader, target(2)) == held
    tree.kill(4711)
    assert await observe(reader, target(2)) == free


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_of_a_mediated_devices_group_sysfs_says_nothing(tree: HostTree, kind: Kind) -> None:
    """A call waits for a word about the group."""
    own = PollTarget(70, (), may_open=False, cdevs=("vfio9",))
    assert await observe(kind(root(tree), "passive"), own) == {70: GroupUse(70, {}, frozenset(), None, None)}


@pytest.mark.trio
@pytest.mark.parametrize("node", ["vfio/70", "vfio/devices/vfio9"])
async def test_who_has_a_mediated_device_open_is_found_by_its_group_or_its_vfio_device(
    tree: HostTree, node: str
) -> None:
    tree.make_node("vfio/70")
    (tree.root / "dev/vfio/devices").mkdir(exist_ok=True)
    tree.make_node("vfio/devices/vfio9")
    own, other = PollTarget(70, (), may_open=False, cdevs=("vfio9",)), PollTarget(71, (), may_open=False)
    holder = tree.root / "proc/4711"
    (holder / "fd").mkdir(parents=True)
    (holder / "comm").write_text("qemu\n")
    (holder / "fd/3").symlink_to(tree.root / "dev" / node)
    uses = await observe(SysfsUse(root(tree), "proc"), own, other)
    assert uses[70].holders == (Holder(4711, "qemu", None),)
    assert uses[71].holders == ()


@pytest.mark.trio
async def test_each_function_of_a_group_is_told(tree: HostTree) -> None:
    tree.open_group(1, 4711, device=False)
    tree.open_device(AUDIO, 4711)
    uses = await observe(SysfsUse(root(tree), "passive"))
    assert (uses[1].enabled, uses[1].active) == ({GPU: 0, AUDIO: 1}, frozenset({AUDIO}))
    assert set(uses) == {1, 2, 3}


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_what_cannot_be_read_is_told_and_what_has_gone_is_left_out(tree: HostTree, kind: Kind) -> None:
    """Issue 10, 14: a group without a word was offered, and each Allocate of it refused after 12 s."""
    tree.remove_attribute(GPU, "enable")
    tree.set_attribute(address(2), "enable", b"nonsense")
    tree.unplug(address(3))
    uses = await observe(kind(root(tree), "passive"))
    assert set(uses) == {1, 2}
    assert uses[1].enabled == {AUDIO: 0}
    assert f"{GPU}/enable cannot be read (No such file or directory)" in uses[1].unseen
    assert uses[2].enabled == {}
    assert f"{address(2)}/enable reads something else" in uses[2].unseen
    assert all("look for" in use.unseen and "automatically" in use.unseen for use in uses.values())
    tree.set_attribute(GPU, "enable", b"0\n")
    assert (await observe(kind(root(tree), "passive")))[1].unseen == ""


@pytest.mark.trio
@pytest.mark.parametrize(
    ("status", "active"),
    [(b"active\n", True), (b"suspended\n", False), (b"resuming\n", True), (b"error\n", True), (None, True)],
)
async def test_only_suspended_is_not_active(tree: HostTree, status: bytes | None, active: bool) -> None:
    """The core takes the enable count of a suspended function as its baseline: nothing else may look like it."""
    if status is None:
        tree.remove_attribute(address(2), "power/runtime_status")
    else:
        tree.set_attribute(address(2), "power/runtime_status", status)
    uses = await observe(SysfsUse(root(tree), "passive"))
    assert uses[2].active == ({address(2)} if active else set())


@pytest.mark.trio
async def test_a_count_that_an_operator_wrote_is_told_as_suspended(tree: HostTree) -> None:
    tree.set_attribute(address(2), "enable", b"1\n")
    uses = await observe(SysfsUse(root(tree), "passive"))
    assert (uses[2].enabled, uses[2].active) == ({address(2): 1}, frozenset())


@pytest.mark.trio
async def test_a_holder_that_closes_between_two_reads_is_not_taken_for_an_operators_count(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.open_group(2, 4711)
    read = sysfs.read_attribute

    def close_meanwhile(path: str) -> bytes:
        content = read(path)
        if path.endswith(f"{address(2)}/enable") and tree.holder_of(2) is not None:
            tree.kill(4711)
        return content

    monkeypatch.setattr(use, "read_attribute", close_meanwhile)
    uses = await observe(InlineUse(root(tree), "passive"))
    assert (uses[2].enabled, uses[2].active) == ({address(2): 0}, frozenset())


@pytest.mark.trio
async def test_a_holder_that_opens_between_two_reads_is_seen_now_or_the_next_time(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = sysfs.read_attribute

    def open_meanwhile(path: str) -> bytes:
        content = read(path)
        if path.endswith(f"{address(2)}/enable") and tree.holder_of(2) is None:
            tree.open_group(2, 4711)
        return content

    monkeypatch.setattr(use, "read_attribute", open_meanwhile)
    uses = await observe(InlineUse(root(tree), "passive"))
    assert (uses[2].enabled, uses[2].active) == ({address(2): 0}, frozenset({address(2)}))


# --- proc -------------------------------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_proc_names_the_holder_of_a_group_whose_node_alone_is_open(tree: HostTree, kind: Kind) -> None:
    reader = kind(root(tree), "proc")
    assert {g: u.holders for g, u in (await observe(reader)).items()} == {1: (), 2: (), 3: ()}
    tree.open_group(2, 4711, device=False)
    tree.open_group(3, 4712, "vfio-user")
    reader = kind(root(tree), "proc")
    uses = await observe(reader)
    assert uses[2].holders == (Holder(4711, "qemu-system-x86", None),)
    assert uses[3].holders == (Holder(4712, "vfio-user", None),)
    assert uses[1].holders == ()
    tree.close_group(2, 4711)
    assert not (await observe(reader))[2].holders


@pytest.mark.trio
async def test_a_held_group_counts_although_sysfs_says_nothing(tree: HostTree) -> None:
    tree.open_group(2, 4711, device=False)
    tree.remove_attribute(address(2), "enable")
    assert (await observe(SysfsUse(root(tree), "proc")))[2].holders == (
        Holder(4711, "qemu-system-x86", None),
    )


@pytest.mark.trio
async def test_without_exhaustive_proc_no_holder_is_not_concluded(tree: HostTree) -> None:
    tree.open_group(2, 4711)
    (tree.root / "proc/7/fd").mkdir(parents=True)
    (tree.root / "proc/7/fd/5").symlink_to("anon_inode:[vfio-device]")
    uses = await observe(SysfsUse(root(tree), "proc"))
    assert (uses[1].holders, uses[2].holders is not None) == (None, True)


class Passes:
    """Counts the passes over /proc, and which PIDs each was limited to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.only: list[set[int] | None] = []
        find = ProcReader.find

        def counted(
            reader: ProcReader, targets: object, *, only: set[int] | None = None, **kwargs: object
        ) -> object:
            self.only.append(only)
            return find(reader, targets, only=only, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(ProcReader, "find", counted)
        # No second pass by time alone.
        monkeypatch.setattr(use, "PROC_SCAN_REST", 1e9)
        monkeypatch.setattr(use, "PROC_SCAN_REST_MAX_S", 1e9)

    def since(self) -> list[set[int] | None]:
        passes, self.only = self.only, []
        return passes


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


@pytest.fixture
def reader(tree: HostTree) -> SysfsUse:
    return SysfsUse(root(tree), "proc")


@pytest.mark.trio
async def test_all_processes_are_not_read_again_and_again(
    tree: HostTree, passes: Passes, reader: SysfsUse
) -> None:
    tree.open_group(2, 4711, device=False)
    await observe(reader)
    assert passes.since() == [None]

    uses = await observe(reader)
    assert passes.since() == [{4711}]
    assert uses[2].holders == (Holder(4711, "qemu-system-x86", None),)
    assert uses[1].holders is None  # not read this time

    tree.open_group(3, 4712)  # sysfs says so
    uses = await observe(reader)
    assert passes.since() == [None]
    assert [h.pid for h in uses[3].holders or ()] == [4712]

    tree.close_group(2, 4711)  # sysfs does not, the holder's descriptors do
    uses = await observe(reader)
    assert passes.since() == [{4711, 4712}, None]
    assert uses[2].holders == ()

    await observe(reader, target(2))  # other groups are asked for
    assert passes.since() == [None]


@pytest.mark.trio
async def test_a_poll_of_some_groups_forgets_nothing_of_the_others(
    tree: HostTree, passes: Passes, reader: SysfsUse
) -> None:
    tree.open_group(2, 4711, device=False)
    before = await observe(reader)
    tree.open_group(1, 4712)
    assert [use.group for use in await reader.observe((target(1, functions=2),), whole=False)] == [1]
    assert passes.since() == [None, None]
    assert (await observe(reader))[2].holders == before[2].holders
    assert passes.since() == [{4711, 4712}], "nothing is to be read again that is known"


@pytest.mark.trio
async def test_polls_of_some_groups_do_not_put_off_the_pass_over_all_processes(reader: SysfsUse) -> None:
    """A process that has another group open without its device is found only by that pass."""
    await observe(reader)
    due_at = reader._rested_at
    await reader.observe((replace(target(1), urgent=True),), whole=False)
    assert reader._rested_at == due_at


@pytest.mark.trio
async def test_a_group_is_held_until_its_holder_has_ended(tree: HostTree, reader: SysfsUse) -> None:
    """A process that ends loses its descriptors at once; the kernel closes them one after the other."""
    tree.open_group(2, 4711, device=False)
    before = (await observe(reader))[2].holders
    for descriptor in (tree.root / "proc/4711/fd").iterdir():
        descriptor.unlink()
    stat = tree.root / "proc/4711/task/4711/stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("4711 (qemu-system-x86) D 1")
    for _ in range(2):
        assert (await observe(reader))[2].holders == before
    stat.write_text("4711 (qemu-system-x86) Z 1")
    assert (await observe(reader))[2].holders == ()


@pytest.mark.trio
async def test_after_its_rest_all_processes_are_read_again(
    passes: Passes, reader: SysfsUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(use, "PROC_SCAN_REST", 0)
    for _ in range(3):
        await observe(reader)
    assert passes.since() == [None] * 3


@pytest.mark.trio
async def test_however_long_a_pass_took_it_rests_no_longer_than_promised(
    tree: HostTree, reader: SysfsUse, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    rest_s = use.PROC_SCAN_REST_MAX_S
    passes = Passes(monkeypatch)
    monkeypatch.setattr(use, "PROC_SCAN_REST_MAX_S", rest_s)
    await observe(reader)
    tree.open_group(2, 4711, device=False)
    mock_clock.jump(rest_s - 0.001)
    assert (await observe(reader))[2].holders is None
    assert passes.since() == [None, set()]
    mock_clock.jump(0.001)
    assert [h.pid for h in (await observe(reader))[2].holders or ()] == [4711]
    assert passes.since() == [None]


@pytest.mark.trio
async def test_a_call_that_waits_gets_a_pass_over_all_processes(
    tree: HostTree, passes: Passes, reader: SysfsUse
) -> None:
    """Found on a real kernel: a process that closed and opened again within the rest was not seen by Allocate."""
    await observe(reader)
    await observe(reader)
    assert passes.since() == [None, set()]
    tree.open_group(2, 4711, device=False)
    uses = await observe(reader, target(1), replace(target(2), urgent=True), target(3))
    assert passes.since() == [None]
    assert [h.pid for h in uses[2].holders or ()] == [4711]


# --- open -------------------------------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_open_is_a_last_resort(tree: HostTree, kind: Kind) -> None:
    tree.open_group(2, 4711, device=False)
    tree.open_group(3, 4712)
    reader = kind(root(tree), "open", open_node=tree.open_node)
    uses = await observe(reader, *(target(n, may_open=True) for n in (1, 2, 3)))
    assert {g: u.open_refused for g, u in uses.items()} == {1: False, 2: True, 3: None}
    assert tree.probed == ("/dev/vfio/1", "/dev/vfio/2")  # group 3 is seen to be used


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_group_that_is_another_cards_by_now_is_not_opened_and_nothing_is_known_of_it(
    tree: HostTree, kind: Kind
) -> None:
    """Found by a history: two cards were plugged in again and had swapped their groups, one of them a pod's."""
    reader = kind(root(tree), "open", open_node=tree.open_node)
    moved = PollTarget(2, (address(3),), may_open=True)
    gone = PollTarget(9, (address(9),), may_open=True)
    uses = await observe(reader, moved, gone, target(1, may_open=True, functions=2))
    assert tree.probed == ("/dev/vfio/1",)
    assert {g: u.open_refused for g, u in uses.items()} == {1: False}


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holders", ["passive", "proc", "open"])
async def test_nothing_is_opened_where_the_target_does_not_allow_it(
    tree: HostTree, kind: Kind, holders: Holders
) -> None:
    reader = kind(root(tree), holders, open_node=tree.open_node)
    tree.open_group(2, 4711, device=False)
    uses = await observe(reader)
    assert {u.open_refused for u in uses.values()} == {None}
    assert tree.probed == ()


@pytest.mark.trio
async def test_what_is_allowed_is_opened_with_open_alone(tree: HostTree) -> None:
    for reader in (
        SysfsUse(root(tree), "passive", open_node=tree.open_node),
        SysfsUse(root(tree), "proc", open_node=tree.open_node),
    ):
        await observe(reader, target(1, may_open=True))
    assert tree.probed == ()


@pytest.mark.trio
@pytest.mark.parametrize("holders", ["passive", "proc", "open"])
async def test_the_kernel_sees_no_open_either(tree: HostTree, holders: Holders) -> None:
    """As above, but with the real open, and inotify as the witness: /proc's links are followed without an open."""
    tree.open_group(2, 4711)
    nodes = [tree.root / f"dev/vfio/{n}" for n in (1, 2, 3)]
    with inotify_simple.INotify() as inotify:
        for node in nodes:
            inotify.add_watch(node, inotify_simple.flags.OPEN)
        await observe(SysfsUse(root(tree), holders))
        assert inotify.read(timeout=0) == []
        if holders == "open":
            uses = await observe(SysfsUse(root(tree), "open"), target(3, may_open=True))
            assert uses[3].open_refused is False
            assert len(inotify.read(timeout=0)) == 1


@pytest.mark.trio
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EPERM, errno.ENODEV])
async def test_any_other_refusal_says_nothing(tree: HostTree, number: int) -> None:
    def refuse(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    uses = await observe(SysfsUse(root(tree), "open", open_node=refuse), target(1, may_open=True))
    assert uses[1].open_refused is None


class Said:
    """A log that keeps what is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.reasons: list[str] = []
        monkeypatch.setattr(use, "_log", self)

    def warning(self, event: str, *, reason: str) -> None:
        self.events.append(event)
        self.reasons.append(reason)

    def info(self, event: str) -> None:
        self.events.append(event)


@pytest.mark.trio
async def test_what_open_lacks_is_said_once_until_it_is_there(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = PermissionError(errno.EPERM, "Operation not permitted", "/dev/vfio/1")
    answers = iter((refused, refused, None))

    def answer(path: str) -> None:
        if (error := next(answers)) is not None:
            raise error

    reader = SysfsUse(root(tree), "open", open_node=answer)
    said = Said(monkeypatch)
    await observe(reader, target(1))  # nothing was to be opened: that tells nothing
    for _ in range(3):
        await observe(reader, target(1, may_open=True))
    assert said.events == ["holders.unavailable", "holders.available"]
    assert f"{tree.root}/dev/vfio/* may not be opened (Operation not permitted)" in said.reasons[0]


@pytest.mark.trio
async def test_what_proc_lacks_is_said_once_until_it_is_there(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.open_group(1, 4711)
    tree.open_group(2, 4712)
    # Each observation is a pass over all processes.
    monkeypatch.setattr(use, "PROC_SCAN_REST", 0)
    listing, forbidden = os.listdir, {"4711", "4712"}

    def list_if_allowed(path: str) -> list[str]:
        if path.endswith("/fd") and path.split("/")[-2] in forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listing(path)

    monkeypatch.setattr(os, "listdir", list_if_allowed)
    reader = SysfsUse(root(tree), "proc")
    said = Said(monkeypatch)
    await observe(reader)
    forbidden.discard("4711")  # another process is the first that is refused: nothing new
    await observe(reader)
    forbidden.clear()
    await observe(reader)
    (tree.root / "proc").rename(tree.root / "elsewhere")
    await observe(reader)
    assert said.events == ["holders.unavailable", "holders.available", "holders.unavailable"]
    assert "may not be read (Permission denied)" in said.reasons[0]
    assert "/proc cannot be listed (No such file or directory)" in said.reasons[1]


@pytest.mark.trio
async def test_an_open_that_comes_too_late_is_not_done(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may have been handed out since it was allowed. The group is left out: nothing can be said of it."""
    monkeypatch.setattr(use, "OPEN_WITHIN_S", -1.0)
    reader = SysfsUse(root(tree), "open", open_node=tree.open_node)
    assert set(await observe(reader, target(1, may_open=True), target(2))) == {2}
    assert tree.probed == ()


# --- what hangs -------------------------------------------------------------------------------------------------


def polls() -> int:
    return sum(thread.name == "poll" for thread in threading.enumerate())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what threads do, which nothing announces."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 -- a thread's end sets no event
            await trio.sleep(0.001)


def hangs(uses: dict[int, GroupUse]) -> dict[int, bool]:
    """Which group is said to hang."""
    return {group: "hangs" in use.unseen for group, use in uses.items()}


@pytest.mark.trio
async def test_a_group_that_hangs_says_so_and_holds_up_the_others_once(tree: HostTree) -> None:
    await until(lambda: polls() == 0)
    reader = SysfsUse(root(tree), "passive", deadline_s=SHORT_S)
    tree.make_hang(address(2), "enable")
    assert hangs(await observe(reader)) == {1: False, 2: True}  # those before it
    for _ in range(3):
        assert hangs(await observe(reader)) == {1: False, 2: True, 3: False}
    assert polls() == 1
    tree.end_hang(address(2), "enable", b"0\n")
    await until(lambda: polls() == 0)
    assert hangs(await observe(reader)) == {1: False, 2: False, 3: False}


@pytest.mark.trio
async def test_a_group_does_not_hang_because_the_loop_is_late(tree: HostTree) -> None:
    await until(lambda: polls() == 0)
    reader, found = SysfsUse(root(tree), "passive", deadline_s=1.0), list[dict[int, bool]]()
    tree.make_hang(address(2), "enable")

    async def poll() -> None:
        found.append(hangs(await observe(reader)))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            await trio.testing.wait_all_tasks_blocked()
            time.sleep(1.1)  # noqa: ASYNC251 -- it holds up the loop
            await trio.testing.wait_all_tasks_blocked()
            tree.end_hang(address(2), "enable", b"0\n")
    assert list(found[0]) == [1, 2, 3]
    assert not found[0][3], "it was not given up at the group before"


@pytest.mark.trio
async def test_a_poll_that_has_ended_is_forgotten(tree: HostTree) -> None:
    """There is one every two seconds; whether it was carried out, beside inspections or by itself, or was too late."""
    reader = SysfsUse(root(tree), "passive")
    for _ in range(3):
        await observe(reader)
        carried_out, late = reader.begin(ALL), reader.begin(ALL)
        carried_out.run()
        carried_out.ended()
        for begun in (carried_out, late):
            assert len(await reader.result(begun)) == len(ALL)
    assert reader._hanging == []


@pytest.mark.trio
async def test_each_group_that_hangs_has_one_thread(tree: HostTree) -> None:
    await until(lambda: polls() == 0)
    reader = SysfsUse(root(tree), "passive", deadline_s=SHORT_S)
    tree.make_hang(address(2), "enable")
    tree.make_hang(address(3), "power/runtime_status")
    for _ in range(4):
        uses = await observe(reader)
    assert hangs(uses) == {1: False, 2: True, 3: True}
    assert polls() == 2
    tree.end_hang(address(2), "enable", b"0\n")
    tree.end_hang(address(3), "power/runtime_status", b"suspended\n")
    await until(lambda: polls() == 0)


@pytest.mark.trio
async def test_proc_that_hangs_leaves_what_sysfs_says(tree: HostTree) -> None:
    """And a group that was held by its node alone is left out: sysfs does not show whether it still is."""
    await until(lambda: polls() == 0)
    reader = SysfsUse(root(tree), "proc", deadline_s=SHORT_S)
    tree.open_group(2, 4711, device=False)
    tree.open_group(3, 4712)
    assert (await observe(reader))[2].holders
    for pid in (4711, 4712):
        os.unlink(tree.root / f"proc/{pid}/comm")
        os.mkfifo(tree.root / f"proc/{pid}/comm")
    for _ in range(3):
        uses = await observe(reader)
        assert set(uses) == {1, 3}
        assert (uses[3].holders, uses[3].enabled) == (None, {address(3): 1})
        assert polls() == 1
    for pid in (4711, 4712):
        path = tree.root / f"proc/{pid}/comm"
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        path.write_text("qemu\n")
        os.close(descriptor)
    await until(lambda: polls() == 0)
    assert [h.command for h in (await observe(reader))[2].holders or ()] == ["qemu"]


@pytest.mark.trio
async def test_what_was_given_up_opens_nothing_when_it_comes_back(tree: HostTree) -> None:
    await until(lambda: polls() == 0)
    reader = SysfsUse(root(tree), "open", open_node=tree.open_node, deadline_s=SHORT_S)
    tree.make_hang(address(2), "enable")
    uses = await observe(reader, *(target(n, may_open=True) for n in (1, 2, 3)))
    assert hangs(uses) == {2: True}
    tree.end_hang(address(2), "enable", b"0\n")
    await until(lambda: polls() == 0)
    assert tree.probed == ()


@pytest.mark.trio
async def test_a_cancelled_observation_is_left_alone(tree: HostTree) -> None:
    await until(lambda: polls() == 0)
    reader = SysfsUse(root(tree), "passive")
    tree.make_hang(address(2), "enable")
    with trio.fail_after(PATIENCE_S):
        with trio.move_on_after(SHORT_S) as scope:
            await reader.observe(ALL, whole=True)
        assert scope.cancelled_caught
        assert hangs(await observe(reader)) == {1: False, 2: True, 3: False}
        tree.end_hang(address(2), "enable", b"0\n")
        await until(lambda: polls() == 0)
        assert hangs(await observe(reader)) == {1: False, 2: False, 3: False}


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_not_swallowed(tree: HostTree, kind: Kind) -> None:
    def broken(path: str) -> None:
        raise RuntimeError("a bug")

    opens: OpenNode = broken
    with trio.fail_after(PATIENCE_S), pytest.raises(RuntimeError, match="a bug"):
        await kind(root(tree), "open", open_node=opens).observe((target(1, may_open=True),), whole=True)


def test_statx_is_there() -> None:
    """Else the pass over /proc would wait for dead file servers on this machine."""
    assert procfs._statx is not None


@pytest.mark.trio
@pytest.mark.parametrize("holders", ["passive", "proc"])
async def test_for_want_of_descriptors_nothing_is_said_of_any_group(
    tree: HostTree, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 10, 4: a shortage is no fault of a device, and nobody has let go."""
    tree.open_group(2, 4711, device=False)

    def short(*_args: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    reader = SysfsUse(root(tree), holders)
    held = await observe(reader)
    said = Said(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", short)
        patch.setattr(os, "listdir", short)
        for _ in range(2):
            assert await observe(reader) == {}
    assert said.events == ["host.short"]
    assert "EMFILE" in said.reasons[0]
    assert "LimitNOFILE" in said.reasons[0]
    assert (await observe(reader))[2] == held[2]


@pytest.mark.trio
@pytest.mark.parametrize("kind", KINDS)
async def test_an_observation_is_carried_out_by_another_reader_or_at_last_by_this_one(
    tree: HostTree, kind: Kind
) -> None:
    reader = kind(root(tree), "passive")
    tree.open_group(1, 4711)
    for is_carried_out in (True, False):
        observation = reader.begin((target(1, functions=2),))
        if is_carried_out:
            observation.run()
            observation.ended()
        assert observation.is_over is is_carried_out
        with trio.fail_after(PATIENCE_S):
            (use,) = await reader.result(observation)
        assert use.enabled[GPU] == 1
        observation.run()  # a thread that comes to it too late
        observation.ended()
