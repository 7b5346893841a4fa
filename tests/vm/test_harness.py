"""Does the harness tell a guest that passed from everything else? QEMU is played by a shell script here."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vm.boot import GuestRun, run_guest
from tests.vm.initramfs import CpioArchive
from tests.vm.machine import (
    CUT_MARKER,
    GUEST_STATUS_BASE,
    READY_MARKER,
    VFIO_USER,
    Machine,
    PciFunction,
    PciIds,
    disk_image,
    qemu_arguments,
)
from tests.vm.qemu_root import PROGRAM, STARTER, starter

READY = f"echo '{READY_MARKER}'"


def leave(status: int) -> str:
    """How isa-debug-exit ends QEMU when the guest's scenario ended with `status`."""
    return f"exit {2 * (GUEST_STATUS_BASE + status) + 1}"


@dataclass(frozen=True, slots=True)
class Case:
    """A script, the limits it runs under, and how the run must be judged."""

    script: str
    status: int | None
    boots: int
    trouble: str = ""
    limit_s: float = 30.0
    power_cut: bool = False

    @property
    def machine(self) -> Machine:
        return Machine(ports=(), boot_timeout_s=self.limit_s, scenario_timeout_s=self.limit_s)


CASES = {
    "passed": Case(f"{READY}; {leave(0)}", status=0, boots=1),
    "failed": Case(f"{READY}; {leave(1)}", status=1, boots=1),
    "killed by a signal": Case(f"{READY}; {leave(100)}", status=100, boots=1),
    "QEMU could not start": Case("exit 1", status=None, boots=2, trouble="QEMU ended with 1"),
    "guest died before the marker": Case(
        "echo oops; exit 0", status=None, boots=2, trouble="QEMU ended with 0"
    ),
    "guest died once before the marker": Case(
        f"test -e again || {{ touch again; exit 0; }}; {READY}; {leave(0)}", status=0, boots=2
    ),
    "guest died after the marker": Case(
        f"{READY}; exit 0", status=None, boots=1, trouble="QEMU ended with 0"
    ),
    "QEMU crashed": Case(f"{READY}; kill -SEGV $$", status=None, boots=1, trouble="QEMU ended with -11"),
    "the guest finds itself slow": Case(
        f"echo '{READY_MARKER}: s on k, bounds times 100.0'; sleep 0.5; {leave(0)}",
        status=0,
        boots=1,
        limit_s=0.1,
    ),
    "boot hangs": Case("exec sleep 60", status=None, boots=2, trouble="did not come to Python", limit_s=0.2),
    "boot hangs and chatters": Case(
        "while :; do echo again; done", status=None, boots=2, trouble="did not come to Python", limit_s=0.2
    ),
    "scenario hangs": Case(
        f"{READY}; exec sleep 60", status=None, boots=1, trouble="did not end", limit_s=1.0
    ),
    "power is cut": Case(
        f"{READY}; echo '{CUT_MARKER} 0.100 s'; exec sleep 60", status=None, boots=1, power_cut=True
    ),
    "power would have been cut": Case(
        f"{READY}; echo '{CUT_MARKER} 20.000 s'; {leave(0)}", status=0, boots=1
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_how_a_run_is_judged(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = play(case, tmp_path)
    assert (run.status, run.boots) == (case.status, case.boots)
    assert run.passed is (case.status == 0)
    assert run.power_cut is case.power_cut
    assert case.trouble in (run.trouble or "")
    assert (tmp_path / "serial.log").read_text().endswith(run.console)


def play(case: Case, directory: Path) -> GuestRun:
    """Run the case's script in place of QEMU."""
    script = directory / "qemu"
    script.write_text(f"#!/bin/sh\ncd {directory}\n{case.script}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return run_guest(script, Path("kernel"), case.machine, Path("initrd"), directory)


def test_a_report_shows_the_end_of_the_console(tmp_path: Path) -> None:
    run = play(Case(f"{READY}; echo the last words; {leave(1)}", status=1, boots=1), tmp_path)
    assert "the last words" in run.report()
    assert str(tmp_path) in run.report()


def test_machine_as_arguments() -> None:
    machine = Machine(
        ports=("a", "b"),
        functions=(
            PciFunction("x", "e1000e", "b", function=0, properties=("romfile=",)),
            PciFunction("y", "edu", "b", function=1),
            PciFunction("z", "edu", "a", properties=("subsys=s",), before=("nvme-subsys,id=s",)),
        ),
        kernel_arguments=("more=1",),
    )
    arguments = qemu_arguments(
        machine,
        kernel_image=Path("k"),
        initrd=Path("i"),
        artifacts=Path("/with,comma"),
        monitor_fd=3,
        guest_port_fd=4,
    )
    assert "pcie-root-port,id=b,bus=pcie.0,addr=0x5,chassis=2,slot=2" in arguments
    assert "e1000e,id=x,bus=b,addr=0.0,multifunction=on,romfile=" in arguments
    assert "edu,id=y,bus=b,addr=0.1,multifunction=on" in arguments
    at = arguments.index("nvme-subsys,id=s")
    assert arguments[at - 1 : at + 3] == [
        "-device", "nvme-subsys,id=s", "-device", "edu,id=z,bus=a,addr=0.0,subsys=s",
    ]  # fmt: skip
    assert "local,id=artifacts,path=/with,,comma,security_model=none" in arguments
    assert arguments[arguments.index("-append") + 1].endswith(" more=1")
    assert machine.port_address("b") == "0000:00:05.0"


H100 = PciFunction("gpu", VFIO_USER, "a", ids=PciIds("10de", "2330", "030200"))


def test_functions_with_ids_as_arguments() -> None:
    audio = PciFunction("audio", VFIO_USER, "a", function=1, ids=PciIds("10de", "22ba", "040300"))
    machine = Machine(ports=("a", "b"), functions=(H100, audio), spares=(PciFunction("late", "edu", "b"),))
    arguments = qemu_arguments(
        machine,
        kernel_image=Path("k"),
        initrd=Path("i"),
        artifacts=Path("a"),
        monitor_fd=3,
        guest_port_fd=4,
    )
    devices = [json.loads(argument) for argument in arguments if argument.startswith("{")]
    assert devices == [
        {
            "driver": "vfio-user-pci", "id": "gpu", "bus": "a", "addr": "0.0", "multifunction": True,
            "socket": {"type": "unix", "path": "gpu.sock"},
        },
        {
            "driver": "vfio-user-pci", "id": "audio", "bus": "a", "addr": "0.1", "multifunction": True,
            "socket": {"type": "unix", "path": "audio.sock"},
        },
    ]  # fmt: skip
    assert "late" not in "".join(arguments)


def test_a_guest_that_breaks_the_protocol_of_its_functions_fails(tmp_path: Path) -> None:
    machine = Machine(ports=("a",), functions=(H100,), boot_timeout_s=30, scenario_timeout_s=30)
    connect = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('gpu.sock')"
    hear_the_end = "s.shutdown(socket.SHUT_WR); s.recv(1)"
    for said, passed in (("''", True), ("'GET / HTTP/1.1\\r\\n'", False)):
        script = tmp_path / "qemu"
        script.write_text(
            f"#!/bin/sh\n{READY}\n"
            f'{sys.executable} -Sc "{connect}; s.sendall({said}.encode()); {hear_the_end}"\n{leave(0)}\n'
        )
        script.chmod(0o755)
        run = run_guest(script, Path("kernel"), machine, Path("initrd"), tmp_path)
        assert run.passed is passed, run.report()
        assert ("gpu: " in run.report()) is not passed


def test_qemu_is_started_with_its_own_libraries_wherever_it_is(tmp_path: Path) -> None:
    root = tmp_path / "with space"
    linker = root / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    linker.parent.mkdir(parents=True)
    linker.write_text('#!/bin/sh\nprintf "%s\\n" "$QEMU_MODULE_DIR" "$@"\n')
    starter(root).write_text(STARTER)
    for program in (linker, starter(root)):
        program.chmod(0o755)
    said = subprocess.run([starter(root), "-m", "1 G"], capture_output=True, text=True, check=True)
    modules, *arguments = said.stdout.splitlines()
    assert modules == f"{linker.parent}/qemu"
    assert arguments[:3] == ["--library-path", str(linker.parent), str(root / "usr/bin" / PROGRAM)]
    assert arguments[-2:] == ["-m", "1 G"]


def test_a_disk_is_beside_the_artifacts() -> None:
    arguments = qemu_arguments(
        Machine(ports=("a",), disk_mib=64),
        kernel_image=Path("k"),
        initrd=Path("i"),
        artifacts=Path("/with,comma"),
        monitor_fd=3,
        guest_port_fd=4,
    )
    assert disk_image(Path("/with,comma")) == Path("/with,comma/disk.img")
    (drive,) = (word for word in arguments if word.startswith("if=none"))
    assert drive.endswith(",file=/with,,comma/disk.img")


@pytest.mark.parametrize(
    ("functions", "sentence"),
    [
        ((PciFunction("x", "edu", "nowhere"),), "not a root port"),
        ((PciFunction("x", "edu", "a"), PciFunction("y", "edu", "a")), "two functions at one place"),
    ],
)
def test_a_machine_that_cannot_be(functions: tuple[PciFunction, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Machine(ports=("a",), functions=functions)


@pytest.mark.parametrize(
    ("model", "ids", "properties"),
    [
        ("edu", PciIds("10de", "2330", "030200"), ()),
        (VFIO_USER, None, ()),
        (VFIO_USER, PciIds("10de", "2330", "030200"), ("romfile=",)),
    ],
)
def test_a_function_that_cannot_be(model: str, ids: PciIds | None, properties: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"ids go with {VFIO_USER}"):
        PciFunction("x", model, "a", ids=ids, properties=properties)


def test_cpio_is_readable_by_the_kernels_rules() -> None:
    archive = CpioArchive()
    archive.file("modules/a/b.ko", b"12345", 0o644)
    archive.file("modules/c", b"")
    entries = read_newc(archive.finish())
    assert entries == {
        "modules": (0o040755, b""),
        "modules/a": (0o040755, b""),
        "modules/a/b.ko": (0o100644, b"12345"),
        "modules/c": (0o100755, b""),
    }


def read_newc(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Names, modes and contents of a newc archive, read by buffer-format.rst and not by what wrote it."""
    entries: dict[str, tuple[int, bytes]] = {}
    offset = 0
    while True:
        assert data[offset : offset + 6] == b"070701"
        header = data[offset + 6 : offset + 110]
        fields = [int(header[8 * index : 8 * index + 8], 16) for index in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = os.fsdecode(data[offset + 110 : offset + 110 + name_size - 1])
        offset += (110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            return entries
        entries[name] = (mode, data[offset : offset + size])
        offset += (size + 3) // 4 * 4
