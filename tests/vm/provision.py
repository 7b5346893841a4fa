"""Fetch what the virtual machine needs from Debian: QEMU, a kernel and a static busybox.

Standard library only: it runs before the virtual environment has to exist. Names no mirror: everything comes
through the machine's own apt. Must not start a machine, and must not install anything: packages are unpacked into the
cache directory. ABI names (`linux-image-6.1.0-NN-amd64`) are resolved through the meta package because they move with
every security update.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.vm.commands import ProvisionError, apt_get, need_root, run
from tests.vm.qemu_root import starter, unpack_qemu

CHECKOUT: Final = Path(__file__).resolve().parents[2]

BUSYBOX_PACKAGE: Final = "busybox-static"
DEFAULT_KERNEL: Final = "linux-image-amd64"
"""Debian's meta package. The `-cloud` kernels will not do: they lack 9p."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel package.

    `release` is what `uname -r` says in the guest; `image` the bzImage; `modules` the directory with
    `modules.builtin` and the `.ko` files.
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


def cached_busybox() -> Path:
    """The static busybox in the cache. Raises ProvisionError where there is none."""
    root = cache_dir() / BUSYBOX_PACKAGE
    for candidate in ("bin/busybox", "usr/bin/busybox"):
        if (root / candidate).is_file():
            return root / candidate
    raise ProvisionError(f"there is no unpacked {BUSYBOX_PACKAGE} in {cache_dir()}: run tests/vm/setup")


def cached_kernel(meta: str = DEFAULT_KERNEL) -> Kernel:
    """The kernel that `meta` stood for when it was last fetched. Raises ProvisionError where there is none."""
    record = cache_dir() / f"{meta}.resolved"
    try:
        package = record.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise ProvisionError(f"no kernel for {meta} in {cache_dir()}: run tests/vm/setup") from None
    return _kernel_in(cache_dir() / package, package)


def _kernel_in(root: Path, package: str) -> Kernel:
    # Since trixie the modules are under usr/lib (merged /usr), in bookworm under lib.
    for modules in sorted([*root.glob("lib/modules/*"), *root.glob("usr/lib/modules/*")]):
        for image in (root / "boot" / f"vmlinuz-{modules.name}", modules / "vmlinuz"):
            if image.is_file() and (modules / "modules.builtin").is_file():
                return Kernel(package=package, release=modules.name, image=image, modules=modules)
    raise ProvisionError(f"{root} holds no kernel image with its modules: remove it and run tests/vm/setup")


def provision(*, kernels: Sequence[str] = (DEFAULT_KERNEL,), refresh: bool = False) -> list[str]:
    """Fetch whatever is missing (or, with `refresh`, everything unpacked) and say what was done, a line each.

    The second run finds everything in place and calls no apt at all. Raises ProvisionError.
    """
    done: list[str] = []
    if refresh or not _has(qemu_path):
        done.append(f"unpacked {unpack_qemu(_qemu_root())}")
    if refresh or not _has(cached_busybox):
        _unpack(BUSYBOX_PACKAGE)
        done.append(f"unpacked {BUSYBOX_PACKAGE}")
    for meta in kernels:
        if not refresh and _has(partial(cached_kernel, meta)):
            continue
        package = _resolve(meta)
        if refresh or not (cache_dir() / package).is_dir():
            _unpack(package)
        _kernel_in(cache_dir() / package, package)
        (cache_dir() / f"{meta}.resolved").write_text(package + "\n", encoding="ascii")
        done.append(f"unpacked {package} for {meta}")
    return done


def _has(look: Callable[[], object]) -> bool:
    try:
        look()
    except ProvisionError:
        return False
    return True


# --- apt --------------------------------------------------------------------------------------------------


def _resolve(meta: str) -> str:
    """The package that a kernel meta package depends on, e.g. `linux-image-6.1.0-49-amd64`."""
    for attempt in (1, 2):
        try:
            text = run(("apt-cache", "depends", "--important", meta))
        except ProvisionError:
            text = ""
        if found := re.search(r"^\s*Depends: (linux-image-\d\S*)$", text, re.MULTILINE):
            return found[1]
        if attempt == 1:
            need_root("apt-get update")
            apt_get("update")
    raise ProvisionError(f"apt knows no kernel for {meta}: is this Debian 12 with its own package sources?")


def _unpack(package: str) -> None:
    """Download one package, without its dependencies, and unpack it into the cache. Needs no root."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetch-") as scratch_name:
        scratch = Path(scratch_name)
        try:
            apt_get("download", package, cwd=scratch)
        except ProvisionError:
            need_root("apt-get update")
            apt_get("update")
            apt_get("download", package, cwd=scratch)
        (archive,) = scratch.glob("*.deb")
        run(("dpkg-deb", "-x", str(archive), str(scratch / "root")))
        target = cache_dir() / package
        if target.exists():
            shutil.rmtree(target)
        # The rename is last: a directory under its final name is complete.
        (scratch / "root").rename(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `tests/vm/setup`."""
    parser = argparse.ArgumentParser(prog="tests/vm/setup", description="Fetch QEMU, a kernel and busybox.")
    parser.add_argument("--refresh", action="store_true", help="fetch everything anew")
    parser.add_argument("--kernel", action="append", metavar="META", help=f"default: {DEFAULT_KERNEL}")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        done = provision(kernels=options.kernel or [DEFAULT_KERNEL], refresh=options.refresh)
    except ProvisionError as error:
        print(f"tests/vm/setup: {error}", file=sys.stderr)
        return 1
    for line in done or ["everything is there"]:
        print(f"tests/vm/setup: {line}")
    print(f"tests/vm/setup: {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
