"""The files that the image takes of Debian's packages. Each build tries that it runs with them (`image_root._try`)."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from deploy.image_root import (
    LICENCES,
    MACHINES,
    PACKAGES,
    SITE,
    START,
    STATUS,
    add_packages,
    add_program,
    kept,
    make_directories,
    write_licences,
)

ROOT = Path(__file__).resolve().parents[2]
PYTHON = next(name for name in PACKAGES if name.startswith("python3.")).removesuffix("-minimal")


def test_it_takes_no_shell_no_package_manager_and_no_perl() -> None:
    refused = [
        "/usr/bin/dash", "/bin/sh", "/usr/bin/bash", "/usr/bin/apt-get", "/usr/bin/dpkg", "/usr/bin/perl",
        "/usr/bin/pdb3", "/usr/sbin/update-passwd", "/sbin/installkernel", "/usr/bin/env",
        "/usr/lib/x86_64-linux-gnu/gconv/UTF-16.so", "/usr/share/man/man1/chroot.1.gz",
        "/usr/share/doc/libc6/changelog",
    ]  # fmt: skip
    assert list(kept(refused)) == []


def test_it_takes_what_python_loads_on_both_architectures() -> None:
    taken = [
        "/usr/bin/python3", "/usr/bin/python3.13", "/usr/sbin/chroot", "/sbin/ldconfig",
        "/lib64/ld-linux-x86-64.so.2", "/usr/lib/ld-linux-aarch64.so.1", "/lib/aarch64-linux-gnu/libc.so.6",
        "/usr/lib/x86_64-linux-gnu/libudev.so.1", "/usr/lib/locale/C.utf8/LC_CTYPE", "/etc/os-release",
        "/usr/share/common-licenses/GPL-3",
    ]  # fmt: skip
    assert list(kept(taken)) == taken


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("json/decoder.py", True),
        ("lib-dynload/_ssl.cpython-313-x86_64-linux-gnu.so", True),
        ("lib-dynload/_ctypes.cpython-313-aarch64-linux-gnu.so", True),
        ("test/support/__init__.py", False),
        ("ensurepip/__init__.py", False),
        ("sqlite3/dbapi2.py", False),
        ("lib-dynload/_curses.cpython-313-x86_64-linux-gnu.so", False),
        ("lib-dynload/_ctypes_test.cpython-313-x86_64-linux-gnu.so", False),
        ("__pycache__/abc.cpython-313.pyc", False),
    ],
)
def test_of_the_standard_library_it_takes_what_a_daemon_may_load(path: str, is_kept: bool) -> None:
    whole = f"/usr/lib/{PYTHON}/{path}"
    assert list(kept([whole])) == ([whole] if is_kept else [])


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_the_program_is_installed_for_its_architecture_by_hashes(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], *, check: bool) -> None:
        assert check
        commands.append(command)

    monkeypatch.setattr("subprocess.run", run)
    add_program(architecture, "requirements/runtime.txt", tmp_path)
    start = tmp_path / "opt/gpuactors/bin/gpuactors"
    assert start.read_text().startswith("#!/opt/gpuactors/bin/python\n")
    assert start.stat().st_mode & 0o111
    requirements, program = commands
    assert f"--platform=manylinux_2_28_{MACHINES[architecture]}" in requirements
    assert {"--require-hashes", "--only-binary", "--no-deps"} <= {*requirements}
    assert {"--no-index", "--no-deps"} <= {*program}


def test_the_entry_point_is_that_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["gpuactors"].partition(":")
    assert f"from {module} import {function}\n" in START


def test_a_package_is_unpacked_and_known_to_scanners(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "DEBIAN").mkdir(parents=True)
    (source / "DEBIAN" / "control").write_text(
        "Package: libudev1\nVersion: 257\nArchitecture: all\nMaintainer: a <a@b.example>\nDescription: x\n"
    )
    for name in ("usr/lib/x86_64-linux-gnu/libudev.so.1.7", "usr/bin/udevadm", "sbin/ldconfig"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("content")
    (source / "usr/lib/x86_64-linux-gnu/libudev.so.1").symlink_to("libudev.so.1.7")
    package = tmp_path / "libudev1.deb"
    subprocess.run(
        ("dpkg-deb", "--build", "-Znone", str(source), str(package)), check=True, capture_output=True
    )
    root = tmp_path / "root"
    make_directories(root)
    add_packages([package], tmp_path / "unpacked", root)
    assert (root / "usr/lib/x86_64-linux-gnu/libudev.so.1").readlink() == Path("libudev.so.1.7")
    assert (root / "usr/sbin/ldconfig").read_text() == "content"
    assert not (root / "usr/bin").exists()
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    stanza = (root / STATUS / "libudev1").read_text()
    assert stanza.startswith("Package: libudev1\nStatus: install ok installed\nVersion: 257\n")


def test_each_package_needs_a_text_of_its_licence(tmp_path: Path) -> None:
    documents, root = tmp_path / "doc", tmp_path / "root"
    (root / STATUS).mkdir(parents=True)
    for package in PACKAGES:
        (root / STATUS / package).write_text(f"Package: {package}\nVersion: 1:2\n")
        (documents / package).mkdir(parents=True)
        (documents / package / "copyright").write_text(f"of {package}")
    site = root / SITE.lstrip("/")
    for name, texts in (("betterproto2", ()), ("trio", ("LICENSE", "LICENSE.MIT"))):
        information = site / f"{name}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\nLicense-Expression: MIT\n")
        for text in texts:
            (information / text).write_text("you may")
        (information / "RECORD").write_text("".join(f"{information.name}/{text},,\n" for text in texts))
    write_licences(root, documents)
    table = (root / "usr/share/doc/gpuactors/third-party.txt").read_text()
    assert "zlib1g 1:2 (Debian): /usr/share/doc/zlib1g/copyright\n" in table
    assert "betterproto2 1.0 (MIT): /usr/share/doc/gpuactors/betterproto2.txt\n" in table
    assert (
        f"trio 1.0 (MIT): {SITE}/trio-1.0.dist-info/LICENSE, {SITE}/trio-1.0.dist-info/LICENSE.MIT\n" in table
    )
    assert (root / "usr/share/doc/zlib1g/copyright").read_text() == "of zlib1g"
    ours = (root / "usr/share/doc/gpuactors/betterproto2.txt").read_text()
    assert ours == (LICENCES / "betterproto2.txt").read_text()

    (site / "trio-1.0.dist-info" / "RECORD").write_text("")
    with pytest.raises(SystemExit, match="trio brings no text of its licence"):
        write_licences(root, documents)
    (documents / "zlib1g" / "copyright").unlink()
    with pytest.raises(SystemExit, match="zlib1g has no copyright"):
        write_licences(root, documents)
