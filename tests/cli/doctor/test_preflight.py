"""What decides whether a virtual machine works with its GPU, and is no matter of the GPU itself: on real files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuactors.cli.doctor.finding import Check, Finding, Level
from tests.cli.doctor.rig import GPU, Patient, findings, open_patient
from tests.process.node import address

PASS, WARN, FAIL = Level.PASS, Level.WARN, Level.FAIL
BAR0, BAR1 = "0x00000000b3000000 0x00000000b3ffffff 0x40200", "0x0000002800000000 0x0000002fffffffff 0x14220c"
NONE = "0x0000000000000000 0x0000000000000000 0x0"
RAM = "00001000-0009ffff : System RAM\n"
IN_BAR = (
    f"{RAM}2800000000-2fffffffff : {GPU}\n  2800000000-2801fa3fff : BOOTFB\n    2800000000-2801fa3fff : fb\n"
)
IN_BMC = f"{RAM}91000000-917fffff : BOOTFB\n"
HIDDEN = "00000000-00000000 : System RAM\n  00000000-00000000 : BOOTFB\n"
BMC = address(0x02)


@contextmanager
def patient() -> Iterator[Patient]:
    with open_patient() as at:
        at.gpu()
        at.put(f"/sys/bus/pci/devices/{GPU}/resource", "\n".join([BAR0, BAR1, *[NONE] * 11]) + "\n")
        yield at


def found(at: Patient, check: Check) -> list[Finding]:
    return [finding for finding in findings(at.examined(pre=True)) if finding.check is check]


# --- the boot framebuffer -------------------------------------------------------------------------------------------


def framebuffer(at: Patient) -> list[Finding]:
    return found(at, Check.BOOT_FRAMEBUFFER)


def with_device(at: Patient, name: str = "simple-framebuffer.0") -> None:
    at.put(f"/sys/bus/platform/devices/{name}/uevent", "")


@pytest.mark.parametrize("name", ["BOOTFB", "efifb", "vesafb", "simpledrm"])
def test_a_framebuffer_in_a_bar_is_named_with_its_remedy(name: str) -> None:
    with patient() as at:
        at.put("/proc/iomem", IN_BAR.replace("BOOTFB", name))
        with_device(at)
        (warning,) = framebuffer(at)
    assert (warning.check, warning.level, warning.devices) == (Check.BOOT_FRAMEBUFFER, WARN, (GPU,))
    assert f"{name} 2800000000-2801fa3fff is in BAR 1 of {GPU}" in warning.message
    assert "simple-framebuffer.0" in warning.message
    assert "initcall_blacklist=sysfb_init" in warning.remedy


def test_one_on_another_function_is_well_and_without_one_nothing_is_said() -> None:
    with patient() as at:
        assert framebuffer(at) == []
        at.put("/proc/iomem", RAM)
        assert framebuffer(at) == []
        at.put("/proc/iomem", IN_BMC)
        with_device(at, "efi-framebuffer.0")
        assert [f.level for f in framebuffer(at)] == [PASS]


@pytest.mark.parametrize("text", [HIDDEN, ""], ids=["zeros", "not mounted"])
@pytest.mark.parametrize(
    ("boot_vga", "levels"), [(GPU, [WARN]), (BMC, []), (None, [WARN])], ids=["GPU", "BMC", "nobody"]
)
def test_where_addresses_are_hidden_it_never_passes(
    text: str, boot_vga: str | None, levels: list[Level]
) -> None:
    """Without CAP_SYS_ADMIN all of them are zero. Most servers have a framebuffer, on their BMC."""
    with patient() as at:
        at.put("/proc/iomem", text)
        with_device(at)
        if boot_vga is not None:
            at.put(f"/sys/bus/pci/devices/{boot_vga}/boot_vga", "1\n")
        warnings = framebuffer(at)
    assert [w.level for w in warnings] == levels
    assert all("not known" in w.message and "CAP_SYS_ADMIN" in w.remedy for w in warnings)


def test_a_gpu_whose_bars_are_not_known_is_not_passed() -> None:
    with patient() as at:
        at.put("/proc/iomem", IN_BMC)
        at.put(f"/sys/bus/pci/devices/{GPU}/resource", "")
        assert framebuffer(at) == []


# --- interrupts and memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interrupts", "unsafe", "level"),
    [
        (" 24: 1 IR-PCI-MSIX-0000:23:00.0 0-edge\n", None, PASS),
        ("  1: 9 IO-APIC 1-edge i8042\n 24: 1 PCI-MSI 1-edge\n", None, FAIL),
        ("  1: 9 IO-APIC 1-edge i8042\n", "N", FAIL),
        ("  1: 9 IO-APIC 1-edge i8042\n", "Y", WARN),
        (" 11: 5 GICv3 30 Level arch_timer\n", None, None),
        ("", None, None),
    ],
    ids=["remapped", "not", "not allowed", "unsafe", "arm", "not seen"],
)
def test_without_interrupt_remapping_vfio_refuses(
    interrupts: str, unsafe: str | None, level: Level | None
) -> None:
    with patient() as at:
        at.put("/proc/interrupts", interrupts)
        if unsafe is not None:
            at.put("/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", f"{unsafe}\n")
        said = [(f.check, f.level) for f in found(at, Check.INTERRUPT_REMAPPING)]
        assert said == ([(Check.INTERRUPT_REMAPPING, level)] if level else [])


@pytest.mark.parametrize(
    ("limit", "words"), [("8388608", "may lock 8 MiB: enough for KubeVirt"), ("unlimited", "without limit")]
)
def test_the_limit_of_locked_memory_is_that_of_the_container_runtime(limit: str, words: str) -> None:
    with patient() as at:
        assert found(at, Check.LOCKED_MEMORY) == []
        at.put("/proc/77/comm", "containerd\n")
        at.put(
            "/proc/77/limits",
            f"Limit Soft Limit Hard Limit Units\nMax locked memory  65536  {limit}  bytes\n",
        )
        (finding,) = found(at, Check.LOCKED_MEMORY)
    assert words in finding.message


# --- CDI ------------------------------------------------------------------------------------------------------------

V2 = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n'
V3 = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n"


@pytest.mark.parametrize(
    ("config", "level", "words"),
    [
        (V3, PASS, "by default of containerd 2.x"),
        (V3 + "enable_cdi = false\n", FAIL, "switches CDI off"),
        (V2 + "enable_cdi = true\n", PASS, "enable_cdi"),
        (V2, WARN, "is not in 1.7"),
        ("", WARN, "does not say"),
        (
            V2 + 'enable_cdi = true\ncdi_spec_dirs = ["/etc/cdi"]\n',
            FAIL,
            "those of claims are in /var/run/cdi",
        ),
        (V3 + 'cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]\n', PASS, "CDI on"),
        ("version = [", WARN, "not known"),
        ("a = " + "[" * 5_000 + "]" * 5_000, WARN, "nests too deep"),
    ],
)
def test_cdi_in_containerd_follows_from_its_configuration(config: str, level: Level, words: str) -> None:
    with patient() as at:
        at.flags["dra"] = "on"
        at.put("/etc/containerd/config.toml", config)
        (finding,) = found(at, Check.RUNTIME_CDI)
        assert (finding.check, finding.level) == (Check.RUNTIME_CDI, level), finding
        assert words in finding.message
        at.flags["dra"] = "off"
        assert found(at, Check.RUNTIME_CDI) == [], "claims are off"


def test_what_containerd_imports_counts_as_well() -> None:
    with patient() as at:
        at.flags["dra"] = "on"
        at.put("/etc/containerd/config.toml", 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml", 7]\n')
        at.put("/etc/containerd/conf.d/99-nvidia.toml", V2 + "enable_cdi = true\n")
        at.put("/etc/containerd/conf.d/readme", "no TOML")
        assert [f.level for f in found(at, Check.RUNTIME_CDI)] == [PASS]


@pytest.mark.parametrize(
    ("config", "level"),
    [("[crio.runtime]\n", PASS), ('[crio.runtime]\ncdi_spec_dirs = ["/opt/cdi"]\n', FAIL), ("[crio", WARN)],
)
def test_crio_has_cdi_on_and_may_look_elsewhere(config: str, level: Level) -> None:
    with patient() as at:
        at.flags["dra"] = "on"
        assert found(at, Check.RUNTIME_CDI) == [], "no runtime's configuration is to be seen"
        at.put("/etc/crio/crio.conf.d/10-cdi.conf", config)
        assert [f.level for f in found(at, Check.RUNTIME_CDI)] == [level]
