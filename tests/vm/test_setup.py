"""Where kernels come from, and which scenario runs on which. Nothing is fetched and nothing built."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vm import build_modules
from tests.vm.apt import codename, private_apt, sources_of
from tests.vm.boot import with_parameters
from tests.vm.build_kernel import CONFIG, install_missing, wanted_options
from tests.vm.commands import run
from tests.vm.kernels import BUILT_MODULES, CDEV, DEFAULT_KERNEL, KERNELS
from tests.vm.machine import READY_MARKER, Machine
from tests.vm.matrix import cells, machines
from tests.vm.provision import CHECKOUT, DEBIAN_KERNELS, Kernel

LIST = """\
# deb http://commented.example/debian bookworm main
deb [arch=amd64 signed-by=/keys/a.gpg] http://one.example/debian bookworm main contrib # a remark
deb-src http://one.example/debian bookworm main
deb http://one.example/debian bookworm-updates main
deb http://third.example/packages bookworm stable
deb http://two.example/debian bookworm main
deb http://two.example/debian bookworm main
"""

SOURCES = """\
# Debian's own
Types: deb deb-src
URIs: http://three.example/debian
# http://snapshot.example/debian
Suites: bookworm bookworm-updates
Components: main non-free-firmware
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY865UxYJKwYBBAHaRw8BAQdAd7Z0srwuhlB6JKFkcf4HU4SSS/xcRfwEQWzr
 -----END PGP PUBLIC KEY BLOCK-----

types: deb
uris: http://three.example/security
suites: bookworm-security
components: main

Enabled: no
Types: deb
URIs: http://four.example/debian
Suites: bookworm
Components: main
"""


@pytest.fixture
def etc_apt(tmp_path: Path) -> Path:
    directory = tmp_path / "etc"
    (directory / "sources.list.d").mkdir(parents=True)
    (directory / "sources.list").write_text(LIST)
    (directory / "sources.list.d" / "debian.sources").write_text(SOURCES)
    (directory / "sources.list.d" / "old.list.save").write_text(LIST.replace("one", "old"))
    return directory


def test_the_machines_own_sources_with_the_suite_exchanged(etc_apt: Path) -> None:
    found = sources_of("bookworm-backports", base="bookworm", etc_apt=etc_apt)
    assert [source.text for source in found[:2]] == [
        "deb [arch=amd64 signed-by=/keys/a.gpg] http://one.example/debian bookworm-backports main contrib\n",
        "deb http://two.example/debian bookworm-backports main\n",
    ]
    (stanza,) = found[2:]
    assert stanza.suffix == ".sources"
    lines = stanza.text.splitlines()
    assert lines[:5] == [
        "types: deb",
        "uris: http://three.example/debian",
        "suites: bookworm-backports",
        "components: main non-free-firmware",
        "signed-by:",
    ]
    assert lines[5:] == SOURCES.splitlines()[7:11]


def test_no_source_of_that_suite(etc_apt: Path) -> None:
    assert sources_of("trixie-backports", base="trixie", etc_apt=etc_apt) == ()
    assert sources_of("x", base="bookworm", etc_apt=etc_apt / "nowhere") == ()


def test_apt_reads_it_so(etc_apt: Path, tmp_path: Path) -> None:
    sources = sources_of("bookworm-backports", base="bookworm", etc_apt=etc_apt)
    options = private_apt(tmp_path / "apt", sources)
    said = run(("apt-get", *options, "update", "--print-uris"))
    assert set(re.findall(r"http://\S+InRelease", said)) == {
        f"http://{host}.example/debian/dists/bookworm-backports/InRelease" for host in ("one", "two", "three")
    }
    # Nothing of the machine's own lists is known to it, nor what is installed.
    assert run(("apt-cache", *options, "pkgnames")) == ""
    again = private_apt(tmp_path / "apt", sources[:1])
    assert again == options
    assert len(list((tmp_path / "apt" / "sources.list.d").iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "suite"),
    [
        ("NAME=x\nVERSION_CODENAME=bookworm\n", "bookworm"),
        ('VERSION_CODENAME="trixie"\n', "trixie"),
        ("NAME=x\n", ""),
    ],
)
def test_the_suite_that_a_machine_runs(text: str, suite: str, tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text(text)
    assert codename(tmp_path / "os-release") == suite


def test_the_default_suite_and_the_matrix() -> None:
    plain = Machine(ports=())
    both = Machine(ports=(), kernels=("6.12", "6.1"))
    cdev = Machine(ports=(), kernels=("iommufd",), needs=frozenset({CDEV}))
    scenarios = {"a": plain, "b": both, "c": cdev}
    assert [cell.name for cell in cells(scenarios)] == ["a[6.1]", "b[6.1]", "b[6.12]", "c[iommufd]"]
    assert [cell.name for cell in cells(scenarios, ["6.12"])] == ["a[6.12]", "b[6.12]"]
    assert [cell.directory for cell in cells(scenarios, ["iommufd"])] == [
        "a@iommufd",
        "b@iommufd",
        "c@iommufd",
    ]
    assert len(cells(scenarios, KERNELS)) == 7


def test_every_scenario_is_in_the_default_suite_or_says_why_not() -> None:
    found = machines()
    left_out = set(found) - {cell.scenario for cell in cells(found)}
    for scenario in left_out:
        line = next(
            line
            for line in (Path(__file__).parent / "guest" / f"{scenario}.py").read_text().splitlines()
            if "kernels=NOT_BY_DEFAULT" in line
        )
        assert line.partition("  # ")[2], f"{scenario} does not say why"
    assert len(left_out) < len(found) / 3
    assert {cell.scenario for cell in cells(found, ["6.1"])} >= left_out
    assert DEFAULT_KERNEL in DEBIAN_KERNELS


@pytest.mark.parametrize("kernels", [("7.0",), ("6.1", "iommufd")])
def test_a_machine_on_a_kernel_that_cannot_serve_it(kernels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="kernel"):
        Machine(ports=(), kernels=kernels, needs=frozenset({CDEV}))


def test_parameters_of_a_module_that_is_built_in_go_on_the_command_line(tmp_path: Path) -> None:
    machine = Machine(ports=(), kernel_arguments=("a",), vfio_pci_parameters=("ids=1234:11e8",))
    kernel = Kernel("package", "release", tmp_path / "image", tmp_path)
    (tmp_path / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    assert with_parameters(machine, kernel) == machine
    (tmp_path / "modules.builtin").write_text("kernel/drivers/vfio/pci/vfio-pci.ko\n")
    assert with_parameters(machine, kernel).kernel_arguments == ("a", "vfio_pci.ids=1234:11e8")


def test_the_configuration_asks_for_each_option_once() -> None:
    options = wanted_options(CONFIG.read_text(encoding="ascii"))
    assert len(set(options)) == len(options)
    assert {"CONFIG_IOMMUFD=y", "CONFIG_VFIO_DEVICE_CDEV=y", "CONFIG_PCI_MMCONFIG=y"} <= set(options)


def test_what_is_installed_is_not_installed_again() -> None:
    install_missing(["dpkg", "libc6"])


SLOW_SCENARIO = "import threading\nthreading.Event().wait()\n"


def test_a_scenario_that_hangs_while_it_is_imported_says_where(tmp_path: Path) -> None:
    """The host counts from the ready marker; so must the guest, or it is ended before it has said anything."""
    package = tmp_path / "tests" / "vm" / "guest"
    package.mkdir(parents=True)
    (package / "scenario_slow.py").write_text(SLOW_SCENARIO)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.vm.guest.runner", "scenario_slow", "6.1", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CHECKOUT), str(tmp_path)))},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said = read_until(process, b"scenario_slow.py", within_s=30.0)
    finally:
        process.kill()
        process.wait()
    assert READY_MARKER in said
    assert "Timeout" in said


def read_until(process: subprocess.Popen[bytes], wanted: bytes, *, within_s: float) -> str:
    """What the process says up to and with `wanted`. Raises AssertionError if that does not come."""
    assert process.stdout is not None
    said = b""
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while wanted not in said:
            assert selector.select(deadline - time.monotonic()), said
            chunk = os.read(process.stdout.fileno(), 65536)
            assert chunk, said
            said += chunk
    return said.decode()


def test_modules_are_built_once_for_each_state_of_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("linux", "6.1.0-1-amd64", tmp_path / "vmlinux", tmp_path / "lib" / "modules")
    extra = kernel.modules / build_modules.PLACE
    extra.mkdir(parents=True)
    monkeypatch.setattr(build_modules, "cached_kernel", lambda name: kernel)
    monkeypatch.setattr(build_modules, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(build_modules, "install_missing", lambda packages: None)
    monkeypatch.setattr(build_modules, "_headers", lambda kernel, scratch: scratch)
    monkeypatch.setattr(build_modules, "_sources", lambda kernel, scratch: scratch)
    made: list[str] = []

    def compile_(headers: Path, sources: Path) -> Path:
        made.append("built")
        built = sources / "built"
        built.mkdir()
        (built / "mtty.ko").touch()
        return built

    monkeypatch.setattr(build_modules, "_compile", compile_)
    (extra / "old.ko").touch()
    assert build_modules.build() == "built mtty for 6.1.0-1-amd64"
    assert sorted(path.name for path in extra.iterdir()) == ["mtty.ko", build_modules.RECORD]
    assert build_modules.build() == "everything is there"
    (extra / build_modules.RECORD).write_text("of another source\n")
    build_modules.build()
    assert made == ["built", "built"]


def test_each_scenario_of_a_built_module_says_that_it_needs_it() -> None:
    ours = {"mtty", *(path.stem for path in build_modules.SOURCES.glob("*.c"))}
    for scenario, machine in machines().items():
        assert (BUILT_MODULES in machine.needs) is bool(ours & set(machine.modules)), scenario
