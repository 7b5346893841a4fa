"""The host's part: what is wrong is seeded one by one on a fake node, and found with its remedy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuactors.cli import progress
from gpuactors.cli.doctor import gather
from gpuactors.cli.doctor.finding import Check, Finding, Level
from gpuactors.host import sysfs
from gpuactors.host.pci_ids import SHIPPED, date_of
from gpuactors.host.root import module_parameter
from gpuactors_simulation.host.tree import PciSpec
from tests.cli.doctor.rig import COMPANION, GPU, SECOND, Patient, Seed, findings, open_patient, wrong
from tests.support import patience

PASS, WARN, FAIL = Level.PASS, Level.WARN, Level.FAIL
RELEASE = "6.1.0-test"


def without_iommu(patient: Patient) -> None:
    patient.node.tree.plug(PciSpec(GPU, "10de", "2330", "030200", None, driver="vfio-pci"))
    patient.put("/proc/cmdline", "quiet intel_iommu=off\n")


def behind_vmd(patient: Patient) -> None:
    patient.gpu(0x24)
    patient.node.tree.plug(PciSpec("10000:01:00.0", "10de", "2330", "030200", None, driver="vfio-pci"))


def host_driver_beside(patient: Patient) -> None:
    patient.gpu()
    patient.companion("snd_hda_intel")


def unbound_beside_a_host_driver(patient: Patient) -> None:
    patient.gpu(driver=None)
    patient.companion("snd_hda_intel")
    patient.gpu(0x24)


def one_of_two_on_nvidia(patient: Patient) -> None:
    patient.gpu(driver="nvidia")
    patient.gpu(0x24)


def two_on_nvidia(patient: Patient) -> None:
    patient.gpu(driver="nvidia")
    patient.gpu(0x24, driver="nvidia")


def virtualized(patient: Patient) -> None:
    patient.gpu(0x24)
    patient.node.tree.plug(PciSpec(GPU, "10de", "2330", "030200", 35, driver="vfio-pci", total_vfs=2))
    patient.node.tree.virtualize(GPU, 1, "vfio-pci")


DISK = "0000:02:00.0"


def disk_of_the_host_beside(patient: Patient) -> None:
    patient.gpu()
    patient.node.tree.plug(PciSpec(DISK, "144d", "a808", "010802", 0x23, driver="nvme"))


def unbound_beside_a_disk_of_the_host(patient: Patient) -> None:
    patient.gpu(driver="nvidia")
    patient.node.tree.plug(PciSpec(DISK, "144d", "a808", "010802", 0x23, driver="nvme"))


def claimable_beside_a_disk_of_the_host(patient: Patient) -> None:
    unbound_beside_a_disk_of_the_host(patient)
    patient.flags["dra"] = "on"


def reserved_by_firmware(patient: Patient) -> None:
    patient.gpu()
    patient.node.tree.reserve(0x23, "0x00000000bdf6f000 0x00000000bdf7efff direct\n")


def claimable_and_reserved_by_firmware(patient: Patient) -> None:
    patient.gpu(driver="nvidia")
    patient.node.tree.reserve(0x23, "0x00000000bdf6f000 0x00000000bdf7efff direct\n")
    patient.flags["dra"] = "on"


def without_node(patient: Patient) -> None:
    patient.gpu()
    patient.node.tree.remove_node("/dev/vfio/35")


def unreadable(patient: Patient) -> None:
    patient.gpu()
    patient.node.tree.make_unreadable(GPU, "class")


def held(patient: Patient) -> None:
    patient.gpu()
    patient.node.tree.open_group(0x23, 4711)


def unbinding(patient: Patient) -> None:
    held(patient)
    patient.node.tree.unbind(GPU)


def awake(patient: Patient) -> None:
    patient.gpu()
    patient.put(module_parameter("vfio_pci", "disable_idle_d3"), "Y\n")


def unsafe(patient: Patient) -> None:
    patient.gpu()
    patient.put(module_parameter("vfio", "enable_unsafe_noiommu_mode"), "Y\n")


def not_loaded(patient: Patient) -> None:
    patient.gpu(driver=None)
    (patient.node.tree.root / "sys/bus/pci/drivers/vfio-pci").rmdir()


def not_loaded_for_claims(patient: Patient) -> None:
    patient.gpu(driver="nvidia")
    (patient.node.tree.root / "sys/bus/pci/drivers/vfio-pci").rmdir()
    patient.flags["dra"] = "on"


def not_installed(patient: Patient) -> None:
    not_loaded(patient)
    patient.put("/proc/sys/kernel/osrelease", f"{RELEASE}\n")
    patient.put(f"/lib/modules/{RELEASE}/modules.dep", "kernel/drivers/vfio/vfio.ko:\n")


def for_anybody(patient: Patient) -> None:
    patient.gpu()
    (patient.node.tree.root / "dev/vfio/35").chmod(0o666)


def for_nobody(patient: Patient) -> None:
    patient.gpu()
    (patient.node.tree.root / "dev/vfio/vfio").chmod(0o600)


def without_cdev(patient: Patient) -> None:
    patient.gpu()
    patient.put("/dev/iommu", "")


def no_host(patient: Patient) -> None:
    patient.flags["host_root"] = str(patient.node.directory / "nowhere")


def unreadable_parameter(patient: Patient) -> None:
    patient.gpu()
    parameter = patient.put(module_parameter("vfio", "enable_unsafe_noiommu_mode"), "")
    parameter.unlink()
    parameter.mkdir()


def nameless(patient: Patient) -> None:
    patient.node.plug(0x24, "3182")


SEEDS = (
    Seed("no IOMMU", without_iommu, Check.IOMMU_ON, FAIL, "no IOMMU group; the kernel command line has intel_iommu=off",
         "with an Intel CPU on the kernel command line (intel_iommu=on)"),
    Seed("and its GPU", without_iommu, Check.GPUS_USABLE, FAIL, "in no IOMMU group", "Switch the IOMMU on",
         "NoIommuGroup", (GPU,)),
    Seed("VMD", behind_vmd, Check.GPUS_USABLE, FAIL, "behind an Intel VMD controller", "Switch VMD off", "BehindVmd",
         ("10000:01:00.0",)),
    Seed("virtual functions", virtualized, Check.GPUS_USABLE, WARN, "its virtual functions are active",
         "sriov_numvfs", "VirtualFunctions", (GPU,)),
    Seed("a virtual function of one on vfio", virtualized, Check.GPUS_USABLE, WARN,
         f"a virtual function of {GPU}, which is on vfio-pci", "Bind the physical function to its host's driver",
         "PhysicalFunctionOnVfio", (f"{GPU[:-1]}4",)),
    Seed("without IOMMU allowed", unsafe, Check.NO_IOMMU_MODE, WARN, "enable_unsafe_noiommu_mode",
         "remove enable_unsafe_noiommu_mode"),
    Seed("no GPU", lambda _: None, Check.GPUS_SELECTED, FAIL,
         "no GPU to offer, as no PCI function matches the selectors (--select vendor=10de,class=03;",
         "lspci -Dnn -d 10de:"),
    Seed("no name", nameless, Check.MODEL_NAMES, WARN,
         "10de:3182 has no name in pci.ids, so its resource is nvidia.com/3182",
         "Name its resource: --resource-name=10de:3182=nvidia.com/NAME. Pods that request nvidia.com/3182 have"),
    Seed("not viable", host_driver_beside, Check.GPUS_USABLE, FAIL, f"35 is not viable: {COMPANION} is bound to",
         f"as root: driverctl set-override {COMPANION} vfio-pci", "GroupNotViable", (GPU,)),
    Seed("will not be viable", unbound_beside_a_host_driver, Check.GPUS_USABLE, WARN,
         f"will not be viable while {COMPANION} is bound to snd_hda_intel",
         f"driverctl set-override {COMPANION} vfio-pci", "GroupNotViable", (GPU,)),
    Seed("the host's disk beside it", disk_of_the_host_beside, Check.GPUS_USABLE, FAIL,
         f"{DISK} is bound to nvme and is no part of the GPU", "Leave anything else to the host", "GroupNotViable",
         (GPU,)),
    Seed("unbound beside the host's disk", unbound_beside_a_disk_of_the_host, Check.GPUS_USABLE, WARN,
         f"{DISK} is bound to nvme and is no part of the GPU", "Leave anything else to the host", "GroupNotViable",
         (GPU,)),
    Seed("claimable beside the host's disk", claimable_beside_a_disk_of_the_host, Check.GPUS_USABLE, FAIL,
         f"{DISK} is bound to nvme and is no part of the GPU", "Leave anything else to the host", "GroupNotViable",
         (GPU,)),
    Seed("reserved by firmware", reserved_by_firmware, Check.GPUS_USABLE, FAIL, "0xbdf6f000 to 0xbdf7efff",
         "Update the firmware", "ReservedRegion", (GPU,)),
    Seed("claimable, reserved by firmware", claimable_and_reserved_by_firmware, Check.GPUS_USABLE, FAIL,
         "0xbdf6f000 to 0xbdf7efff", "Update the firmware", "ReservedRegion", (GPU,)),
    Seed("unbound", unbound_beside_a_host_driver, Check.GPUS_USABLE, WARN, "bound to no driver",
         f"driverctl set-override {GPU} vfio-pci", "NotBound", (GPU,)),
    Seed("one on nvidia", one_of_two_on_nvidia, Check.GPUS_USABLE, WARN, "bound to nvidia", "Bind it to vfio-pci",
         "NotBound", (GPU,)),
    Seed("all on nvidia", two_on_nvidia, Check.GPUS_USABLE, FAIL, "bound to nvidia",
         f"for a in {GPU} {SECOND}; do driverctl set-override $a vfio-pci; done", "NotBound", (GPU, SECOND)),
    Seed("no node", without_node, Check.GPUS_USABLE, FAIL, "/dev/vfio/35 does not exist", "Mount the host's /dev",
         "NodeMissing", (GPU,)),
    Seed("unreadable", unreadable, Check.GPUS_USABLE, FAIL, "/class cannot be read", "dmesg", "Unreadable", (GPU,)),
    Seed("held", held, Check.GPUS_USABLE, WARN, "group 35 is in use", "End its holder (--holders proc names it)",
         "HeldByOther", (GPU,)),
    Seed("unbinding", unbinding, Check.GPUS_USABLE, WARN, "unbind or unplug waits", "End the process", "Unbinding",
         (GPU,)),
    Seed("not loaded", not_loaded, Check.VFIO_PCI, WARN, "vfio-pci is not loaded", "modprobe vfio-pci"),
    Seed("not loaded, DRA", not_loaded_for_claims, Check.VFIO_PCI, FAIL, "a claim binds GPUs to it", "modprobe"),
    Seed("not installed", not_installed, Check.VFIO_PCI, FAIL, "has no module vfio-pci", "CONFIG_VFIO_PCI"),
    Seed("awake", awake, Check.IDLE_D3, WARN, "disable_idle_d3=Y", "--holders proc"),
    Seed("for anybody", for_anybody, Check.NODE_MODES, WARN, "/dev/vfio/35 (0666)", "chmod o= /dev/vfio/35;"),
    Seed("for nobody", for_nobody, Check.NODE_MODES, WARN, "/dev/vfio/vfio (0600)", "chmod 666 /dev/vfio/vfio"),
    Seed("no cdev", without_cdev, Check.IOMMUFD, WARN, f"no node below /dev/vfio/devices for {GPU}",
         "CONFIG_VFIO_DEVICE_CDEV"),
    Seed("no host", no_host, Check.HOST_READABLE, FAIL, "the PCI bus cannot be listed", "--host-root"),
    Seed("parameter", unreadable_parameter, Check.HOST_READABLE, FAIL, "noiommu_mode cannot be read", "as root"),
)  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_what_is_wrong_is_found_and_says_what_to_do(seed: Seed) -> None:
    with open_patient() as patient:
        seed.plant(patient)
        found = patient.examined(pre=True)
        seed.assert_found(findings(found))
        assert found.is_failed == any(f.level is FAIL for f in wrong(found))


@pytest.mark.parametrize(
    "beside",
    [disk_of_the_host_beside, unbound_beside_a_disk_of_the_host, claimable_beside_a_disk_of_the_host],
)
def test_no_advice_takes_a_function_from_the_host(beside: Callable[[Patient], None]) -> None:
    """A pasted line would take the root disk from the host at each boot."""
    with open_patient() as patient:
        beside(patient)
        found = findings(patient.examined(pre=True))
        assert any(DISK in f.message for f in found)
        assert [f.remedy for f in found if DISK in f.remedy] == []


def test_a_driver_that_a_claim_has_loaded_is_none_of_the_administrators_work() -> None:
    with open_patient() as patient:
        not_loaded_for_claims(patient)
        patient.flags["load_modules"] = "on"

        def levels() -> list[Level]:
            return [f.level for f in findings(patient.examined(pre=True)) if f.check is Check.VFIO_PCI]

        assert levels() == [Level.WARN], "whether the kernel has it is not known"
        patient.put("/proc/sys/kernel/osrelease", f"{RELEASE}\n")
        dependencies = f"/lib/modules/{RELEASE}/modules.dep"
        patient.put(dependencies, "kernel/drivers/vfio/vfio.ko:\n")
        assert levels() == [FAIL]
        patient.put(dependencies, "kernel/drivers/vfio/pci/vfio-pci.ko: kernel/drivers/vfio/vfio.ko\n")
        assert levels() == [Level.PASS]


@pytest.mark.parametrize("cdev", [False, True])
def test_a_healthy_host_has_nothing_to_be_done(cdev: bool) -> None:
    with open_patient(cdev=cdev) as patient:
        patient.gpu()
        patient.companion("vfio-pci")
        patient.gpu(0x24)
        found = patient.examined(pre=True)
        assert wrong(found) == []
        said = {f.check: f.message for f in findings(found) if f.check is not Check.GPUS_USABLE}
        assert said[Check.IOMMU_ON] == "IOMMU groups: 2, by dmar0; kernel command line: intel_iommu=on"
        assert said[Check.GPUS_SELECTED].endswith(": 2 × GH100 [H100 SXM5 80GB] (10de:2330); on vfio-pci (2)")
        assert said[Check.NODE_MODES].startswith("/dev/vfio/vfio (0666); group nodes: 2 (0600)")
        assert ("and a node below /dev/vfio/devices" in said[Check.IOMMUFD]) is cdev


DATED = """\
#
#\tList of PCI ID's
#
#\tVersion: {date}
#\tDate:    {date} 03:15:02
#
10de  NVIDIA Corporation
{devices}"""


def names_of(patient: Patient, path: str, date: str, **devices: str) -> Path:
    """A file of names on the host; by device id, with an underscore before it."""
    lines = "".join(f"\t{device[1:]}  {name}\n" for device, name in devices.items())
    return patient.put(path, DATED.format(date=date, devices=lines))


def test_what_a_newer_file_of_names_would_change_is_said() -> None:
    with open_patient() as patient:
        patient.gpu()
        patient.node.plug(0x24, "3182")
        used = names_of(patient, "/etc/pci.ids", "2999-01-01", _2330="GH100 [H100 SXM5 80GB]")
        names_of(patient, "/usr/share/misc/pci.ids", "2999-01-01", _2330="of the same day")
        patient.flags["pci_ids"] = str(used)

        def said() -> list[Finding]:
            return [f for f in findings(patient.examined(pre=True)) if f.check is Check.MODEL_NAMES]

        names_of(patient, "/usr/share/pci.ids", "2999-12-31")  # it names no device of NVIDIA
        (warned,) = said()
        assert "--pci-ids=" not in warned.remedy
        newer = names_of(
            patient,
            "/usr/share/hwdata/pci.ids",
            "2999-06-16",
            _2330="GH100 [H100]",
            _3182="GB110 [B300 SXM6 AC]",
        )
        warned, passed = said()
        assert warned.message.startswith("10de:3182 has no name in pci.ids of 2999-01-01")
        named = f"Use --pci-ids={newer} of 2999-06-16, which names it nvidia.com/GB110_B300_SXM6_AC. Or: "
        assert warned.remedy.startswith(named)
        assert passed.level is Level.PASS
        changes = "some resources have another name: nvidia.com/GH100_H100_SXM5_80GB is nvidia.com/GH100_H100"
        assert passed.message == f"with the newer {newer} of 2999-06-16 {changes}"
        patient.flags["resource_name"] = ("10de:3182=nvidia.com/B300", "10de:2330=nvidia.com/H100")
        assert said() == []


def test_a_newer_file_of_names_that_changes_none_is_named() -> None:
    with open_patient() as patient:
        patient.gpu()
        older = names_of(patient, "/etc/pci.ids", "2020-01-01", _2330="GH100 [H100 SXM5 80GB]")
        patient.flags["pci_ids"] = str(older)
        (passed,) = [f for f in findings(patient.examined(pre=True)) if f.check is Check.MODEL_NAMES]
        assert passed.message == (
            f"every model has a name in pci.ids of 2020-01-01; the newer {SHIPPED} of {date_of(SHIPPED)} changes none"
        )


def test_a_gpu_on_the_hosts_driver_is_as_it_should_be_for_claims() -> None:
    with open_patient() as patient:
        patient.gpu(driver="nvidia")
        patient.flags |= {"dra": "on", "device_plugin": "off"}
        found = patient.examined(pre=True)
        assert wrong(found) == []
        assert "a claim binds those" in next(
            f.message for f in findings(found) if f.check is Check.GPUS_USABLE
        )


def test_holders_by_proc_need_no_suspended_gpu() -> None:
    with open_patient() as patient:
        awake(patient)
        patient.put("/proc/1/comm", "init\n")
        patient.flags["holders"] = "proc"
        assert Check.IDLE_D3 not in {f.check for f in wrong(patient.examined(pre=True))}


def test_a_variant_driver_needs_no_vfio_pci() -> None:
    with open_patient() as patient:
        patient.gpu(driver="nvgrace_gpu_vfio_pci")
        (patient.node.tree.root / "sys/bus/pci/drivers/vfio-pci").rmdir()
        assert wrong(patient.examined(pre=True)) == []


def test_a_sysfs_that_hangs_does_not_hang_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs_s = patience.patient(2.0)
    monkeypatch.setattr(gather, "DOCTOR_READ_S", hangs_s)
    monkeypatch.setattr(progress, "PROGRESS_SILENT_S", 0.1)
    answers = threading.Event()
    with open_patient() as patient:
        patient.gpu()
        bus = str(patient.node.tree.root / "sys/bus/pci/devices")

        def listing(directory: str) -> list[str]:
            if directory == bus:
                answers.wait()
            return os.listdir(directory)

        monkeypatch.setattr(sysfs, "_listing", listing)
        try:
            found = patient.examined(pre=True)
        finally:
            answers.set()
        seed = Seed(
            "hangs", no_host, Check.HOST_READABLE, FAIL, f"within {hangs_s:g} s: it hangs", "--host-root"
        )
        seed.assert_found(wrong(found))
        assert f"reading the PCI bus of {patient.node.tree.root} …" in patient.terminal.getvalue()
        assert Check.IOMMU_ON in {f.check for f in findings(found)}, "the rest is checked all the same"


def test_a_function_that_hangs_is_found_as_the_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan is made without it before the doctor gives the scan up."""
    monkeypatch.setattr(gather, "DOCTOR_READ_S", patience.patient(gather.DOCTOR_READ_S))
    with open_patient() as patient:
        patient.gpu()
        patient.gpu(0x24)
        patient.node.tree.make_hang(GPU, "vendor")
        try:
            found = wrong(patient.examined(pre=True))
        finally:
            patient.node.tree.end_hang(GPU, "vendor", b"0x10de\n")
        seed = Seed(
            "function", no_host, Check.GPUS_USABLE, FAIL, "does not answer", "dmesg", "Unreadable", (GPU,)
        )
        seed.assert_found(found)
        assert len(found) == 1, "the other GPU is read"


def test_before_installation_nothing_of_ours_is_expected(tmp_path: Path) -> None:
    with open_patient(started=False) as patient:
        patient.gpu()
        patient.flags |= {"dra": "on", "state_dir": "/dev/null/s", "cdi_dir": "/dev/null/cdi"}
        groups = {group.name for group in patient.examined(pre=True).groups}
        assert groups == {"IOMMU", "GPUs", "names", "vfio", "kubelet", "KubeVirt"}
