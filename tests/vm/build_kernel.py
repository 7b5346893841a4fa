"""Build the kernel that Debian does not have, with iommufd and cdevs, from Debian's source package of the backports.

The result lies in the cache as an unpacked kernel package does, so nothing else knows the difference. Standard library
only; no root but for what the build itself takes (a compiler). Must not change the source: it is Debian's, configured.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tests.vm.commands import ProvisionError, install, run
from tests.vm.kernels import KERNELS, BuiltKernel
from tests.vm.provision import backports_apt, cache_dir

NAME: Final = "iommufd"

CONFIG: Final = Path(__file__).with_name("iommufd.config")

BUILD_PACKAGES: Final = ("bc", "bison", "flex", "gcc", "libc6-dev", "libelf-dev", "make", "xz-utils")

BUILD_TIMEOUT_S: Final = 3600.0
"""Measured: 5 minutes on two quiet cores, 15 on busy ones."""

UNUSED: Final = "*/drivers/gpu/drm/amd/include"
"""A quarter of the source: the registers of graphics hardware. What else is not used is small, or Kconfig reads it."""


def build(*, refresh: bool = False) -> str:
    """Build it if it is not there, and say what was done. Raises ProvisionError.

    It is there as long as the configuration is the same; with `refresh` Debian is asked for a newer source.
    """
    record = cache_dir() / f"{NAME}.resolved"
    digest = hashlib.sha256(CONFIG.read_bytes()).hexdigest()[:8]
    package = record.read_text(encoding="ascii").strip() if record.is_file() else ""
    if package.endswith(digest) and (cache_dir() / package).is_dir() and not refresh:
        return "everything is there"
    source = KERNELS[NAME]
    assert isinstance(source, BuiltKernel)
    install_missing(BUILD_PACKAGES)
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".build-") as scratch_name:
        scratch = Path(scratch_name)
        tree = _unpacked_source(source.source, scratch)
        release = _compile(tree)
        package = f"linux-{release}-{digest}"
        target = cache_dir() / package
        shutil.rmtree(target, ignore_errors=True)
        _as_package(tree, release, scratch / "root").rename(target)
    record.write_text(package + "\n", encoding="ascii")
    return f"built {package}"


def install_missing(packages: Iterable[str]) -> None:
    """Have apt install those that are not installed. Raises ProvisionError, which names them, without root."""
    said = run(("dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", "*"))
    installed = {line.split()[0] for line in said.splitlines() if line.endswith(" installed")}
    if missing := [package for package in packages if package not in installed]:
        install(*missing)


def wanted_options(config: str) -> list[str]:
    """The lines of a configuration that ask for something."""
    return [line for line in config.splitlines() if line.startswith("CONFIG_")]


def _unpacked_source(package: str, scratch: Path) -> Path:
    """The source tree of Debian's package, without what is never compiled here."""
    apt = backports_apt()
    apt.update()
    apt.get("download", package, cwd=scratch)
    (archive,) = scratch.glob("*.deb")
    run(("dpkg-deb", "-x", str(archive), str(scratch / "package")))
    (tarball,) = scratch.glob("package/usr/src/*.tar.xz")
    tree = scratch / "source"
    tree.mkdir()
    run(
        (
            "tar",
            "-x",
            "-J",
            f"--exclude={UNUSED}",
            "-f",
            str(tarball),
            "-C",
            str(tree),
            "--strip-components=1",
        )
    )
    shutil.rmtree(scratch / "package")
    return tree


def _compile(tree: Path) -> str:
    """Configure and build the image; what `uname -r` will say. Raises ProvisionError if an option did not survive: the
    source is newer than the configuration, and knows the option by another name or wants another one with it."""
    make = ("make", "-s", "-C", str(tree), f"-j{os.cpu_count() or 1}")
    run((*make, f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig"))
    configured = set((tree / ".config").read_text(encoding="ascii").splitlines())
    if lost := [
        option for option in wanted_options(CONFIG.read_text(encoding="ascii")) if option not in configured
    ]:
        raise ProvisionError(
            f"{CONFIG} asks for what this source does not have, or not so: {', '.join(lost)}"
        )
    run((*make, "bzImage"), timeout_s=BUILD_TIMEOUT_S)
    return run((*make, "kernelrelease")).strip()


def _as_package(tree: Path, release: str, root: Path) -> Path:
    """`root` with the files that a kernel package has, as far as `provision.cached_kernel` looks for them."""
    modules = root / "lib" / "modules" / release
    modules.mkdir(parents=True)
    (root / "boot").mkdir()
    shutil.copy(tree / "arch/x86/boot/bzImage", root / "boot" / f"vmlinuz-{release}")
    shutil.copy(tree / ".config", root / "boot" / f"config-{release}")
    shutil.copy(tree / "modules.builtin", modules / "modules.builtin")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `tests/vm/build-kernel`."""
    parser = argparse.ArgumentParser(
        prog="tests/vm/build-kernel", description="Build the kernel with iommufd from Debian's source."
    )
    parser.add_argument("--refresh", action="store_true", help="build it anew, from Debian's newest source")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        done = build(refresh=options.refresh)
    except ProvisionError as error:
        print(f"tests/vm/build-kernel: {error}", file=sys.stderr)
        return 1
    print(f"tests/vm/build-kernel: {done}, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
