"""The fake kernel binds, refuses and sleeps as the kernel does; for a real process it does so a moment later."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from gpuactors.acts.blocking_runner import in_a_thread
from gpuactors.acts.driver import SysfsBinder
from gpuactors.acts.persistenced import Persistenced
from gpuactors.acts.writes import ProcessWrites
from gpuactors.core.values.claim import ActFault, OriginalDriver, Target
from gpuactors.core.values.model import PciAddress
from gpuactors.host.root import HostRoot
from gpuactors.ports.claims import ActError
from gpuactors_simulation.host.kernel import FakeKernel, Planned, SleepsError
from gpuactors_simulation.host.tree import HostTree, PciSpec, Uevent
from tests.memory.watch import WriteWatcher
from tests.support.patience import patient

PATIENCE_S = patient(30.0)
GPU, AUDIO = PciAddress("0000:23:00.0"), PciAddress("0000:23:00.1")
FIRSTS = (OriginalDriver(GPU, "nvidia"), OriginalDriver(AUDIO, "snd_hda_intel"))
DRIVERS = "sys/bus/pci/drivers"


class Node:
    def __init__(self, root: Path, *, silent: bool = False) -> None:
        self.uevents: list[Uevent] = []
        self.tree = HostTree(root, waits_silently=silent)
        self.kernel = FakeKernel(self.tree, deliver=self.uevents.extend)
        self.kernel.plug(PciSpec(GPU, "10de", "2330", "030200", 51, driver="nvidia"))
        self.kernel.plug(PciSpec(AUDIO, "10de", "22ba", "040300", 51, driver="snd_hda_intel"))

    def write(self, path: str, text: str) -> None:
        self.kernel.write(f"{self.tree.root}/{path}", text)

    def override(self, text: str, address: str = GPU) -> None:
        self.write(f"sys/bus/pci/devices/{address}/driver_override", text)

    def attribute(self, name: str) -> str:
        return (self.tree.root / f"sys/bus/pci/devices/{GPU}" / name).read_text()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_an_override_is_shown_and_changes_no_binding(node: Node) -> None:
    assert node.attribute("driver_override") == "(null)\n"
    assert node.attribute("modalias") == "pci:v000010DEd00002330sv000010DEsd00002330bc03sc02i00\n"
    before = len(node.uevents)
    node.override("vfio-pci\n")
    assert node.attribute("driver_override") == "vfio-pci\n"
    node.override("\n")
    assert node.attribute("driver_override") == "(null)\n"
    assert node.tree.driver_of(GPU) == "nvidia"
    assert len(node.uevents) == before


def test_unbind_and_bind_move_the_links_and_send_the_uevents(node: Node) -> None:
    node.override("vfio-pci\n")
    before = len(node.uevents)
    node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    node.write(f"{DRIVERS}/vfio-pci/bind", f"{GPU}\n")
    assert [f"{u.action} {u.subsystem}" for u in node.uevents[before:]] == [
        "unbind pci",
        "add vfio",
        "add vfio-dev",
        "bind pci",
    ]
    assert node.tree.driver_of(GPU) == "vfio-pci"


@pytest.mark.parametrize(
    ("path", "text", "number"),
    [
        (f"{DRIVERS}/vfio-pci/unbind", GPU, errno.ENODEV),  # on another driver
        (f"{DRIVERS}/vfio-pci/bind", GPU, errno.EBUSY),  # on another driver
        (f"{DRIVERS}/nvidia/bind", "0000:99:00.0", errno.ENODEV),
        ("sys/bus/pci/drivers_probe", "0000:99:00.0", errno.ENODEV),
        (f"{DRIVERS}/nouveau/bind", GPU, errno.ENOENT),
    ],
)
def test_the_kernels_errors(node: Node, path: str, text: str, number: int) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        node.write(path, f"{text}\n")
    assert caught.value.errno == number
    assert node.tree.driver_of(GPU) == "nvidia"


def test_vfio_takes_nothing_without_an_override_and_nothing_without_an_iommu(node: Node) -> None:
    node.kernel.plug(PciSpec("0000:30:00.0", "10de", "2330", "030200", None))
    node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    for address, number in ((GPU, errno.ENODEV), ("0000:30:00.0", errno.EINVAL)):
        if address != GPU:
            node.override("vfio-pci\n", address)
        with pytest.raises(OSError, match=r".") as caught:
            node.write(f"{DRIVERS}/vfio-pci/bind", f"{address}\n")
        assert caught.value.errno == number


def test_a_probe_gives_a_function_to_its_override_or_to_who_knows_its_id(node: Node) -> None:
    node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    node.write("sys/bus/pci/drivers_probe", f"{GPU}\n")
    assert node.tree.driver_of(GPU) == "nvidia"
    node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    node.override("vfio-pci\n")
    node.write("sys/bus/pci/drivers_probe", f"{GPU}\n")
    assert node.tree.driver_of(GPU) == "vfio-pci"
    node.override("nowhere\n")
    node.write(f"{DRIVERS}/vfio-pci/unbind", f"{GPU}\n")
    node.write("sys/bus/pci/drivers_probe", f"{GPU}\n")  # nobody takes it: no error
    assert node.tree.driver_of(GPU) is None


def test_nvidias_driver_waits_for_its_last_user_and_the_link_is_gone_at_once(node: Node) -> None:
    node.kernel.use(GPU, 99)
    with pytest.raises(SleepsError):
        node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    assert node.tree.driver_of(GPU) is None
    assert node.uevents[-1].action == "bind"
    assert node.kernel.sleeps(GPU)
    with pytest.raises(SleepsError):
        node.override("vfio-pci\n")
    node.kernel.end(99)
    assert not node.kernel.sleeps(GPU)
    assert node.uevents[-1].action == "unbind"
    assert GPU not in node.kernel.minors
    assert (node.tree.root / "dev/nvidia0").exists()


@pytest.mark.parametrize("silent", [False, True])
def test_while_a_virtual_machine_has_it_the_unbind_sleeps_and_so_does_who_reads_on_an_old_kernel(
    tmp_path: Path, silent: bool
) -> None:
    node = Node(tmp_path, silent=silent)
    for address, driver in ((GPU, "nvidia"), (AUDIO, "snd_hda_intel")):
        node.write(f"{DRIVERS}/{driver}/unbind", f"{address}\n")
        node.override("vfio-pci\n", address)
        node.write(f"{DRIVERS}/vfio-pci/bind", f"{address}\n")
    node.tree.open_group(51, 77)
    with pytest.raises(SleepsError):
        node.write(f"{DRIVERS}/vfio-pci/unbind", f"{GPU}\n")
    path = f"{node.tree.root}/sys/bus/pci/devices/{GPU}/driver_override"
    if silent:
        with pytest.raises(SleepsError):
            node.kernel.read(path)
    else:
        assert node.kernel.read(path) == "vfio-pci\n"
    node.kernel.end(77)
    assert node.attribute("driver_override") == "vfio-pci\n"
    assert node.tree.driver_of(GPU) is None


def test_no_driver_of_the_host_gets_into_a_group_of_which_a_process_has_a_device(node: Node) -> None:
    node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    node.override("vfio-pci\n")
    node.write(f"{DRIVERS}/vfio-pci/bind", f"{GPU}\n")
    node.write(f"{DRIVERS}/snd_hda_intel/unbind", f"{AUDIO}\n")
    node.tree.open_group(51, 77)
    with pytest.raises(OSError, match=r".") as caught:
        node.write(f"{DRIVERS}/snd_hda_intel/bind", f"{AUDIO}\n")
    assert caught.value.errno == errno.EBUSY
    node.kernel.end(77)
    node.write(f"{DRIVERS}/snd_hda_intel/bind", f"{AUDIO}\n")
    assert node.tree.driver_of(AUDIO) == "snd_hda_intel"


def test_planned_faults_strike_as_often_as_planned(node: Node) -> None:
    node.kernel.plan(Planned("nvidia/unbind", error=errno.EINVAL, times=2))
    path = f"{node.tree.root}/{DRIVERS}/nvidia/unbind"
    for _ in range(2):
        with pytest.raises(OSError, match="Invalid"):
            node.kernel.write(path, f"{GPU}\n", node.kernel.take(path))
    node.kernel.write(path, f"{GPU}\n", node.kernel.take(path))
    assert node.tree.driver_of(GPU) is None


# --- for a real process -------------------------------------------------------------------------------------------


def binder(node: Node, locks: Path, deadline_s: float = PATIENCE_S) -> SysfsBinder:
    """All of it as in production: a process that writes real files, looks in threads, the real clock."""
    root = HostRoot(str(node.tree.root))
    return SysfsBinder(
        root,
        ProcessWrites(str(locks), deadline_s=deadline_s),
        Persistenced(root, "/run/nvidia/driver"),
        in_a_thread,
    )


def drivers(node: Node) -> list[str | None]:
    return [node.tree.driver_of(address) for address in (GPU, AUDIO)]


async def test_a_real_process_binds_and_returns_the_gpu_of_a_fake_tree(node: Node, tmp_path: Path) -> None:
    watcher = WriteWatcher(node.kernel)
    with watcher.serving(), trio.fail_after(PATIENCE_S):
        ours = binder(node, tmp_path / "locks")
        found = await ours.bring(GPU, Target.VFIO, FIRSTS)
        assert [(f.driver, f.iommu_group) for f in found] == [("vfio-pci", 51), ("vfio-pci", 51)]
        await ours.bring(GPU, Target.ORIGINAL_DRIVER, FIRSTS)
    assert drivers(node) == ["nvidia", "snd_hda_intel"]
    assert [text for path, text in watcher.written if path.endswith("bind")] == [
        f"{address}\n" for address in (GPU, GPU, AUDIO, AUDIO, AUDIO, AUDIO, GPU, GPU)
    ]


def test_a_write_that_fails_after_its_sleep_fails_for_its_writer_and_for_nobody_else(node: Node) -> None:
    node.write(f"{DRIVERS}/nvidia/unbind", GPU)
    node.kernel.plan(Planned("/vfio-pci/bind", hangs=True))
    node.kernel.load("vfio-pci")
    path = f"{node.tree.root}/{DRIVERS}/vfio-pci/bind"
    with pytest.raises(SleepsError):
        node.kernel.write(path, GPU, node.kernel.take(path))
    node.kernel.release()  # no override: the driver does not match
    late = node.kernel.late_error(GPU)
    assert late is not None
    assert late.errno == errno.ENODEV
    assert node.kernel.late_error(GPU) is None


async def test_a_real_write_that_hangs_blocks_the_next_act_until_it_returns(
    node: Node, tmp_path: Path
) -> None:
    watcher = WriteWatcher(node.kernel)
    with watcher.serving(), trio.fail_after(PATIENCE_S):
        watcher.hang("/sys/bus/pci/drivers/nvidia/unbind")
        with pytest.raises(ActError) as caught:
            await binder(node, tmp_path / "locks", 0.5).bring(GPU, Target.VFIO, FIRSTS)
        assert caught.value.fault is ActFault.HANGS
        ours = binder(node, tmp_path / "locks")
        with pytest.raises(ActError) as caught:
            await ours.bring(GPU, Target.VFIO, FIRSTS)
        assert caught.value.fault is ActFault.BLOCKED
        await trio.to_thread.run_sync(watcher.release)
        fault: ActFault | None = ActFault.BLOCKED
        while fault is ActFault.BLOCKED:  # until the process that hung has ended
            try:
                await ours.bring(GPU, Target.VFIO, FIRSTS)
            except ActError as error:
                fault = error.fault
            else:
                fault = None
    assert fault is None
    assert drivers(node) == ["vfio-pci", "vfio-pci"]
    assert sum(path.endswith("nvidia/unbind") for path, _ in watcher.written) == 1


def test_virtual_functions_come_and_go_with_a_write_and_with_the_driver(tmp_path: Path) -> None:
    node = Node(tmp_path)
    address, path = "0000:41:00.0", "sys/bus/pci/devices/0000:41:00.0/sriov_numvfs"
    node.kernel.plug(PciSpec(address, "10de", "2330", "030200", 71, driver="nvidia", total_vfs=2))
    with pytest.raises(OSError, match="range") as caught:
        node.write(path, "3\n")
    assert caught.value.errno == errno.ERANGE
    node.uevents.clear()
    node.write(path, "2\n")
    one, two = node.tree.virtual_functions(address)
    of_one = [("add", one), ("change", one), ("bind", one)]
    of_two = [("add", two), ("change", two), ("bind", two)]
    assert [(u.action, u.devpath.rpartition("/")[2]) for u in node.uevents] == [
        *of_one, *of_two, ("change", address),
    ]  # fmt: skip
    with pytest.raises(OSError, match="busy") as caught:
        node.write(path, "1\n")
    assert caught.value.errno == errno.EBUSY
    node.uevents.clear()
    node.write(path, "0\n")
    assert {u.devpath.rpartition("/")[2] for u in node.uevents} == {one, two}, (
        "the physical function has no uevent"
    )
    assert node.tree.virtual_functions(address) == ()
    node.write(path, "1\n")
    node.write(f"{DRIVERS}/nvidia/unbind", address)
    assert not {one, two} & node.tree.functions.keys()
    with pytest.raises(OSError, match="No such") as caught:
        node.write(path, "1\n")
    assert caught.value.errno == errno.ENOENT


def test_virtual_functions_go_with_a_driver_that_has_waited_for_its_last_user(tmp_path: Path) -> None:
    node = Node(tmp_path)
    address = "0000:41:00.0"
    node.kernel.plug(PciSpec(address, "10de", "2330", "030200", 71, driver="nvidia", total_vfs=2))
    node.write(f"sys/bus/pci/devices/{address}/sriov_numvfs", "2\n")
    node.kernel.use(address, 99)
    with pytest.raises(SleepsError):
        node.write(f"{DRIVERS}/nvidia/unbind", address)
    assert len(node.tree.virtual_functions(address)) == 2
    node.kernel.end(99)
    assert node.tree.driver_of(address) is None
    assert node.tree.virtual_functions(address) == ()


def test_an_unbind_that_waits_for_a_user_goes_on_with_no_other_write(tmp_path: Path) -> None:
    node = Node(tmp_path)
    address = "0000:41:00.0"
    node.kernel.plug(PciSpec(address, "10de", "2330", "030200", 71, driver="nvidia"))
    node.kernel.use(address, 99)
    with pytest.raises(SleepsError):
        node.write(f"{DRIVERS}/nvidia/unbind", address)
    node.kernel.release()
    assert node.kernel.sleeps(address)
    node.kernel.end(99)
    assert not node.kernel.sleeps(address)


def test_vfio_takes_no_function_with_virtual_ones(tmp_path: Path) -> None:
    node = Node(tmp_path)
    address = "0000:41:00.0"
    node.kernel.plug(PciSpec(address, "10de", "2330", "030200", 71, total_vfs=2))
    node.tree.virtualize(address, 1)
    node.override("vfio-pci\n", address)
    with pytest.raises(OSError, match="busy"):
        node.write(f"{DRIVERS}/vfio-pci/bind", address)


# --- modules and ids --------------------------------------------------------------------------------------


def test_a_module_takes_what_is_without_a_driver_and_matches_and_leaves_all_without_one(node: Node) -> None:
    node.kernel.rmmod("nvidia")
    assert node.tree.driver_of(GPU) is None
    assert node.tree.driver_of(AUDIO) == "snd_hda_intel"
    assert node.uevents[-1].action == "unbind"
    assert not (node.tree.root / DRIVERS / "nvidia").exists()
    assert "nvidia" not in node.kernel.drivers
    node.kernel.modprobe("nvidia", frozenset({"10de:2330"}))
    assert node.tree.driver_of(GPU) == "nvidia"
    node.kernel.rmmod("nvidia")
    node.override("vfio-pci\n")
    node.kernel.modprobe("nvidia", frozenset({"10de:2330"}))
    assert node.tree.driver_of(GPU) is None, "the override names another one"


def test_a_module_in_use_is_not_unloaded(node: Node) -> None:
    node.kernel.use(GPU, 99)
    with pytest.raises(OSError, match=r".") as caught:
        node.kernel.rmmod("nvidia")
    assert caught.value.errno == errno.EBUSY
    node.kernel.end(99)
    node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    node.override("vfio-pci\n")
    node.write(f"{DRIVERS}/vfio-pci/bind", f"{GPU}\n")
    node.write(f"{DRIVERS}/snd_hda_intel/unbind", f"{AUDIO}\n")
    node.tree.open_group(51, 77)
    with pytest.raises(OSError, match=r".") as caught:
        node.kernel.rmmod("vfio-pci")
    assert caught.value.errno == errno.EBUSY
    assert node.tree.driver_of(GPU) == "vfio-pci"


def test_an_id_that_is_written_to_a_driver_is_taken_until_the_module_goes(node: Node) -> None:
    node.write(f"{DRIVERS}/vfio-pci/new_id", "10de 2330\n")
    assert node.tree.driver_of(GPU) == "nvidia", "what has a driver keeps it"
    node.write(f"{DRIVERS}/nvidia/unbind", f"{GPU}\n")
    node.write(f"{DRIVERS}/vfio-pci/bind", f"{GPU}\n")
    assert node.tree.driver_of(GPU) == "vfio-pci"
    node.write(f"{DRIVERS}/vfio-pci/unbind", f"{GPU}\n")
    node.write(f"{DRIVERS}/vfio-pci/new_id", "10de 2330\n")
    assert node.tree.driver_of(GPU) == "vfio-pci"
    node.kernel.rmmod("vfio-pci")
    node.kernel.modprobe("vfio-pci")
    assert node.tree.driver_of(GPU) is None


def test_a_module_takes_the_virtual_functions_of_its_gpus_with_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    address = "0000:31:00.0"
    node.kernel.plug(PciSpec(address, "10de", "2330", "030200", 60, driver="nvidia", total_vfs=2))
    node.write(f"sys/bus/pci/devices/{address}/sriov_numvfs", "2\n")
    assert len(node.tree.functions) == 5
    node.kernel.rmmod("nvidia")
    assert sorted(node.tree.functions) == [GPU, AUDIO, address]
    assert node.tree.driver_of(address) is None
