"""Fetch what the virtual machine needs from Debian: QEMU, kernels and a static busybox.

Standard library only: it runs before the virtual environment has to exist. Names no mirror: everything comes
through the machine's own apt, or a private one with its sources. Must not start a machine, and must not install
anything: packages are unpacked into the cache directory. ABI names (`linux-image-6.1.0-NN-amd64`) are resolved through
the meta package because they move with every security update.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.vm.apt import codename, private_apt, sources_of
from tests.vm.commands import ProvisionError, apt_get, need_root, run
from tests.vm.kernel_image import write_unpacked
from tests.vm.kernels import DEFAULT_KERNEL, KERNELS, BuiltKernel, DebianKernel
from tests.vm.qemu_root import starter, unpack_qemu

CHECKOUT: Final = Path(__file__).resolve().parents[2]

BUSYBOX_PACKAGE: Final = "busybox-static"
DEBIAN_KERNELS: Final = tuple(name for name, source in KERNELS.items() if isinstance(source, DebianKernel))


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel package.

    `release` is what `uname -r` says in the guest; `image` what QEMU starts, the unpacked kernel or
    its bzImage; `modules` the directory with `modules.builtin` and the `.ko` files.
    """

    package: str
    release: str
    image: Path
    modules: Path


def cache_dir() -> Path:
    """Where packages are unpacked: `GPUACTORS_VM_CACHE`, else `var/vm/cache` of the checkout (git-ignored)."""
    override = os.environ.get("GPUACTORS_VM_CACHE")
    return Path(override).resolve() if override else CHECKOUT / "var" / "vm" / "cache"


def qemu_path() -> Path:
    """The QEMU program; a guest can run it too. Raises ProvisionError where there is none."""
    program = starter(_qemu_root())
    if not program.is_file():
        raise ProvisionError(f"there is no unpacked QEMU in {cache_dir()}: run tests/vm/setup")
    return program


def _qemu_root() -> Path:
    return cache_dir() / "qemu"


def qemu_version() -> str:
    """QEMU's version, e.g. `7.2.22`. Raises ProvisionError."""
    said = run((str(qemu_path()), "--version"))
    found = re.search(r"version (\d[\d.]*)", said)
    return found[1] if found else said.strip()


def cached_busybox() -> Path:
    """The static busybox in the cache. Raises ProvisionError where there is none."""
    root = cache_dir() / BUSYBOX_PACKAGE
    for candidate in ("bin/busybox", "usr/bin/busybox"):
        if (root / candidate).is_file():
            return root / candidate
    raise ProvisionError(f"there is no unpacked {BUSYBOX_PACKAGE} in {cache_dir()}: run tests/vm/setup")


def cached_kernel(name: str = DEFAULT_KERNEL) -> Kernel:
    """The kernel of that name (`kernels.KERNELS`) as it was last fetched or built. Raises ProvisionError where there is
    none, and says how to get it."""
    record = cache_dir() / f"{name}.resolved"
    try:
        package = record.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        source = KERNELS[name]
        how = source.recipe if isinstance(source, BuiltKernel) else f"tests/vm/setup --kernel {name}"
        raise ProvisionError(f"there is no kernel {name} in {cache_dir()}: run {how}") from None
    return _kernel_in(cache_dir() / package, package)


def _kernel_in(root: Path, package: str) -> Kernel:
    # Since trixie the modules are under usr/lib (merged /usr), in bookworm under lib.
    for modules in sorted([*root.glob("lib/modules/*"), *root.glob("usr/lib/modules/*")]):
        for image in (
            _unpacked(root, modules.name),
            root / "boot" / f"vmlinuz-{modules.name}",
            modules / "vmlinuz",
        ):
            if image.is_file() and (modules / "modules.builtin").is_file():
                return Kernel(package=package, release=modules.name, image=image, modules=modules)
    raise ProvisionError(f"{root} holds no kernel image with its modules: remove it and run tests/vm/setup")


def _unpacked(root: Path, release: str) -> Path:
    return root / "boot" / f"vmlinux-{release}"


def provision(*, kernels: Sequence[str] = DEBIAN_KERNELS, refresh: bool = False) -> list[str]:
    """Fetch whatever is missing (or, with `refresh`, everything unpacked) and say what was done, a line each.

    The second run finds everything in place and calls no apt at all. Raises ProvisionError.
    """
    done: list[str] = []
    if refresh or not _has(qemu_path):
        done.append(f"unpacked {unpack_qemu(_qemu_root())}")
    if refresh or not _has(cached_busybox):
        _unpack(BUSYBOX_PACKAGE)
        done.append(f"unpacked {BUSYBOX_PACKAGE}")
    missing = [name for name in kernels if refresh or not _has(partial(cached_kernel, name))]
    done += [f"unpacked {_fetch_kernel(name, refresh=refresh)}, kernel {name}" for name in missing]
    return done + [
        f"unpacked the image of kernel {name}" for name in kernels if _unpack_image(cached_kernel(name))
    ]


def _unpack_image(kernel: Kernel) -> bool:
    """Whether that was to be done, and could be."""
    root = cache_dir() / kernel.package
    unpacked = _unpacked(root, kernel.release)
    config = root / "boot" / f"config-{kernel.release}"
    return not unpacked.is_file() and write_unpacked(kernel.image, config, unpacked)


def _fetch_kernel(name: str, *, refresh: bool) -> str:
    """The package that `name` stands for today, unpacked."""
    source = KERNELS[name]
    if isinstance(source, BuiltKernel):
        raise ProvisionError(f"kernel {name} is not fetched but built: run {source.recipe}")
    apt = backports_apt() if source.backports else MACHINES_APT
    package = _resolve(source, apt)
    if refresh or not (cache_dir() / package).is_dir():
        _unpack(package, apt)
    _kernel_in(cache_dir() / package, package)
    (cache_dir() / f"{name}.resolved").write_text(package + "\n", encoding="ascii")
    return package


def _has(check: Callable[[], object]) -> bool:
    try:
        check()
    except ProvisionError:
        return False
    return True


# --- apt --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Apt:
    """The machine's apt, or (with `options` from `apt.private_apt`) a private one that needs no root."""

    options: tuple[str, ...] = ()

    def get(self, *arguments: str, cwd: Path | None = None) -> str:
        """apt-get. Raises ProvisionError."""
        return apt_get(*self.options, *arguments, cwd=cwd)

    def cache(self, *arguments: str) -> str:
        """apt-cache. Raises ProvisionError."""
        return run(("apt-cache", *self.options, *arguments))

    def update(self) -> None:
        """Fetch the lists. Raises ProvisionError."""
        if not self.options:
            need_root("apt-get update")
        self.get("update")


MACHINES_APT: Final = Apt()


def backports_apt() -> Apt:
    """Packages of the backports of the suite that the machine runs. Raises ProvisionError."""
    base = codename()
    sources = sources_of(f"{base}-backports", base=base)
    if not sources:
        raise ProvisionError(
            f"no package source of this machine is for {base or 'a Debian release'}, so there is none whose backports "
            "could be asked: is this Debian 12 with its own package sources?"
        )
    return Apt(private_apt(cache_dir() / "apt" / f"{base}-backports", sources))


def _resolve(kernel: DebianKernel, apt: Apt) -> str:
    """The package that a kernel meta package depends on, e.g. `linux-image-6.1.0-49-amd64`."""
    text = trouble = ""
    for attempt in (1, 2):
        with suppress(ProvisionError):  # it knows no such package
            text = apt.cache("depends", "--important", kernel.meta)
        if found := re.search(rf"^\s*Depends: ({re.escape(kernel.package_prefix)}\S*)$", text, re.MULTILINE):
            return found[1]
        if attempt == 1:
            try:
                apt.update()
            except ProvisionError as error:
                # One source that cannot be had does not matter where another has the package.
                trouble = f"\n{error}"
    raise ProvisionError(
        f"apt knows no {kernel.package_prefix}… behind {kernel.meta}"
        f"{' in the backports' if kernel.backports else ''}: is this Debian 12 with its own package sources?{trouble}"
    )


def _unpack(package: str, apt: Apt = MACHINES_APT) -> None:
    """Download one package, without its dependencies, and unpack it into the cache. Needs no root."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetch-") as scratch_name:
        scratch = Path(scratch_name)
        try:
            apt.get("download", package, cwd=scratch)
        except ProvisionError:
            apt.update()
            apt.get("download", package, cwd=scratch)
        (archive,) = scratch.glob("*.deb")
        run(("dpkg-deb", "-x", str(archive), str(scratch / "root")))
        target = cache_dir() / package
        if target.exists():
            shutil.rmtree(target)
        # The rename is last: a directory under its final name is complete.
        (scratch / "root").rename(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `tests/vm/setup`."""
    parser = argparse.ArgumentParser(prog="tests/vm/setup", description="Fetch QEMU, kernels and busybox.")
    parser.add_argument("--refresh", action="store_true", help="fetch everything anew")
    parser.add_argument(
        "--kernel", action="append", choices=DEBIAN_KERNELS, metavar="NAME",
        help=f"which of {', '.join(DEBIAN_KERNELS)}; may be given twice; default: all",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        done = provision(kernels=options.kernel or DEBIAN_KERNELS, refresh=options.refresh)
    except ProvisionError as error:
        print(f"tests/vm/setup: {error}", file=sys.stderr)
        return 1
    for line in done or ["everything is there"]:
        print(f"tests/vm/setup: {line}")
    print(f"tests/vm/setup: {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
