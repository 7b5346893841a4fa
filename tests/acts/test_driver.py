"""Bringing a GPU and its companions to a driver, on the fake node: what is written, what is refused, where it stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from gpuactors.acts import driver
from gpuactors.acts.driver import HOLDERS_NAMED_MAX, SysfsBinder
from gpuactors.core.values.claim import ActFault, BoundFunction, FitnessFinding, OriginalDriver, Target
from gpuactors.core.values.model import Holder, PciAddress, function_address
from gpuactors.host.group import Group, GroupReader
from gpuactors.host.procfs import NodeId, ProcReader, Users
from gpuactors.host.root import HostRoot
from gpuactors.ports.claims import ActError
from gpuactors.ports.errors import HostShortError
from gpuactors_simulation.host.kernel import DRIVERS, FakeKernel, Planned
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.memory.acts import MemoryPersistence, MemoryWrites, inline
from tests.memory.disk import FakeDisk, StoppedError

GPU, AUDIO = PciAddress("0000:23:00.0"), PciAddress("0000:23:00.1")
BRIDGE = PciAddress("0000:22:00.0")
OTHER = PciAddress("0000:24:00.0")

SPECS = (
    PciSpec(BRIDGE, "8086", "352a", "060400", 51, driver="pcieport"),
    PciSpec(GPU, "10de", "2330", "030200", 51, driver="nvidia"),
    PciSpec(AUDIO, "10de", "22ba", "040300", 51, driver="snd_hda_intel"),
    PciSpec(OTHER, "10de", "2330", "030200", 52, driver="nvidia"),
)
FIRSTS = (
    OriginalDriver(GPU, "nvidia"),
    OriginalDriver(AUDIO, "snd_hda_intel"),
    OriginalDriver(OTHER, "nvidia"),
)
AT_HOME = {GPU: "nvidia", AUDIO: "snd_hda_intel", BRIDGE: "pcieport", OTHER: "nvidia"}
ON_VFIO = {**AT_HOME, GPU: "vfio-pci", AUDIO: "vfio-pci"}


class Node:
    """A fake node, and a daemon's binder on it."""

    def __init__(
        self, root: Path, specs: Iterable[PciSpec] = SPECS, *, cdev: bool = False, silent: bool = False
    ):
        self.tree = HostTree(root, cdev=cdev, waits_silently=silent)
        self.kernel = FakeKernel(self.tree, DRIVERS)
        for spec in specs:
            self.kernel.plug(spec)
        self.stop_at: int | None = None
        self.writes = MemoryWrites(self.kernel, before=self._before)
        self.persistence = MemoryPersistence(self.kernel)
        self.binder = self.new_daemon()

    def new_daemon(self) -> SysfsBinder:
        return SysfsBinder(HostRoot(str(self.tree.root)), self.writes, self.persistence, inline)

    def _before(self, what: str) -> None:
        if self.stop_at is not None and len(self.writes.written) >= self.stop_at:
            raise StoppedError(what)

    def bring(
        self,
        target: Target,
        firsts: Collection[OriginalDriver] = FIRSTS,
        device: PciAddress = GPU,
        beside: Collection[PciAddress] = (),
    ) -> tuple[BoundFunction, ...]:
        async def go() -> tuple[BoundFunction, ...]:
            with trio.fail_after(600):
                return await self.binder.bring(device, target, firsts, beside)

        return trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))

    def check_fitness(self, *devices: PciAddress) -> dict[PciAddress, ActFault | None]:
        """What a look finds; it says a reason with each fault."""

        async def go() -> tuple[FitnessFinding, ...]:
            with trio.fail_after(600):
                return await self.binder.check_fitness(devices)

        found = trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
        assert all((f.fault is None) is (not f.reason) for f in found)
        return {function_address(f.device): f.fault for f in found}

    def fails(self, target: Target = Target.VFIO, firsts: Collection[OriginalDriver] = FIRSTS) -> ActError:
        with pytest.raises(ActError) as caught:
            self.bring(target, firsts)
        return caught.value

    @property
    def drivers(self) -> dict[PciAddress, str | None]:
        return {PciAddress(address): self.tree.driver_of(address) for address in self.tree.functions}

    @property
    def overrides(self) -> list[str]:
        return [o for address in self.tree.functions if (o := self.kernel.override(address))]

    def presence(self, address: PciAddress) -> int:
        return self.tree.device_dir(address).stat().st_ino

    def start(self, address: PciAddress, interrupts: int = 1) -> None:
        """Its driver has started it, or stopped it: it has so many interrupts."""
        directory = self.tree.device_dir(address) / "msi_irqs"
        directory.mkdir(exist_ok=True)
        for file in directory.iterdir():
            file.unlink()
        for number in range(interrupts):
            (directory / str(100 + number)).write_text("msi\n")

    def set_override(self, address: PciAddress, driver: str) -> None:
        self.kernel.write(f"{self.tree.root}/sys/bus/pci/devices/{address}/driver_override", f"{driver}\n")

    @property
    def written(self) -> list[str]:
        """Each write as `name: text`."""
        return [f"{'/'.join(path.split('/')[-2:])}: {text.strip()}" for path, text in self.writes.written]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# --- to vfio and back ---------------------------------------------------------------------------------------------


def test_a_gpu_and_its_companions_go_to_vfio_and_its_bridge_and_other_groups_stay(node: Node) -> None:
    found = node.bring(Target.VFIO)
    assert found == tuple(
        BoundFunction(address, "vfio-pci", 51, None, vfio=True, presence=node.presence(address))
        for address in (GPU, AUDIO)
    )
    assert node.drivers == ON_VFIO
    assert node.overrides == []


def test_each_function_is_released_and_bound_under_an_override_of_its_own(node: Node) -> None:
    node.bring(Target.VFIO)
    assert node.written == [
        "0000:23:00.0/driver_override: vfio-pci",
        "nvidia/unbind: 0000:23:00.0",
        "vfio-pci/bind: 0000:23:00.0",
        "0000:23:00.1/driver_override: vfio-pci",
        "snd_hda_intel/unbind: 0000:23:00.1",
        "vfio-pci/bind: 0000:23:00.1",
    ]


def test_they_come_back_in_reverse_order_each_to_its_own_original_driver(node: Node) -> None:
    node.bring(Target.VFIO)
    before = len(node.written)
    node.bring(Target.ORIGINAL_DRIVER)
    assert node.drivers == AT_HOME
    assert node.overrides == []
    assert [w for w in node.written[before:] if "override" not in w] == [
        "vfio-pci/unbind: 0000:23:00.1",
        "snd_hda_intel/bind: 0000:23:00.1",
        "vfio-pci/unbind: 0000:23:00.0",
        "nvidia/bind: 0000:23:00.0",
    ]


def test_the_group_and_cdev_are_read_anew_after_the_bind(tmp_path: Path) -> None:
    node = Node(tmp_path, cdev=True)
    assert [f.cdev for f in node.bring(Target.VFIO)] == ["vfio0", "vfio1"]
    assert [f.cdev for f in node.bring(Target.ORIGINAL_DRIVER)] == [None, None]


def test_without_a_node_for_it_there_is_no_cdev(tmp_path: Path) -> None:
    node = Node(tmp_path, cdev=True)
    (tmp_path / "dev/iommu").unlink()
    assert [f.cdev for f in node.bring(Target.VFIO)] == [None, None]


def test_a_prebound_gpu_is_written_nothing_to_and_leaves_vfio_for_nobody(tmp_path: Path) -> None:
    node = Node(tmp_path, [PciSpec(GPU, "10de", "2330", "030200", 51, driver="vfio-pci")])
    firsts = (OriginalDriver(GPU, "vfio-pci", vfio=True),)
    for target in (Target.VFIO, Target.ORIGINAL_DRIVER, Target.VFIO):
        assert node.bring(target, firsts)[0].driver == "vfio-pci"
    assert node.written == []


def test_an_operators_override_on_a_prebound_gpu_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, [PciSpec(GPU, "10de", "2330", "030200", 51, driver="vfio-pci")])
    node.kernel.write(f"{tmp_path}/sys/bus/pci/devices/{GPU}/driver_override", "vfio-pci\n")
    for target in (Target.VFIO, Target.ORIGINAL_DRIVER):
        node.bring(target, (OriginalDriver(GPU, "vfio-pci", vfio=True),))
    assert node.overrides == ["vfio-pci"]


def test_a_gpu_on_a_variant_driver_is_on_vfio(tmp_path: Path) -> None:
    node = Node(tmp_path, [PciSpec(GPU, "10de", "2342", "030200", 51, driver="nvgrace_gpu_vfio_pci")])
    assert node.bring(Target.VFIO, ())[0].vfio
    assert node.written == []


def test_of_a_mixed_group_only_the_function_off_vfio_is_bound_and_only_it_goes_back(tmp_path: Path) -> None:
    gpu, audio = SPECS[1], SPECS[2]
    node = Node(tmp_path, [PciSpec(gpu.address, "10de", "2330", "030200", 51, driver="vfio-pci"), audio])
    firsts = (OriginalDriver(GPU, "vfio-pci", vfio=True), OriginalDriver(AUDIO, "snd_hda_intel"))
    node.bring(Target.VFIO, firsts)
    assert node.drivers == {GPU: "vfio-pci", AUDIO: "vfio-pci"}
    node.bring(Target.ORIGINAL_DRIVER, firsts)
    assert node.drivers == {GPU: "vfio-pci", AUDIO: "snd_hda_intel"}
    assert not any(GPU in text for _, text in node.writes.written)


def test_a_prebound_function_that_lost_its_driver_goes_back_to_vfio(tmp_path: Path) -> None:
    node = Node(tmp_path, [PciSpec(GPU, "10de", "2330", "030200", 51, driver="vfio-pci")])
    node.tree.unbind(GPU)
    assert (
        node.bring(Target.ORIGINAL_DRIVER, (OriginalDriver(GPU, "vfio-pci", vfio=True),))[0].driver
        == "vfio-pci"
    )
    assert node.overrides == []


@pytest.mark.parametrize("now", [None, "vfio-pci"])
def test_a_gpu_that_is_prebound_by_the_operators_word_never_goes_to_the_hosts_driver(
    tmp_path: Path, now: str | None
) -> None:
    # --prebound, and first seen on nvidia; None: our act was killed between the unbind and the bind.
    node = Node(tmp_path, [PciSpec(GPU, "10de", "2330", "030200", 51, driver=now)])
    assert (
        node.bring(Target.ORIGINAL_DRIVER, (OriginalDriver(GPU, "nvidia", vfio=True),))[0].driver
        == "vfio-pci"
    )
    assert not any("nvidia" in write for write in node.written)


@pytest.mark.parametrize(("device", "taken_by"), [("2330", "nvidia"), ("ffff", None)])
def test_a_gpu_that_had_no_driver_is_given_to_the_one_that_takes_it(
    tmp_path: Path, device: str, taken_by: str | None
) -> None:
    node = Node(tmp_path, [PciSpec(GPU, "10de", device, "030200", 51)])
    firsts = (OriginalDriver(GPU, None),)
    assert node.bring(Target.VFIO, firsts)[0].driver == "vfio-pci"
    assert node.bring(Target.ORIGINAL_DRIVER, firsts)[0].driver == taken_by
    assert node.overrides == []
    assert node.written[-1] == f"pci/drivers_probe: {GPU}"


def test_a_gpu_that_never_left_its_lack_of_a_driver_is_not_probed(tmp_path: Path) -> None:
    node = Node(tmp_path, [PciSpec(GPU, "10de", "2330", "030200", 51)])
    assert node.bring(Target.ORIGINAL_DRIVER, (OriginalDriver(GPU, None),))[0].driver is None
    assert node.written == []


def test_done_again_it_writes_nothing_more(node: Node) -> None:
    node.bring(Target.VFIO)
    before = len(node.written)
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO
    assert len(node.written) == before


def test_a_function_that_somebody_else_has_bound_elsewhere_meanwhile_is_left_to_him(node: Node) -> None:
    node.bring(Target.VFIO)
    node.kernel.load("nouveau", frozenset({"10de:2330"}))
    node.tree.unbind(GPU)
    node.tree.bind(GPU, "nouveau")
    node.bring(Target.ORIGINAL_DRIVER)
    assert node.drivers[GPU] == "nouveau"
    assert node.drivers[AUDIO] == "snd_hda_intel"


# --- beside an administrator --------------------------------------------------------------------------------------


def test_an_override_of_somebody_elses_is_there_again_after_the_bind_and_counts_at_the_return(
    node: Node,
) -> None:
    node.kernel.load("nouveau", frozenset())
    node.set_override(GPU, "nouveau")
    node.bring(Target.VFIO)
    assert (node.drivers, node.overrides) == (ON_VFIO, ["nouveau"])
    node.bring(Target.ORIGINAL_DRIVER)
    assert (node.drivers, node.overrides) == ({**AT_HOME, GPU: "nouveau"}, ["nouveau"])


def test_a_gpu_with_an_override_for_vfio_that_is_not_ours_stays_on_it(node: Node) -> None:
    """As driverctl and vfio-manager leave it, while a claim had the GPU."""
    node.bring(Target.VFIO)
    node.set_override(GPU, "vfio-pci")
    firsts = [replace(first, was_bound=True) for first in FIRSTS]
    node.bring(Target.ORIGINAL_DRIVER, firsts)
    assert node.drivers == {**AT_HOME, GPU: "vfio-pci"}
    assert node.overrides == ["vfio-pci"]


def test_a_gpu_that_was_plugged_in_since_is_not_touched(node: Node) -> None:
    node.bring(Target.VFIO)
    before = len(node.written)
    firsts = [replace(first, presence=node.presence(first.address) + 1) for first in FIRSTS]
    node.bring(Target.ORIGINAL_DRIVER, firsts)
    assert (node.drivers, len(node.written)) == (ON_VFIO, before)
    node.bring(Target.ORIGINAL_DRIVER, [replace(f, presence=node.presence(f.address)) for f in FIRSTS])
    assert node.drivers == AT_HOME


# --- the variant driver -------------------------------------------------------------------------------------------


def aliases(node: Node, *lines: str) -> None:
    (node.tree.root / "proc/sys/kernel").mkdir(parents=True)
    (node.tree.root / "proc/sys/kernel/osrelease").write_text("6.12.0-test\n")
    directory = node.tree.root / "lib/modules/6.12.0-test"
    directory.mkdir(parents=True)
    (directory / "modules.alias").write_text("".join(f"alias {line}\n" for line in lines))


VARIANT = "vfio_pci:v000010DEd00002330sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci"
ANY = "vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci"


def test_the_variant_driver_is_the_one_that_the_kernel_names_for_the_device(node: Node) -> None:
    aliases(node, ANY, VARIANT)
    node.kernel.load("nvgrace_gpu_vfio_pci")
    node.bring(Target.VFIO)
    assert node.drivers == {**ON_VFIO, GPU: "nvgrace_gpu_vfio_pci"}


def test_a_variant_driver_that_is_not_loaded_is_named_with_its_remedy_and_nothing_is_written(
    node: Node,
) -> None:
    aliases(node, VARIANT, ANY)
    error = node.fails()
    assert error.fault is ActFault.NO_DRIVER
    assert "modprobe nvgrace_gpu_vfio_pci" in str(error)
    assert node.written == []
    assert node.drivers == AT_HOME


def test_a_original_driver_that_is_not_loaded_any_more_leaves_the_gpu_on_vfio(node: Node) -> None:
    node.bring(Target.VFIO)
    before = len(node.written)
    error = node.fails(
        Target.ORIGINAL_DRIVER, (OriginalDriver(GPU, "nouveau"), OriginalDriver(AUDIO, "snd_hda_intel"))
    )
    assert error.fault is ActFault.NO_DRIVER
    assert len(node.written) == before
    assert node.drivers == ON_VFIO


# --- what is refused before the first write -----------------------------------------------------------------------


def test_a_gpu_that_a_container_uses_by_a_node_of_its_own_is_refused_with_the_process(node: Node) -> None:
    node.kernel.use(GPU, 99, "python3", pod_uid="aaaaaaaa-0000-4000-8000-000000000001")
    error = node.fails()
    assert error.fault is ActFault.IN_USE
    assert "process 99 (python3) of the pod with UID aaaaaaaa" in str(error)
    assert node.written == []
    node.kernel.end(99)
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


def test_a_companion_in_use_is_refused_as_well(node: Node) -> None:
    node.bring(Target.VFIO)
    node.tree.open_group(51, 77)
    before = len(node.written)
    error = node.fails(Target.ORIGINAL_DRIVER)
    assert error.fault is ActFault.IN_USE
    assert "process 77 (qemu-system-x86)" in str(error)
    assert len(node.written) == before
    node.kernel.end(77)
    node.bring(Target.ORIGINAL_DRIVER)
    assert node.drivers == AT_HOME


def test_a_process_that_cannot_be_read_may_be_a_user(node: Node) -> None:
    (node.tree.root / "proc/123").mkdir()
    (node.tree.root / "proc/123/fd").write_text("")  # listing it fails, for root as well
    error = node.fails()
    assert error.fault is ActFault.IN_USE
    assert "cannot be known" in str(error)
    assert node.written == []


@pytest.mark.parametrize("shown_by", ["virtfn0", "sriov_numvfs"])
def test_active_virtual_functions_are_refused(node: Node, shown_by: str) -> None:
    (node.tree.device_dir(GPU) / shown_by).write_text("1\n")
    error = node.fails()
    assert error.fault is ActFault.VIRTUAL_FUNCTIONS
    assert node.written == []


CARD, VIRTUAL, BESIDE = map(PciAddress, ("0000:3b:00.0", "0000:3b:00.4", "0000:3b:00.5"))


def virtualized(node: Node, driver: str | None, *groups: int) -> None:
    """A card with virtual functions in these groups, which NVIDIA's driver takes by their ids only if it has them."""
    ids = ("10de", "2330") if driver is not None else ("10de", "9999")
    node.kernel.plug(PciSpec(CARD, *ids, "030200", 60, driver="nvidia"))
    for number, (address, group) in enumerate(zip((VIRTUAL, BESIDE), groups, strict=True)):
        node.kernel.plug(PciSpec(address, *ids, "030200", group, driver=driver))
        (node.tree.device_dir(address) / "physfn").symlink_to(f"../{CARD}")
        (node.tree.device_dir(CARD) / f"virtfn{number}").symlink_to(f"../{address}")


@pytest.mark.parametrize("driver", [None, "nvidia"])
@pytest.mark.parametrize("groups", [(61, 62), (61, 61)], ids=["in groups of their own", "in one group"])
def test_a_virtual_function_is_bound_alone_and_comes_back(
    node: Node, driver: str | None, groups: tuple[int, int]
) -> None:
    """Another one is in its slot and of its vendor, and so is its physical function."""
    virtualized(node, driver, *groups)
    firsts = (OriginalDriver(VIRTUAL, driver), OriginalDriver(BESIDE, driver))
    if driver is not None and groups == (61, 61):
        with pytest.raises(
            ActError, match=f"{BESIDE} is bound to nvidia and is no part of the GPU"
        ) as caught:
            node.bring(Target.VFIO, firsts, VIRTUAL)
        assert caught.value.fault is ActFault.NOT_VIABLE
        return
    assert node.check_fitness(VIRTUAL) == {VIRTUAL: None}
    (bound,) = node.bring(Target.VFIO, firsts, VIRTUAL)
    assert (bound.address, bound.driver, bound.vfio) == (VIRTUAL, "vfio-pci", True)
    assert [node.drivers[a] for a in (CARD, VIRTUAL, BESIDE)] == ["nvidia", "vfio-pci", driver]
    node.bring(Target.ORIGINAL_DRIVER, firsts, VIRTUAL)
    assert [node.drivers[a] for a in (CARD, VIRTUAL, BESIDE)] == ["nvidia", driver, driver]
    assert not any(address in text for _, text in node.writes.written for address in (CARD, BESIDE))
    assert node.overrides == []


def test_a_physical_function_in_the_group_of_its_virtual_one_keeps_it_from_a_claim(node: Node) -> None:
    virtualized(node, None, 60, 61)
    with pytest.raises(ActError, match=f"{CARD} is bound to nvidia and is no part of the GPU"):
        node.bring(Target.VFIO, (OriginalDriver(VIRTUAL, None),), VIRTUAL)
    assert node.written == []


DISK = PciAddress("0000:27:00.0")
THEIRS = PciAddress("0000:23:00.2")
IN_THE_WAY = {
    "a disk": PciSpec(DISK, "144d", "a808", "010802", 51, driver="nvme"),
    "another GPU": PciSpec(DISK, "10de", "2330", "030200", 51, driver="nvidia"),
    "a function of the slot that is of another vendor": PciSpec(
        THEIRS, "1022", "15df", "108000", 51, driver="ccp"
    ),
    "a bridge with a driver that does DMA": PciSpec(DISK, "8086", "1", "060400", 51, driver="shpchp"),
}


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_beside_a_function_of_the_host_nothing_is_written(node: Node, kind: str) -> None:
    """Also where an older version has noted its driver."""
    spec = IN_THE_WAY[kind]
    node.kernel.plug(spec)
    before = node.drivers
    error = node.fails(firsts=(*FIRSTS, OriginalDriver(PciAddress(spec.address), spec.driver)))
    assert error.fault is ActFault.NOT_VIABLE
    assert f"{spec.address} is bound to {spec.driver} and is no part of the GPU" in str(error)
    assert (node.written, node.drivers, error.moved) == ([], before, ())


def test_a_member_that_is_no_pci_function_is_in_the_way(node: Node) -> None:
    node.tree.join_group(51, "AMDI0040:00", "sdhci-acpi")
    error = node.fails()
    assert error.fault is ActFault.NOT_VIABLE
    assert "AMDI0040:00, which is no PCI function, is bound to sdhci-acpi" in str(error)
    assert node.written == []
    node.tree.join_group(51, "AMDI0040:00", None)
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


@pytest.mark.parametrize("driver", [None, "vfio-pci", "pci-stub"])
def test_a_function_of_another_slot_that_is_in_nobodys_way_stays_as_it_is(
    node: Node, driver: str | None
) -> None:
    node.kernel.load("pci-stub")
    node.kernel.plug(PciSpec(DISK, "144d", "a808", "010802", 51, driver=driver))
    firsts = (*FIRSTS, OriginalDriver(DISK, driver, vfio=driver == "vfio-pci"))
    for target in Target:
        assert [f.address for f in node.bring(target, firsts)] == [GPU, AUDIO]
    assert node.drivers == {**AT_HOME, DISK: driver}
    assert not any(DISK in line for line in node.written)


def test_a_function_of_another_slot_that_an_older_version_has_bound_is_returned(node: Node) -> None:
    node.kernel.load("nvme", frozenset({"144d:a808"}))
    node.kernel.plug(PciSpec(DISK, "144d", "a808", "010802", 51, driver="vfio-pci"))
    node.bring(Target.VFIO)
    firsts = (*FIRSTS, OriginalDriver(DISK, "nvme", was_bound=True))
    assert DISK in [f.address for f in node.bring(Target.ORIGINAL_DRIVER, firsts)]
    assert node.drivers == {**AT_HOME, DISK: "nvme"}


def test_whatever_is_planned_nothing_is_written_to_another_slot(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last guard: here the rule that says what is a companion is wrong."""
    node.kernel.plug(PciSpec(DISK, "144d", "a808", "010802", 51, driver="nvme"))
    monkeypatch.setattr("gpuactors.acts.driver.with_companions", lambda gpu, group: tuple(group))
    for target in Target:
        error = node.fails(target, (*FIRSTS, OriginalDriver(DISK, None)))
        assert f"{DISK} is not in the slot of {GPU}" in str(error) or BRIDGE in str(error)
    assert node.written == []


@pytest.mark.parametrize(
    ("group", "other"), [(60, CARD), (61, BESIDE)], ids=["its physical function", "a sibling"]
)
def test_whatever_is_planned_the_act_of_a_virtual_function_writes_to_no_other(
    node: Node, group: int, other: PciAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in its slot."""
    virtualized(node, None, group, group)
    monkeypatch.setattr("gpuactors.acts.driver.with_companions", lambda gpu, group: tuple(group))
    firsts = (
        OriginalDriver(VIRTUAL, None),
        OriginalDriver(BESIDE, None),
        OriginalDriver(CARD, "nvidia"),
    )
    with pytest.raises(ActError, match=f"{other} is not in the slot of {VIRTUAL}, or one of them is"):
        node.bring(Target.VFIO, firsts, VIRTUAL)
    assert node.written == []


def test_two_gpus_of_one_group_go_to_vfio_for_one_claim(node: Node) -> None:
    node.kernel.plug(PciSpec(DISK, "10de", "2330", "030200", 51, driver="nvidia"))
    firsts = (*FIRSTS, OriginalDriver(DISK, "nvidia"))
    for target, expected in ((Target.VFIO, "vfio-pci"), (Target.ORIGINAL_DRIVER, "nvidia")):
        assert [f.address for f in node.bring(target, firsts, beside=(DISK,))] == [GPU, AUDIO, DISK]
        assert (node.drivers[GPU], node.drivers[DISK]) == (expected, expected)


def test_a_function_of_which_no_original_driver_was_noted_is_not_touched(node: Node) -> None:
    error = node.fails(firsts=(OriginalDriver(GPU, "nvidia"),))
    assert error.fault is ActFault.UNKNOWN_FUNCTION
    assert AUDIO in str(error)
    assert node.written == []


def test_a_gpu_that_is_not_there_or_has_no_group(node: Node) -> None:
    node.kernel.plug(PciSpec("0000:30:00.0", "10de", "2330", "030200", None, driver="nvidia"))
    for address in ("0000:30:00.0", "0000:99:00.0"):
        with pytest.raises(ActError, match="is not there, or has no IOMMU group") as caught:
            node.bring(Target.VFIO, device=PciAddress(address))
        assert caught.value.fault is ActFault.GONE


# --- what cannot be read or written -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EPIPE, errno.EAGAIN])
@pytest.mark.parametrize("target", [Target.VFIO, Target.ORIGINAL_DRIVER])
@pytest.mark.parametrize("call", ["read", "write", "at_the_end"])
def test_whatever_the_writing_process_answers_is_the_acts_error(
    node: Node, monkeypatch: pytest.MonkeyPatch, call: str, target: Target, number: int
) -> None:
    """Issue 24, 2: `sriov_numvfs` that cannot be read, and a process killed before `at_the_end`, ended the daemon."""
    if target is Target.ORIGINAL_DRIVER:
        node.bring(Target.VFIO)
    is_struck = call != "at_the_end" or target is Target.VFIO  # nothing is left behind on the way back

    async def fails(self: object, path: str, *_text: str) -> str:
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patched:
        patched.setattr(f"gpuactors_simulation.memory.acts._Act.{call}", fails)
        if is_struck:
            error = node.fails(target)
            assert error.fault is ActFault.REFUSED
            assert os.strerror(number) in str(error)
            assert "internal error" not in str(error)
    node.bring(target)
    assert node.drivers == (ON_VFIO if target is Target.VFIO else AT_HOME)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_gpu_whose_files_cannot_be_read_is_not_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of a claim that is released nothing would be left to be returned, and its GPU would stay on vfio."""
    node.bring(Target.VFIO)

    def fails(path: str) -> str:
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patched:
        patched.setattr("gpuactors.host.group.os.readlink", fails)
        error = node.fails(Target.ORIGINAL_DRIVER)
    assert error.fault is ActFault.REFUSED
    node.bring(Target.ORIGINAL_DRIVER)
    assert node.drivers == AT_HOME


def test_what_a_killed_daemon_left_is_cleared_also_where_its_act_cannot_go_on(node: Node) -> None:
    """Its writing process was killed with it, before the unbind, and a process has opened the GPU since."""
    override = node.tree.device_dir(GPU) / "driver_override"
    node.kernel.write(str(override), "vfio-pci\n")
    node.kernel.use(GPU, 77, "python3")
    error = node.fails()
    assert error.fault is ActFault.IN_USE
    assert node.overrides == []
    node.kernel.write(str(override), "an-administrators\n")
    assert node.fails().fault is ActFault.IN_USE
    assert node.overrides == ["an-administrators"]


# --- a look before any claim ----------------------------------------------------------------------------------------


def test_a_look_finds_what_a_bind_would_be_refused_for_and_writes_nothing(node: Node) -> None:
    def looked(device: PciAddress = GPU) -> ActFault | None:
        return node.check_fitness(device)[device]

    assert looked() is None
    node.kernel.use(GPU, 99)
    assert looked() is ActFault.IN_USE
    node.kernel.end(99)
    node.start(GPU)
    assert looked() is ActFault.IN_USE
    node.persistence.take(GPU)
    assert looked() is None, "nvidia-persistenced lets go of it for an act"
    node.kernel.end(node.persistence.PID)
    node.start(GPU, interrupts=0)
    (node.tree.device_dir(GPU) / "virtfn0").write_text("")
    assert looked() is ActFault.VIRTUAL_FUNCTIONS
    (node.tree.device_dir(GPU) / "virtfn0").unlink()
    aliases(node, VARIANT, ANY)
    assert looked() is ActFault.NO_DRIVER
    node.kernel.load("nvgrace_gpu_vfio_pci")
    assert looked() is None
    assert looked(PciAddress("0000:99:00.0")) is ActFault.GONE
    assert node.written == []


def test_a_look_at_256_gpus_is_one_pass_over_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [PciAddress(f"0000:{i:02x}:00.0") for i in range(256)]
    node = Node(
        tmp_path, [PciSpec(a, "10de", "2330", "030200", i, driver="nvidia") for i, a in enumerate(gpus)]
    )
    for number, address in enumerate(gpus[:3]):
        node.kernel.use(address, 90 + number)
    passes = []
    users = ProcReader.users

    def counted(self: ProcReader, nodes: Mapping[NodeId, PciAddress]) -> Users:
        passes.append(len(nodes))
        return users(self, nodes)

    monkeypatch.setattr(ProcReader, "users", counted)
    found = node.check_fitness(*gpus)
    assert len(passes) == 1
    assert found == dict.fromkeys(gpus) | dict.fromkeys(gpus[:3], ActFault.IN_USE)


def test_what_is_wrong_with_one_gpu_hides_no_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cannot be read, one is gone, one hangs; and a process that has one open has no other one."""
    absent, hangs = PciAddress("0000:99:00.0"), PciAddress("0000:98:00.0")
    read = GroupReader.read

    def fails(self: GroupReader, device: PciAddress) -> Group | None:
        if device == AUDIO:
            raise OSError(errno.EIO, "no", "a file")
        return read(self, device)

    look = SysfsBinder._look

    async def waits(self: SysfsBinder, device: PciAddress) -> Group:
        if device == hangs:
            await trio.sleep_forever()
        return await look(self, device)

    monkeypatch.setattr(GroupReader, "read", fails)
    monkeypatch.setattr(SysfsBinder, "_look", waits)
    node.kernel.use(OTHER, 99)
    assert node.check_fitness(AUDIO, hangs, absent, OTHER, GPU) == {
        AUDIO: ActFault.REFUSED,
        hangs: ActFault.HANGS,
        absent: ActFault.GONE,
        OTHER: ActFault.IN_USE,
        GPU: None,
    }


def test_a_pass_that_fails_is_the_finding_of_each_gpu(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Users:
        raise HostShortError("no descriptors")

    monkeypatch.setattr(ProcReader, "users", fails)
    assert node.check_fitness(GPU, OTHER) == {GPU: ActFault.REFUSED, OTHER: ActFault.REFUSED}


# --- what the kernel refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EBUSY, errno.EINVAL])
@pytest.mark.parametrize("path", ["nvidia/unbind", "vfio-pci/bind", "23:00.0/driver_override"])
def test_after_a_refusal_nothing_is_rolled_back_no_override_is_left_and_the_next_act_goes_on(
    node: Node, path: str, number: int
) -> None:
    node.kernel.plan(Planned(path, error=number))
    error = node.fails()
    assert error.fault is ActFault.REFUSED
    assert path in str(error)
    assert node.overrides == []
    is_unbound = path == "vfio-pci/bind"
    assert node.drivers[GPU] == (None if is_unbound else "nvidia")
    assert [(f.address, f.driver, f.presence) for f in error.moved] == (
        [(GPU, None, node.presence(GPU))] if is_unbound else []
    )
    assert not any(w.startswith("nvidia/bind") for w in node.written)
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO
    assert [w for w in node.written if w == "nvidia/unbind: 0000:23:00.0"] == [
        "nvidia/unbind: 0000:23:00.0"
    ] * (2 if path == "nvidia/unbind" else 1)


def test_a_refusal_says_where_the_function_is_now(node: Node) -> None:
    node.kernel.plan(Planned("vfio-pci/bind", error=errno.EINVAL))
    assert "was refused (Invalid argument); it has no driver now: see the kernel's log" in str(node.fails())


def test_without_permission_the_remedy_is_the_mount(node: Node) -> None:
    node.kernel.plan(Planned("driver_override", error=errno.EROFS))
    assert "mount the host's /sys writable" in str(node.fails())


def test_a_write_that_changes_nothing_is_an_error(node: Node) -> None:
    node.kernel.plan(Planned("vfio-pci/bind", nothing=True))
    error = node.fails()
    assert (error.fault, node.overrides) == (ActFault.REFUSED, [])
    assert "returned and changed nothing; it has no driver now" in str(error)


def test_a_refusal_of_what_somebody_else_did_before_is_none(node: Node) -> None:
    def first_somebody_else(what: str) -> None:
        if what.endswith("nvidia/unbind"):
            with suppress(ValueError):
                node.tree.unbind(GPU)

    node.writes = MemoryWrites(node.kernel, before=first_somebody_else)
    node.binder = node.new_daemon()
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


# --- what hangs ---------------------------------------------------------------------------------------------------


def test_an_unbind_that_hangs_is_given_up_and_the_next_act_writes_nothing_and_names_the_process(
    node: Node,
) -> None:
    node.kernel.plan(Planned("nvidia/unbind", hangs=True))
    assert node.fails().fault is ActFault.HANGS
    before = len(node.written)
    node.binder = node.new_daemon()
    error = node.fails()
    assert error.fault is ActFault.BLOCKED
    assert "blocked by process 4711" in str(error)
    assert len(node.written) == before


def test_what_is_on_vfio_is_not_given_while_a_write_that_hangs_may_still_take_it_away(node: Node) -> None:
    node.bring(Target.VFIO)
    node.kernel.plan(Planned("vfio-pci/unbind", hangs=True))
    assert node.fails(Target.ORIGINAL_DRIVER).fault is ActFault.HANGS
    node.binder = node.new_daemon()
    assert node.drivers == ON_VFIO
    assert node.fails(Target.VFIO).fault is ActFault.BLOCKED
    node.kernel.release()
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


def test_a_write_that_hangs_hurts_no_other_group(node: Node) -> None:
    node.kernel.plan(Planned("nvidia/unbind", hangs=True))
    assert node.fails().fault is ActFault.HANGS
    assert node.bring(Target.VFIO, device=OTHER)[0].driver == "vfio-pci"


def test_when_it_returns_its_process_clears_the_override_and_the_next_act_goes_on_from_there(
    node: Node,
) -> None:
    node.kernel.plan(Planned("nvidia/unbind", hangs=True))
    node.fails()
    assert node.overrides == ["vfio-pci"]
    node.kernel.release()
    node.writes.settle()
    assert node.overrides == []
    assert node.drivers[GPU] is None
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO
    assert node.written.count("nvidia/unbind: 0000:23:00.0") == 1


@pytest.mark.parametrize("silent", [False, True])
def test_a_return_that_waits_for_a_virtual_machine_ends_when_it_closes_the_device(
    tmp_path: Path, silent: bool
) -> None:
    node = Node(tmp_path, silent=silent)
    node.bring(Target.VFIO)

    # It opens the group after the check that nobody does.
    opened: list[int] = []

    def then_open(what: str) -> None:
        if what.endswith("vfio-pci/unbind") and not opened:
            node.tree.open_group(51, 77)
            opened.append(77)

    node.writes = MemoryWrites(node.kernel, before=then_open)
    node.binder = node.new_daemon()
    assert node.fails(Target.ORIGINAL_DRIVER).fault is ActFault.HANGS
    assert node.fails(Target.ORIGINAL_DRIVER).fault is ActFault.BLOCKED
    node.kernel.end(77)
    node.bring(Target.ORIGINAL_DRIVER)
    assert node.drivers == AT_HOME
    assert node.overrides == []


def test_a_companion_that_the_kernel_refuses_to_return_beside_a_user_says_so_and_returns_when_he_has_gone(
    tmp_path: Path,
) -> None:
    """As a real kernel does where no table of open files shows the user of the GPU, as its descriptor is on its way to
    another process."""
    node = Node(tmp_path)
    node.bring(Target.VFIO)

    def then_open(what: str) -> None:
        if what.endswith("vfio-pci/unbind") and node.tree.holder_of(51) is None:
            node.tree.open_group(51, 77, device=False)
            node.tree.open_device(GPU, 77)

    node.writes = MemoryWrites(node.kernel, before=then_open)
    node.binder = node.new_daemon()
    error = node.fails(Target.ORIGINAL_DRIVER)
    assert error.fault is ActFault.REFUSED
    assert f"the write of {AUDIO}" in str(error)
    assert "usually because a process has a device of IOMMU group 51 open" in str(error)
    assert (node.drivers[GPU], node.drivers[AUDIO]) == ("vfio-pci", None)
    node.kernel.end(77)
    node.writes = MemoryWrites(node.kernel)
    node.binder = node.new_daemon()
    node.bring(Target.ORIGINAL_DRIVER)
    assert node.drivers == AT_HOME
    assert node.overrides == []


def test_a_wait_that_is_given_up_leaves_the_write_to_its_process(node: Node) -> None:
    node.kernel.plan(Planned("nvidia/unbind", hangs=True))

    async def go() -> None:
        with trio.move_on_after(3) as scope:
            await node.binder.bring(GPU, Target.VFIO, FIRSTS)
        assert scope.cancelled_caught

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
    assert node.fails().fault is ActFault.BLOCKED
    node.kernel.release()
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


def test_two_gpus_of_one_group_are_brought_at_once_without_blocking_each_other(tmp_path: Path) -> None:
    second = PciAddress("0000:23:00.2")
    node = Node(tmp_path, (*SPECS, PciSpec(second, "10de", "2330", "030200", 51, driver="nvidia")))
    firsts = (*FIRSTS, OriginalDriver(second, "nvidia"))

    async def go() -> None:
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                for device in (GPU, second):
                    nursery.start_soon(node.binder.bring, device, Target.VFIO, firsts)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
    assert node.drivers == {**ON_VFIO, second: "vfio-pci"}
    assert [w for w in node.written if "unbind" in w] == [
        "nvidia/unbind: 0000:23:00.0",
        "snd_hda_intel/unbind: 0000:23:00.1",
        "nvidia/unbind: 0000:23:00.2",
    ]


def test_a_shortage_of_the_daemons_own_is_an_error_of_the_act(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files", path)

    monkeypatch.setattr(os, "readlink", none_left)
    assert "no file descriptors left" in str(node.fails())


def test_slow_writes_are_waited_for(node: Node) -> None:
    for path in ("nvidia/unbind", "vfio-pci/bind"):
        node.kernel.plan(Planned(path, slow_s=8))
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


def test_an_act_of_many_slow_writes_is_given_up_in_time_and_gone_on_with(node: Node) -> None:
    node.kernel.plan(Planned("bind", slow_s=8, times=4))
    faults: list[ActFault] = []

    async def go() -> None:
        with trio.fail_after(600):
            for wait_s in (0.0, 5.0):
                with pytest.raises(ActError) as caught:
                    await node.binder.bring(GPU, Target.VFIO, FIRSTS)
                faults.append(caught.value.fault)
                await trio.sleep(wait_s)
            await node.binder.bring(GPU, Target.VFIO, FIRSTS)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
    assert faults == [ActFault.HANGS, ActFault.BLOCKED]
    assert node.drivers == ON_VFIO
    assert node.overrides == []


# --- nvidia-persistenced ------------------------------------------------------------------------------------------


def test_nvidia_persistenced_lets_go_before_and_takes_each_gpu_again_after(tmp_path: Path) -> None:
    second = PciAddress("0000:23:00.2")
    node = Node(tmp_path, (*SPECS, PciSpec(second, "10de", "2330", "030200", 51, driver="nvidia")))
    firsts = (*FIRSTS, OriginalDriver(second, "nvidia"))
    node.persistence.runs = True
    node.persistence.take(GPU, second)
    node.bring(Target.VFIO, firsts)
    assert node.persistence.asked == [(GPU, False), (second, False)]
    node.bring(Target.ORIGINAL_DRIVER, firsts)
    assert node.persistence.asked[2:] == [(second, True), (GPU, True)]


def test_without_its_socket_it_is_not_asked(node: Node) -> None:
    node.bring(Target.VFIO)
    assert node.persistence.asked == []


def test_if_it_does_not_let_go_it_is_named_and_given_back_what_it_had(node: Node) -> None:
    node.persistence.runs, node.persistence.obeys = True, False
    node.persistence.take(GPU)
    error = node.fails()
    assert error.fault is ActFault.IN_USE
    assert "nvidia-persiste" in str(error)
    assert node.persistence.asked == [(GPU, False), (GPU, True)]
    assert node.written == []


@pytest.mark.parametrize("restart", [False, True])
def test_what_it_had_it_gets_again_and_nothing_else(tmp_path: Path, restart: bool) -> None:
    second = PciAddress("0000:23:00.2")
    node = Node(tmp_path, (*SPECS, PciSpec(second, "10de", "2330", "030200", 51, driver="nvidia")))
    firsts: tuple[OriginalDriver, ...] = (*FIRSTS, OriginalDriver(second, "nvidia"))
    node.persistence.runs = True
    node.persistence.take(second)
    bound = {b.address: b.persistence for b in node.bring(Target.VFIO, firsts)}
    assert bound == {GPU: False, AUDIO: False, second: True}
    if restart:
        node.binder = node.new_daemon()
        firsts = tuple(replace(f, persistence=bound.get(f.address, False)) for f in firsts)
    node.bring(Target.ORIGINAL_DRIVER, firsts)
    assert node.persistence.asked == [(second, False), (second, True)]


def test_it_has_the_gpu_again_when_the_bind_is_refused(node: Node) -> None:
    node.persistence.runs = True
    node.persistence.take(GPU)
    node.kernel.plan(Planned("nvidia/unbind", error=errno.EBUSY))
    assert node.fails().fault is ActFault.REFUSED
    assert node.persistence.asked == [(GPU, False), (GPU, True)]


# --- started without a user ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words", "not_words"),
    [
        (
            "nvidia-persistenced",
            "no socket at /run/nvidia-persistenced/socket: see its log, set --driver-root",
            "wait",
        ),
        (
            "nv-hostengine",
            "It runs as long as the node does: stop its service, or keep its DaemonSet",
            "wait until",
        ),
        ("gpu_burn", "End it, or wait until its pod has ended", "DaemonSet"),
    ],
)
def test_what_to_do_about_a_holder_follows_from_what_it_is(
    node: Node, command: str, words: str, not_words: str
) -> None:
    """The pod of a driver does not end: to wait for that is no advice."""
    node.kernel.use(GPU, 4711, command)
    error = str(node.fails(Target.VFIO, FIRSTS))
    assert words in error
    assert not_words not in error.partition("without limit. ")[2]


def test_a_gpu_in_legacy_persistence_mode_is_refused_with_the_command_that_ends_it(node: Node) -> None:
    node.start(GPU, interrupts=6)
    error = node.fails()
    assert error.fault is ActFault.IN_USE
    assert "it has 6 interrupts in msi_irqs" in str(error)
    assert f"nvidia-smi -i {GPU} -pm 0" in str(error)
    assert node.written == []
    node.start(GPU, interrupts=0)
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


def test_a_process_that_has_it_open_is_named_instead(node: Node) -> None:
    node.start(GPU)
    node.kernel.use(GPU, 99)
    assert "process 99" in str(node.fails())
    assert "nvidia-smi" not in str(node.fails())


def test_interrupts_of_another_driver_say_nothing_of_users(node: Node) -> None:
    """snd_hda_intel has them from its probe on."""
    node.start(AUDIO)
    node.bring(Target.VFIO)
    assert node.drivers == ON_VFIO


def test_a_driver_that_stops_it_a_moment_later_is_waited_for(node: Node) -> None:
    node.start(GPU)

    async def go() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.binder.bring, GPU, Target.VFIO, FIRSTS)
            await trio.sleep(0.5)
            assert node.drivers == AT_HOME
            node.start(GPU, interrupts=0)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
    assert node.drivers == ON_VFIO


def test_a_process_that_opens_a_function_after_the_first_check_is_seen_before_its_unbind(
    tmp_path: Path,
) -> None:
    second = PciAddress("0000:23:00.2")
    node = Node(tmp_path, (*SPECS, PciSpec(second, "10de", "2330", "030200", 51, driver="nvidia")))
    firsts = (*FIRSTS, OriginalDriver(second, "nvidia"))

    def then_open(what: str) -> None:
        if what.endswith("vfio-pci/bind"):
            node.kernel.use(second, 99)

    node.writes = MemoryWrites(node.kernel, before=then_open)
    node.binder = node.new_daemon()
    error = node.fails(firsts=firsts)
    assert error.fault is ActFault.IN_USE
    assert "process 99" in str(error)
    assert f"nvidia/unbind: {second}" not in node.written
    assert node.overrides == []


@pytest.mark.parametrize("stops", [False, True], ids=["stays started", "is stopped a moment later"])
def test_a_gpu_that_is_started_after_the_first_check_is_seen_before_its_unbind(
    node: Node, stops: bool
) -> None:
    """Issue 24, 11: `nvidia-smi -pm 1` between the first check and the unbind."""

    def then_start(what: str) -> None:
        if what.endswith(f"{GPU}/driver_override"):
            node.start(GPU, interrupts=6)

    async def go() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.binder.bring, GPU, Target.VFIO, FIRSTS)
            await trio.sleep(0.5)
            assert node.written == [f"{GPU}/driver_override: vfio-pci"]
            node.start(GPU, interrupts=0)

    node.writes = MemoryWrites(node.kernel, before=then_start)
    node.binder = node.new_daemon()
    if stops:
        trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
        assert node.drivers == ON_VFIO
        return
    error = node.fails()
    assert error.fault is ActFault.IN_USE
    assert f"nvidia-smi -i {GPU} -pm 0" in str(error)
    assert f"nvidia/unbind: {GPU}" not in node.written
    assert (node.drivers, node.overrides) == (AT_HOME, [])


def test_it_is_not_asked_while_another_process_uses_the_gpu(node: Node) -> None:
    node.persistence.runs = True
    node.persistence.take(GPU)
    node.kernel.use(GPU, 99)
    assert "process 99" in str(node.fails())
    assert node.persistence.asked == []


# --- killed anywhere ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("then", list(Target))
def test_killed_at_every_write_the_next_daemon_brings_it_to_either_goal(
    tmp_path: Path, target: Target, then: Target
) -> None:
    points = 0
    for stop in range(20):
        node = Node(tmp_path / str(stop))
        if target is Target.ORIGINAL_DRIVER:
            node.bring(Target.VFIO)
            first = len(node.writes.written)
        else:
            first = 0
        node.stop_at = first + stop
        try:
            node.bring(target)
        except StoppedError:
            points += 1
        else:
            break
        node.stop_at = None
        # Its process has had its last duty by now.
        assert node.overrides == []
        node.binder = node.new_daemon()
        node.bring(then)
        assert node.drivers == (ON_VFIO if then is Target.VFIO else AT_HOME)
        assert node.overrides == []
    assert points == 6


def test_writes_to_sysfs_are_counted_with_the_operations_of_the_disk(node: Node) -> None:
    disk = FakeDisk()
    node.writes = MemoryWrites(node.kernel, before=disk.count)
    node.binder = node.new_daemon()
    disk.make_directory("/x")
    node.bring(Target.VFIO)
    disk.sync_directory("/x")
    assert len(disk.operations) == 8
    assert disk.operations[2] == f"sysfs {node.tree.root}/sys/bus/pci/drivers/nvidia/unbind"


@pytest.mark.parametrize("then", list(Target))
def test_an_override_that_a_killed_writing_process_left_is_cleared_by_the_next_act(
    node: Node, then: Target
) -> None:
    for before in (Target.ORIGINAL_DRIVER, Target.VFIO):
        node.bring(before)
        for address in (GPU, AUDIO):
            node.kernel.write(f"{node.tree.root}/sys/bus/pci/devices/{address}/driver_override", "vfio-pci\n")
        node.bring(then)
        assert node.overrides == []


def test_an_operators_override_that_names_no_vfio_driver_stays(node: Node) -> None:
    node.kernel.write(f"{node.tree.root}/sys/bus/pci/devices/{GPU}/driver_override", "nvidia\n")
    node.bring(Target.ORIGINAL_DRIVER)
    assert node.overrides == ["nvidia"]


def test_of_many_holders_some_are_named_and_the_others_counted() -> None:
    many = [Holder(100 + n, "qemu", None) for n in range(HOLDERS_NAMED_MAX + 2)]
    said = driver._named(many)
    assert said.count("process") == HOLDERS_NAMED_MAX
    assert said.endswith(" and 2 more")
    assert driver._named(many[:1]) == str(many[0])
