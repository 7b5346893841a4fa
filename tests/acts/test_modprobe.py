"""The vfio driver of a claim's GPU is loaded where it is not: real processes in place of chroot and modprobe, beside
the fake node's kernel. With the host's own they are tried in the virtual machine (`claims_administrator`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from gpuactors.acts.blocking_runner import in_a_thread
from gpuactors.acts.driver import SysfsBinder
from gpuactors.acts.modprobe import MODPROBE_AGAIN_S, Modprobe, ModprobeError
from gpuactors.core.values.claim import ActFault, OriginalDriver, Target
from gpuactors.core.values.model import PciAddress
from gpuactors.host.root import HostRoot
from gpuactors.ports.claims import ActError
from gpuactors_simulation.host.kernel import DRIVERS, FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.memory.acts import MemoryPersistence, MemoryWrites, inline
from tests.host.test_imex import script
from tests.support.patience import patient

GPU = PciAddress("0000:23:00.0")
FIRSTS = (OriginalDriver(GPU, "nvidia"),)
RELEASE = "6.12.0-test"
VARIANT = "vfio_pci:v000010DEd00002330sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci"


class Host:
    """A host whose vfio drivers are not loaded."""

    def __init__(self, root: Path, aliases: str = "") -> None:
        self.tree = HostTree(root)
        self.kernel = FakeKernel(self.tree, DRIVERS)
        self.drivers = root / "sys/bus/pci/drivers"
        self.not_loaded = root / "not-loaded"
        """The driver's directory until it is; the kernel can have it then at once."""
        os.rename(self.drivers / "vfio-pci", self.not_loaded)
        self.kernel.plug(PciSpec(GPU, "10de", "2330", "030200", 51, driver="nvidia"))
        self.modules = root / "lib/modules" / RELEASE
        self.modules.mkdir(parents=True)
        (root / "proc/sys/kernel").mkdir(parents=True)
        (root / "proc/sys/kernel/osrelease").write_text(f"{RELEASE}\n")
        self.names("/sbin/modprobe")
        if aliases:
            (self.modules / "modules.alias").write_text(f"alias {aliases}\n")
        self.asked = root / "asked"
        self.now = 0.0
        self.modprobe = Modprobe(
            HostRoot(str(root)), in_a_thread, deadline_s=patient(5.0), now=lambda: self.now
        )

    def names(self, path: str) -> None:
        """What the kernel runs to have a module loaded."""
        (self.tree.root / "proc/sys/kernel/modprobe").write_text(f"{path}\n")

    def does(self, text: str) -> None:
        """The host's modprobe is this shell script; its arguments are kept."""
        directory = self.tree.root / "proc/1/root" / "sbin"
        directory.mkdir(parents=True, exist_ok=True)
        tool = script(directory, f'echo "$*" >> {self.asked}; {text}')
        os.replace(tool, directory / "modprobe")

    def loads(self, driver: str) -> None:
        """A modprobe that does: the kernel has the driver's directory then."""
        self.does(f"mv {self.not_loaded} {self.drivers / driver}")

    async def loaded(self) -> bool:
        """Whether it is, or can be tried again later."""
        try:
            return await self.modprobe.load("vfio-pci") == "vfio-pci"
        except ModprobeError:
            self.now += MODPROBE_AGAIN_S
            return False

    async def bring(self) -> None:
        writes = MemoryWrites(self.kernel, before=lambda _: None)
        root = HostRoot(str(self.tree.root))
        binder = SysfsBinder(
            root, writes, MemoryPersistence(self.kernel), inline, self.modprobe, deadline_s=patient(30.0)
        )
        with trio.fail_after(2 * patient(30.0)):
            await binder.bring(GPU, Target.VFIO, FIRSTS)

    async def check_fitness(self) -> str:
        """Why no claim could bind the GPU; empty if one could."""
        root = HostRoot(str(self.tree.root))
        writes = MemoryWrites(self.kernel, before=lambda _: None)
        binder = SysfsBinder(root, writes, MemoryPersistence(self.kernel), inline, self.modprobe)
        (found,) = await binder.check_fitness([GPU])
        return found.reason


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """Makes one, with a `chroot` that changes no root: what is asked of it is run from below there."""
    directory = tmp_path / "bin"
    directory.mkdir()
    tool = script(directory, 'root=$1; shift; program=$1; shift; exec "$root$program" "$@"')
    os.replace(tool, directory / "chroot")
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def make(aliases: str = "") -> Host:
        return Host(tmp_path / "host", aliases)

    return make


async def test_the_driver_is_loaded_and_the_gpu_bound_to_it(host: Callable[..., Host]) -> None:
    made = host()
    made.loads("vfio-pci")
    await made.bring()
    assert made.asked.read_text() == "-- vfio-pci\n"
    assert made.tree.driver_of(GPU) == "vfio-pci"
    await made.bring()
    assert made.asked.read_text() == "-- vfio-pci\n", "what is done needs no driver"


async def test_the_variant_driver_is_the_one_that_is_loaded(host: Callable[..., Host]) -> None:
    made = host(VARIANT)
    made.loads("nvgrace-gpu-vfio-pci")
    assert await made.modprobe.load("nvgrace_gpu_vfio_pci") == "nvgrace-gpu-vfio-pci"
    assert made.asked.read_text() == "-- nvgrace_gpu_vfio_pci\n"


async def test_a_gpu_whose_driver_can_be_loaded_is_offered_and_nothing_is_loaded_by_a_look(
    host: Callable[..., Host],
) -> None:
    made = host()
    made.loads("vfio-pci")
    assert await made.check_fitness() == ""
    assert not made.asked.exists()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'FATAL: Module vfio-pci not found' >&2; exit 1", "says FATAL: Module vfio-pci not found"),
        ("exit 7", "ended with status 7 and says nothing"),
        ("exit 0", "succeeded, but the driver is not there"),
        ("sleep 600", "has not ended within"),
    ],
)
async def test_a_driver_that_cannot_be_loaded_costs_its_claim_and_is_not_tried_at_once_again(
    host: Callable[..., Host], does: str, said: str
) -> None:
    made = host()
    made.does(does)
    for _ in range(2):
        with pytest.raises(
            ActError, match=r"0000:23:00\.0 is to be bound to vfio-pci, which is not loaded"
        ) as caught:
            await made.bring()
        assert said in str(caught.value)
        assert caught.value.fault is ActFault.NO_DRIVER
        assert said in await made.check_fitness()
    assert made.asked.read_text() == "-- vfio-pci\n"
    assert made.tree.driver_of(GPU) == "nvidia"
    made.now += MODPROBE_AGAIN_S
    assert await made.check_fitness() == ""
    made.loads("vfio-pci")
    with trio.fail_after(patient(10.0)):
        while not await made.loaded():  # noqa: ASYNC110 - until the kernel has ended what was killed
            await trio.sleep(0.01)


async def test_one_that_an_administrator_has_loaded_meanwhile_is_bound_at_once(
    host: Callable[..., Host],
) -> None:
    made = host()
    made.does("exit 1")
    with pytest.raises(ActError):
        await made.bring()
    os.rename(made.not_loaded, made.drivers / "vfio-pci")
    await made.bring()
    assert made.tree.driver_of(GPU) == "vfio-pci"


async def test_a_module_that_the_kernel_does_not_have_is_not_asked_for(host: Callable[..., Host]) -> None:
    made = host()
    made.does("exit 0")
    (made.modules / "modules.dep").write_text("kernel/drivers/vfio/vfio.ko:\n")
    assert "has no module vfio-pci: install its package" in await made.check_fitness()
    with pytest.raises(ActError, match="has no module vfio-pci"):
        await made.bring()
    assert not made.asked.exists()


@pytest.mark.parametrize("name", ["-r", "../vfio", "vfio pci", "vfio\n", "", "a" * 56, "é"])
async def test_what_is_no_modules_name_is_given_to_nobody(host: Callable[..., Host], name: str) -> None:
    made = host()
    made.does("exit 0")
    with pytest.raises(ModprobeError, match="is no module's name"):
        await made.modprobe.load(name)
    assert not made.asked.exists()


async def test_a_kernel_that_may_load_nothing_is_told_of(host: Callable[..., Host]) -> None:
    made = host()
    made.does("exit 0")
    made.names("")
    with pytest.raises(ModprobeError, match="is not named in /proc/sys/kernel/modprobe"):
        await made.modprobe.load("vfio-pci")
    assert not made.asked.exists()
