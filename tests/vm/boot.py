"""Run one scenario in one guest: start QEMU, follow the serial console, bring back the guest's exit status.

Must not know what a scenario does. Every wait has a deadline, and QEMU never outlives the call.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from tests.release.image import have_image
from tests.support.patience import patient
from tests.vm.commands import ProvisionError
from tests.vm.initramfs import build_initramfs, built_in_modules
from tests.vm.machine import (
    CUT_MARKER,
    DISK_MODULES,
    GUEST_STATUS_BASE,
    READY_MARKER,
    Machine,
    disk_image,
    qemu_arguments,
)
from tests.vm.matrix import Cell
from tests.vm.provision import CHECKOUT, Kernel, cached_busybox, cached_kernel, qemu_path
from tests.vm.vfio_user import serving

HERE: Final = Path(__file__).resolve().parent

BOOTS: Final = 2
"""QEMU 7.2 under emulation died in about 1 of 200 boots (a double fault of the guest's kernel, long before Python), and
nobody has counted as many of QEMU 11 yet: one more try, and only where the ready marker has not been seen."""

POWER_CUT: Final = "the power was cut"
"""The trouble of a guest that announced it."""

_READY: Final = re.compile(re.escape(READY_MARKER.encode()) + rb"(?:[^\n]* bounds times (\d+\.\d+))?[^\n]*\n")
"""With how much longer than on a quiet machine everything may take in the guest, as it measured itself."""

_CUT: Final = re.compile(CUT_MARKER.encode() + rb" (\d+\.\d+) s\r?\n")

EMULATED_TURN_S: Final = 0.015
"""What `patience` measures in a guest whose emulation has a core to itself: the guest's bounds are multiplied by how
much longer it takes than this. (Seen: 60 ms where four others wait for each core.)"""

WARM_TIMEOUT_S: Final = patient(60.0)
"""Importing the modules on the host: about two seconds, several with nothing compiled yet."""

IMPORT_EACH: Final = """
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
"""

MKFS: Final = "mkfs.ext4"
"""Of e2fsprogs, which Debian always has."""

LAST_LINES: Final = 80
"""Lines of the serial console that a failure shows; the whole is in the artifacts."""


@dataclass(frozen=True, slots=True)
class GuestRun:
    """How one scenario ended.

    `status` is the scenario's own exit status, None where the guest never said one (`trouble` then says why). Times
    are seconds of the host's clock: QEMU's start to the ready marker, and from there to the end.
    """

    status: int | None
    trouble: str | None
    boots: int
    boot_s: float
    scenario_s: float
    artifacts: Path
    console: str
    power_cut: bool = False
    """The guest announced it, and QEMU was killed: there is no status then, and nothing wrong."""

    @property
    def passed(self) -> bool:
        """The guest ran the scenario to its end and the scenario was content."""
        return self.status == 0

    @property
    def ending(self) -> str:
        """How it ended, as a sentence."""
        return self.trouble or f"the scenario ended with status {self.status}"

    def report(self) -> str:
        """What a failed test shows."""
        lines = self.console.splitlines()[-LAST_LINES:]
        return "\n".join((self.ending, f"artifacts: {self.artifacts}", "end of the serial console:", *lines))


def logs_dir() -> Path:
    """Where the artifacts of each scenario's last run are: `var/vm/logs/<scenario>@<kernel>/` of the checkout."""
    return CHECKOUT / "var" / "vm" / "logs"


def fresh_artifacts(cell: Cell) -> Path:
    """The artifacts directory of a scenario on a kernel, emptied."""
    artifacts = logs_dir() / cell.directory
    shutil.rmtree(artifacts, ignore_errors=True)
    artifacts.mkdir(parents=True)
    return artifacts


def run_scenario(cell: Cell) -> GuestRun:
    """Run module `tests.vm.guest.<scenario>` in a fresh guest that is its machine, with that kernel.

    The artifacts directory is emptied first and holds, after the run, `serial.log` and whatever the scenario wrote to
    `/run/artifacts`. Raises ProvisionError where QEMU, kernel or busybox are missing or the image cannot be built, and
    InitramfsError where the kernel lacks a module; a guest that fails is not an exception but a GuestRun.
    """
    cell = replace(cell, machine=on_this_host(cell.machine))
    if cell.machine.image:
        have_image()
    artifacts = fresh_artifacts(cell)
    if cell.machine.disk_mib:
        _make_disk(disk_image(artifacts), cell.machine.disk_mib)
    _warm_bytecode(cell.scenario)
    seed = os.environ.get("GPUACTORS_VM_SEED") or secrets.token_hex(4)
    lives = cell.machine.power_cuts + 1
    for life in range(1, lives + 1):
        run = _live(cell, artifacts, {"life": str(life), "lives": str(lives), "seed": seed})
        if not run.power_cut:
            break
    if run.passed and life < lives:
        return replace(run, status=None, trouble=f"life {life} of {lives} ended without its power cut")
    if run.passed:
        disk_image(artifacts).unlink(missing_ok=True)
    return run


def _live(cell: Cell, artifacts: Path, life: Mapping[str, str]) -> GuestRun:
    """One life of the machine: the only one, if its power is never cut."""
    qemu, kernel, busybox = qemu_path(), cached_kernel(cell.kernel), cached_busybox()
    machine = with_parameters(cell.machine, kernel)
    initrd = artifacts / "initrd"
    initrd.write_bytes(
        build_initramfs(
            kernel,
            busybox,
            (HERE / "init").read_bytes(),
            modules=(*machine.modules, *(DISK_MODULES if machine.disk_mib else ())),
            files={"stage2": (HERE / "stage2").read_bytes(), "job": _job(cell, qemu, life)},
        )
    )
    try:
        return run_guest(qemu, kernel.image, machine, initrd, artifacts)
    finally:
        initrd.unlink()


def _make_disk(path: Path, mib: int) -> None:
    with path.open("wb") as file:
        file.truncate(mib << 20)
    program = shutil.which(MKFS, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise ProvisionError(f"there is no {MKFS} on PATH: install e2fsprogs")
    subprocess.run([program, "-q", "-F", str(path)], stdin=subprocess.DEVNULL, check=True)


def run_guest(qemu: Path, kernel_image: Path, machine: Machine, initrd: Path, artifacts: Path) -> GuestRun:
    """Boot and follow one guest to its end; a boot that ends before the ready marker is tried once more."""
    # Sockets are in a directory of their own: below a checkout their paths could be longer than a socket's may be.
    with (
        tempfile.TemporaryDirectory(prefix="gpuactors-vm-") as directory,
        serving((*machine.functions, *machine.spares), Path(directory)) as complaints,
    ):
        for boots in range(1, BOOTS + 1):
            with (artifacts / "serial.log").open("ab") as log:
                run = _boot(qemu, kernel_image, machine, initrd, artifacts, log, boots, Path(directory))
            if run.status is not None or READY_MARKER in run.console:
                break
    return replace(run, status=None, trouble="; ".join(complaints)) if complaints else run


def _warm_bytecode(scenario: str) -> None:
    """Import on the host what the guest will import, so that the guest finds compiled modules.

    In a fresh checkout most of them are not compiled yet, the guest cannot keep what it compiles, and compiling under
    emulation takes several times as long as everything else that a scenario does. Failures are left to the guest: there
    they are the scenario's own, with their traceback on the console.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    modules = (
        "gpuactors.__main__",
        "gpuactors.daemon.app",
        "gpuactors.daemon.claims",
        "gpuactors.cli.inspect.own",
        "gpuactors.cli.inspect.report",
        "gpuactors.cli.doctor.run",
        "tests.vm.guest.runner",
        f"tests.vm.guest.{scenario}",
        # What it imports later, where there is such a module.
        f"tests.vm.guest.{scenario.removeprefix('scenario_')}",
    )
    subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *modules],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        timeout=WARM_TIMEOUT_S,
        check=False,
    )


def on_this_host(machine: Machine) -> Machine:
    """The machine with as much time to boot as it needs where the host is busy. After that the guest says how much."""
    return replace(machine, boot_timeout_s=patient(machine.boot_timeout_s))


def with_parameters(machine: Machine, kernel: Kernel) -> Machine:
    """Where vfio-pci is no module its parameters go on the kernel's command line, as `vfio_pci.ids=…`."""
    if "vfio_pci" not in built_in_modules(kernel):
        return machine
    parameters = tuple(f"vfio_pci.{parameter}" for parameter in machine.vfio_pci_parameters)
    return replace(machine, kernel_arguments=(*machine.kernel_arguments, *parameters))


def _job(cell: Cell, qemu: Path, life: Mapping[str, str]) -> bytes:
    """Shell variables for `init` and `stage2`: in the initramfs, because a kernel command line knows no quoting."""
    variables = {
        "checkout": str(CHECKOUT),
        # Not resolved: the path inside the virtual environment is what makes Python see its packages.
        "python": sys.executable,
        # Resolved: `init` looks below its own mount of the host's root, where an absolute link leads elsewhere.
        "qemu": str(qemu.parent.resolve()),
        "scenario": cell.scenario,
        "kernel": cell.kernel,
        "scenario_timeout_s": str(cell.machine.scenario_timeout_s),
        "turn_s": str(EMULATED_TURN_S),
        "vfio_pci_parameters": " ".join(cell.machine.vfio_pci_parameters),
        "status_base": str(GUEST_STATUS_BASE),
        "rounds": os.environ.get("GPUACTORS_VM_ROUNDS", ""),
        **life,
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items()).encode()


def _boot(
    qemu: Path,
    kernel_image: Path,
    machine: Machine,
    initrd: Path,
    artifacts: Path,
    log: IO[bytes],
    boots: int,
    directory: Path,
) -> GuestRun:
    monitor, guest_port = socket.socketpair()
    started = time.monotonic()
    with monitor, guest_port:
        arguments = qemu_arguments(
            machine, kernel_image=kernel_image, initrd=initrd, artifacts=artifacts,
            monitor_fd=monitor.fileno(), guest_port_fd=guest_port.fileno(),
        )  # fmt: skip
        process = subprocess.Popen(
            [str(qemu), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(monitor.fileno(), guest_port.fileno()),
            # Where the sockets are: their names stand for them on the command line and when the guest plugs.
            cwd=directory,
            # A session of its own: Ctrl-C at the terminal ends pytest, which ends QEMU below.
            start_new_session=True,
        )  # fmt: skip
    try:
        console, ready, trouble = _follow(process, machine, started, log)
        power_cut = trouble == POWER_CUT
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        exit_code = process.wait()
        assert process.stdout is not None
        process.stdout.close()
    ended = time.monotonic()
    status = _guest_status(exit_code) if trouble is None else None
    if status is None and trouble is None:
        trouble = f"QEMU ended with {exit_code} and without the guest's exit status"
    return GuestRun(
        status=status,
        trouble=trouble,
        boots=boots,
        boot_s=(ready or ended) - started,
        scenario_s=ended - (ready or ended),
        artifacts=artifacts,
        console=console.decode(errors="replace"),
        power_cut=power_cut,
    )


def _guest_status(exit_code: int) -> int | None:
    """The scenario's status in QEMU's, or None: isa-debug-exit makes 2 * byte + 1 of the byte written."""
    if exit_code < 0 or exit_code % 2 == 0 or exit_code // 2 < GUEST_STATUS_BASE:
        return None
    return exit_code // 2 - GUEST_STATUS_BASE


def _follow(
    process: subprocess.Popen[bytes], machine: Machine, started: float, log: IO[bytes]
) -> tuple[bytes, float | None, str | None]:
    """Read the serial console until QEMU ends or a deadline passes: (console, time of the ready marker, trouble)."""
    assert process.stdout is not None
    console = bytearray()
    ready: float | None = None
    cut = False
    deadline = started + machine.boot_timeout_s
    scenario_s = machine.scenario_timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                if cut:
                    return bytes(console), ready, POWER_CUT
                what, limit_s = (
                    ("boot did not come to Python", machine.boot_timeout_s) if ready is None
                    else ("scenario did not end", scenario_s)
                )  # fmt: skip
                return bytes(console), ready, f"the {what} within {limit_s:.0f} s"
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                return bytes(console), ready, None
            console += chunk
            log.write(chunk)
            log.flush()
            if ready is None and (marker := _READY.search(console)) is not None:
                ready = time.monotonic()
                scenario_s = machine.scenario_timeout_s * float(marker[1] or 1)
                deadline = ready + scenario_s
            if ready is not None and not cut and (found := _CUT.search(console)) is not None:
                cut = True
                deadline = time.monotonic() + float(found[1])
