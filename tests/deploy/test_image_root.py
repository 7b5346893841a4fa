"""What the image takes of its stage's packages. That it runs with it is tried in each build (`image_root._try`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.image_root import (
    LICENCES,
    NOT_RUN,
    PACKAGES,
    STATUS,
    files_of,
    installed,
    kept,
    write_licences,
)

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


def test_of_the_virtual_environment_it_leaves_what_a_shell_reads() -> None:
    left = [
        name
        for name in ("bin/activate", "bin/python3", "bin/gpuactors", "bin/idna")
        if NOT_RUN.fullmatch(name)
    ]
    assert left == ["bin/activate", "bin/idna"]
    assert NOT_RUN.fullmatch("lib/python3.13/site-packages/trio/_tests")
    assert not NOT_RUN.fullmatch("lib/python3.13/site-packages/trio/testing")


def test_the_files_of_a_package_are_those_of_dpkg(tmp_path: Path) -> None:
    (tmp_path / "info").mkdir()
    (tmp_path / "info" / "libc6:amd64.list").write_text("/.\n/usr/lib\n")
    assert files_of("libc6", tmp_path) == ["/.", "/usr/lib"]
    with pytest.raises(SystemExit, match="of the package zlib1g there are 0 lists"):
        files_of("zlib1g", tmp_path)


def test_a_package_that_is_gone_is_not_installed() -> None:
    there, gone = (
        "Package: a\nStatus: install ok installed\n",
        "Package: b\nStatus: deinstall ok config-files\n",
    )
    assert dict(installed(f"{there}\n{gone}")) == {"a": there.strip()}


def test_each_package_needs_a_text_of_its_licence(tmp_path: Path) -> None:
    documents, root = tmp_path / "doc", tmp_path / "root"
    (root / STATUS).mkdir(parents=True)
    for package in PACKAGES:
        (root / STATUS / package).write_text(f"Package: {package}\nVersion: 1:2\n")
        (documents / package).mkdir(parents=True)
        (documents / package / "copyright").write_text(f"of {package}")
    site = root / "opt/gpuactors/lib/python3.13/site-packages"
    for name, texts in (("betterproto2", ()), ("trio", ("LICENSE", "LICENSE.MIT"))):
        information = site / f"{name}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\nLicense-Expression: MIT\n")
        for text in texts:
            (information / text).write_text("you may")
        (information / "RECORD").write_text("".join(f"{information.name}/{text},,\n" for text in texts))
    write_licences(root, documents)
    table = (root / "usr/share/doc/gpuactors/third-party.txt").read_text()
    inside = "/opt/gpuactors/lib/python3.13/site-packages"
    assert "zlib1g 1:2 (Debian): /usr/share/doc/zlib1g/copyright\n" in table
    assert "betterproto2 1.0 (MIT): /usr/share/doc/gpuactors/betterproto2.txt\n" in table
    assert (
        f"trio 1.0 (MIT): {inside}/trio-1.0.dist-info/LICENSE, {inside}/trio-1.0.dist-info/LICENSE.MIT\n"
        in table
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
