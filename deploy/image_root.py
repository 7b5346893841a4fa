"""Makes the files of the image, in a stage of deploy/Containerfile: `python image_root.py ARCHITECTURE REQUIREMENTS
ROOT`.

The image is Debian's Python, the libraries that it loads, and the daemon with its requirements: no package manager, no
shell, no Perl. Packages and wheels are only unpacked, so another architecture's image is made as well. The image is
started at the end, for which the machine emulates another architecture (binfmt_misc). Standard library only, and pip
beside it. Ends with a sentence and exit code 1 where a file, a library or a licence is missing.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
    "libcap2",  # of libudev
    "libexpat1",
    "libffi8",
    "libgcc-s1",  # glibc loads it when a thread ends
    "gcc-14-base",  # has the licence of libgcc-s1
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
SITE: Final = f"{ENVIRONMENT}/lib/{PYTHON}/site-packages"
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""In the names of wheels, by Debian's and OCI's."""
GLIBC: Final = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
"""The wheels' oldest ones; Debian 13 has 2.41."""
START: Final = f"""\
#!{ENVIRONMENT}/bin/python
import sys

from gpuactors.__main__ import main

sys.exit(main())
"""

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

STATUS: Final = "var/lib/dpkg/status.d"
"""A file for each package: where scanners look in an image without dpkg."""

LICENCES: Final = Path(__file__).with_name("licences")
"""Texts that wheels lack, by the name of the package."""
DOCUMENTS: Final = "usr/share/doc"

TRIED: Final = """
import ctypes, importlib, pathlib, pkgutil, sys, sysconfig
ctypes.CDLL("libudev.so.1")
for file in pathlib.Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"):
    importlib.import_module(file.name.partition(".")[0])
import gpuactors
for module in pkgutil.walk_packages(gpuactors.__path__, "gpuactors."):
    if module.name != "gpuactors.__main__" and "nvml_child" not in module.name:
        importlib.import_module(module.name)
"""
"""Loads libudev, each compiled module of the standard library and each module of the daemon: a library that is missing
shows."""


def make_root(architecture: str, requirements: str, root: Path) -> None:
    """All of it. Raises `SystemExit`, `OSError`, `subprocess.CalledProcessError`."""
    make_directories(root)
    with tempfile.TemporaryDirectory() as name:
        unpacked = Path(name)
        add_packages(fetched(architecture, unpacked / "debs"), unpacked / "files", root)
        add_program(architecture, requirements, root)
        write_licences(root, unpacked / "files" / DOCUMENTS)
    # A read-only root needs its bytecode now, and its sources do not change: nothing looks whether they have.
    for directory in (f"/usr/lib/{PYTHON}", f"{ENVIRONMENT}/lib"):
        if not compileall.compile_dir(
            _in(root, directory), maxlevels=20, stripdir=str(root), quiet=1, force=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        ):  # fmt: skip
            sys.exit(f"a module in {directory} cannot be compiled")
    _try(root)


def make_directories(root: Path) -> None:
    """What a root has besides packages."""
    root.mkdir(parents=True)
    for name, mode in DIRECTORIES.items():
        (root / name).mkdir()
        (root / name).chmod(mode)
    for name, target in LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    for name, text in FILES.items():
        _write(root / name, text)
    (root / STATUS).mkdir(parents=True)


def fetched(architecture: str, directory: Path) -> list[Path]:
    """The packages' files, by apt from its sources."""
    directory.mkdir()
    subprocess.run(("dpkg", "--add-architecture", architecture), check=True)
    subprocess.run(("apt-get", "-q", "update"), check=True)
    names = [f"{package}:{architecture}" for package in PACKAGES]
    # As root, since apt's own user cannot write here.
    subprocess.run(
        ("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *names), cwd=directory, check=True
    )
    return sorted(directory.glob("*.deb"))


def add_packages(packages: Sequence[Path], unpacked: Path, root: Path) -> None:
    """The packages' files that the image has, and what dpkg would know of them."""
    for package in packages:
        subprocess.run(("dpkg-deb", "--extract", str(package), str(unpacked)), check=True)
        stanza = subprocess.run(
            ("dpkg-deb", "--field", str(package)), check=True, capture_output=True, text=True
        ).stdout
        head, _, rest = stanza.partition("\n")
        _write(
            root / STATUS / head.removeprefix("Package: "), f"{head}\nStatus: install ok installed\n{rest}"
        )
    paths = (f"/{path.relative_to(unpacked)}" for path in sorted(unpacked.rglob("*")))
    for path in kept(paths):
        _copy(unpacked / path.lstrip("/"), _in(root, _merged(path)))


def add_program(architecture: str, requirements: str, root: Path) -> None:
    """The virtual environment with the requirements, each by its hash, and the daemon."""
    environment = _in(root, ENVIRONMENT)
    _write(environment / "pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
    _write(environment / "bin" / "gpuactors", START)
    (environment / "bin" / "gpuactors").chmod(0o755)
    (environment / "bin" / "python").symlink_to("/usr/bin/python3")
    platforms = [f"--platform={glibc}_{MACHINES[architecture]}" for glibc in GLIBC]
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-compile",
        "--no-deps",
        "--target",
        str(_in(root, SITE)),
    )
    wheels = ("--only-binary", ":all:", "--require-hashes", "-r", requirements)
    subprocess.run((*pip, *platforms, *wheels), check=True)
    subprocess.run((*pip, "--no-index", *map(str, Path("wheels").glob("gpuactors-*.whl"))), check=True)
    for left in (
        _in(root, SITE) / "bin",
        *_in(root, SITE).glob("*/tests"),
        *_in(root, SITE).rglob("_tests"),
    ):
        shutil.rmtree(left, ignore_errors=True)


def kept(paths: Iterable[str]) -> Iterator[str]:
    """Those of them that the image has."""
    return (path for path in paths if KEPT.fullmatch(_merged(path)) and not LEFT_OUT.fullmatch(path))


def write_licences(root: Path, documents: Path) -> None:
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
    site = _in(root, SITE)
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
        ("/usr/sbin/ldconfig",),
        (f"{ENVIRONMENT}/bin/gpuactors", "--version"),
        (f"{ENVIRONMENT}/bin/python", "-c", TRIED),
        ("/usr/sbin/chroot", "--version"),
    ):
        subprocess.run(("chroot", str(root), *command), check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(root / "var" / "cache", ignore_errors=True)
    programs = {path.name for name in ("bin", "sbin") for path in (root / "usr" / name).iterdir()}
    if programs != {"python3", PYTHON, "chroot", "ldconfig"}:
        sys.exit(f"the image has other programs than it should: {', '.join(sorted(programs))}")


def _merged(path: str) -> str:
    """The path with /usr before it, where a package still has it without."""
    return re.sub(r"^/(bin|sbin|lib|lib64)/", r"/usr/\1/", path)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(target):
        shutil.copy2(source, target, follow_symlinks=False)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _in(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


if __name__ == "__main__":
    make_root(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
