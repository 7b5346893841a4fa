"""Makes the files of the image, of what a stage of deploy/Containerfile has installed: `python3 image_root.py ROOT`.

The image is Debian's Python, the libraries that it loads, and the daemon's virtual environment: no package manager, no
shell, no Perl. Standard library only: the stage's own Python runs it. Ends with a sentence and exit code 1 where a
file, a library or a licence is missing.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

PYTHON: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"

PACKAGES: Final = (
    "base-files",  # os-release, and the licences that the others refer to
    "coreutils",  # chroot alone, for --load-modules on
    "libc-bin",  # ldconfig, by which ctypes finds libudev, and the locale C.UTF-8
    "libc6",
    "libbz2-1.0",
    "libexpat1",
    "libffi8",
    "libgcc-s1",  # glibc loads it when a thread ends
    "liblzma5",
    f"lib{PYTHON}-minimal",
    f"lib{PYTHON}-stdlib",
    "libssl3t64",
    "libudev1",
    "libuuid1",
    "libzstd1",  # of libssl
    f"{PYTHON}-minimal",
    "python3-minimal",
    "zlib1g",
)
"""Debian's packages of which the image has files."""

KEPT: Final = re.compile(
    rf"""
    /usr/bin/python3(\.\d+)?
    | /usr/sbin/(chroot|ldconfig)
    | /usr/lib(64)?/(ld-linux[^/]*|[a-z0-9_]+-linux-gnu/[^/]+\.so(\.[^/]*)?)
    | /usr/lib/{re.escape(PYTHON)}/.*
    | /usr/lib/locale/C\.utf8/.*
    | (/usr/lib|/etc)/os-release | /etc/debian_version
    | /etc/ld\.so\.conf(\.d/[^/]+)? | /etc/{re.escape(PYTHON)}/.*
    | /usr/share/common-licenses/.*
    """,
    re.VERBOSE,
)
"""Which files of these packages."""

LEFT_OUT: Final = re.compile(
    r".*/(__pycache__|_pyrepl|config-[^/]+|curses|dbm|ensurepip|idlelib|pydoc_data|sqlite3|test|tkinter|turtledemo"
    r"|unittest|venv)(/.*|$)"
    r"|.*/lib-dynload/(_(ctypes_test|curses\w*|dbm|gdbm|sqlite3|test\w+|xx\w+)|readline|xx\w+)\..*"
    r"|.*/(pydoc|turtle|doctest)\.py"
)
"""Of the standard library, what a daemon does not load, and what needs libraries of its own."""

ENVIRONMENT: Final = "/opt/gpuactors"
NOT_RUN: Final = re.compile(r"bin/(?!python|gpuactors$).*|.*/__pycache__|lib/.*/_?tests")
"""In the virtual environment: a shell's scripts, and tests that packages bring along."""

DIRECTORIES: Final = {"dev": 0o755, "proc": 0o755, "root": 0o700, "run": 0o755, "sys": 0o755, "tmp": 0o1777}
LINKS: Final = {
    "bin": "usr/bin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "sbin": "usr/sbin",
    "var/run": "/run",
}
FILES: Final = {
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

DPKG: Final = Path("/var/lib/dpkg")
STATUS: Final = "var/lib/dpkg/status.d"
"""A file for each package: where scanners look in an image without dpkg."""

LICENCES: Final = Path(__file__).with_name("licences")
"""Texts that wheels lack, by the name of the package."""
DOCUMENTS: Final = "usr/share/doc"

TRIED: Final = """
import importlib, pathlib, pkgutil, sys, sysconfig
for file in pathlib.Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"):
    importlib.import_module(file.name.partition(".")[0])
import gpuactors
for module in pkgutil.walk_packages(gpuactors.__path__, "gpuactors."):
    if module.name != "gpuactors.__main__" and "nvml_child" not in module.name:
        importlib.import_module(module.name)
"""
"""Loads each compiled module of the standard library and each module of the daemon: a library that is missing shows."""


def make_root(root: Path) -> None:
    """All of it. Raises `SystemExit`, `OSError`, `subprocess.CalledProcessError`."""
    root.mkdir(parents=True)
    for name, mode in DIRECTORIES.items():
        (root / name).mkdir()
        (root / name).chmod(mode)
    for name, target in LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    for package in PACKAGES:
        for path in kept(files_of(package)):
            _copy(path, root)
    shutil.copytree(ENVIRONMENT, _in(root, ENVIRONMENT), symlinks=True, ignore=_not_run)
    (root / STATUS).mkdir(parents=True)
    stanzas = dict(installed((DPKG / "status").read_text(encoding="utf-8")))
    for package in PACKAGES:
        (root / STATUS / package).write_text(stanzas[package] + "\n", encoding="utf-8")
    write_licences(root)
    # A read-only root needs its bytecode now, and its sources do not change: nothing looks whether they have.
    for directory in (f"/usr/lib/{PYTHON}", f"{ENVIRONMENT}/lib"):
        if not compileall.compile_dir(
            _in(root, directory), maxlevels=20, stripdir=str(root), quiet=1, force=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        ):  # fmt: skip
            sys.exit(f"a module in {directory} cannot be compiled")
    subprocess.run(("ldconfig", "-r", str(root)), check=True)
    shutil.rmtree(root / "var/cache", ignore_errors=True)
    _try(root)


def files_of(package: str, dpkg: Path = DPKG) -> list[str]:
    """The paths of an installed package, as dpkg has them."""
    lists = [*dpkg.glob(f"info/{package}.list"), *dpkg.glob(f"info/{package}:*.list")]
    if len(lists) != 1:
        sys.exit(
            f"of the package {package} there are {len(lists)} lists of files in {dpkg}/info, and not one"
        )
    return lists[0].read_text(encoding="utf-8").splitlines()


def kept(paths: Iterable[str]) -> Iterator[str]:
    """Those of them that the image has."""
    return (path for path in paths if KEPT.fullmatch(_merged(path)) and not LEFT_OUT.fullmatch(path))


def installed(status: str) -> Iterator[tuple[str, str]]:
    """Name and stanza of each package in dpkg's status."""
    for stanza in status.split("\n\n"):
        found = re.search(r"^Package: (\S+)$", stanza, re.MULTILINE)
        if found and re.search(r"^Status: install ok installed$", stanza, re.MULTILINE):
            yield found[1], stanza.strip("\n")


def write_licences(root: Path, documents: Path = Path("/", DOCUMENTS)) -> None:
    """A table of what others wrote, with where its licence is in the image. Ends where there is no text of one."""
    lines = ["What the image has of others: package, version, licence, its text in the image.", ""]
    for package in PACKAGES:
        text = f"{DOCUMENTS}/{package}/copyright"
        if not (documents / package / "copyright").is_file():
            sys.exit(f"Debian's package {package} has no copyright in {documents}")
        # A package's directory may be a link to that of another one.
        _write(root / text, (documents / package / "copyright").read_text(encoding="utf-8"))
        (version,) = re.findall(r"^Version: (.+)$", (root / STATUS / package).read_text(), re.MULTILINE)
        lines.append(f"{package} {version} (Debian): /{text}")
    site = next(_in(root, ENVIRONMENT).glob("lib/python3*/site-packages"))
    for found in sorted(distributions(path=[str(site)]), key=lambda one: one.name.lower()):
        texts = [f"/{text.relative_to(root)}" for text in _texts(found, site)]
        if not texts:
            ours = LICENCES / f"{found.name}.txt"
            if not ours.is_file():
                sys.exit(f"{found.name} brings no text of its licence: put one into {ours}")
            texts = [f"/{DOCUMENTS}/gpuactors/{ours.name}"]
            _write(root / texts[0].lstrip("/"), ours.read_text(encoding="utf-8"))
        lines.append(f"{found.name} {found.version} ({licence_of(found)}): {', '.join(texts)}")
    _write(root / DOCUMENTS / "gpuactors" / "third-party.txt", "\n".join(lines) + "\n")


def licence_of(found: Distribution) -> str:
    """As its metadata names it, in one line."""
    named = [found.metadata[key] for key in ("License-Expression", "License") if key in found.metadata]
    return named[0].strip().partition("\n")[0] if named else "see the text"


def _texts(found: Distribution, site: Path) -> list[Path]:
    names = re.compile(r"(licen[cs]e|copying|notice)[^/]*", re.IGNORECASE)
    paths = [site / str(file) for file in found.files or () if names.fullmatch(file.name)]
    return sorted(path for path in paths if path.is_file() and path.suffix != ".py")


def _try(root: Path) -> None:
    for command in (
        (f"{ENVIRONMENT}/bin/gpuactors", "--version"),
        (f"{ENVIRONMENT}/bin/python", "-c", TRIED),
        ("/usr/sbin/chroot", "--version"),
    ):
        subprocess.run(("chroot", str(root), *command), check=True, stdout=subprocess.DEVNULL)
    programs = {path.name for path in (root / "usr/bin").iterdir()} | {
        path.name for path in (root / "usr/sbin").iterdir()
    }
    if programs != {"python3", PYTHON, "chroot", "ldconfig"}:
        sys.exit(f"the image has other programs than it should: {', '.join(sorted(programs))}")


def _merged(path: str) -> str:
    """The path with /usr before it, where a package still has it without."""
    return re.sub(r"^/(bin|sbin|lib|lib64)/", r"/usr/\1/", path)


def _copy(path: str, root: Path) -> None:
    source, target = Path(_merged(path)), _in(root, _merged(path))
    if source.is_dir() and not source.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(target):
        shutil.copy2(source, target, follow_symlinks=False)


def _not_run(directory: str, names: list[str]) -> set[str]:
    inside = os.path.relpath(directory, ENVIRONMENT)
    return {name for name in names if NOT_RUN.fullmatch(os.path.normpath(os.path.join(inside, name)))}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _in(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


if __name__ == "__main__":
    make_root(Path(sys.argv[1]))
