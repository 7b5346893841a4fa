"""Fetch what the virtual machine needs from Debian: QEMU (installed), a kernel and a static busybox (unpacked only).

Standard library only: it runs before the virtual environment has to exist. Names no mirror: everything comes
through the machine's own apt. Must not start a machine, and must not install the kernel: the package is unpacked into
the cache directory, and ABI names (`linux-image-6.1.0-NN-amd64`) are resolved through the meta package because they
move with every security update.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]

QEMU: Final = "qemu-system-x86_64"
QEMU_PACKAGE: Final = "qemu-system-x86"
BUSYBOX_PACKAGE: Final = "busybox-static"
DEFAULT_KERNEL: Final = "linux-image-amd64"
"""Debian's meta package. The `-cloud` kernels will not do: they lack 9p."""

APT_TIMEOUT_S: Final = 900.0
"""One apt or dpkg command. 70 MB over a slow line; apt's own lock is waited for inside it."""


class ProvisionError(Exception):
    """Something the machine needs is missing; the text says what and how to get it."""


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
    """The QEMU program. Raises ProvisionError where there is none."""
    found = shutil.which(QEMU)
    if found is None:
        raise ProvisionError(f"there is no {QEMU} on PATH: run tests/vm/setup")
    return Path(found)


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
    if shutil.which(QEMU) is None:
        _install(QEMU_PACKAGE)
        done.append(f"installed {QEMU_PACKAGE}")
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


def _run(argv: Sequence[str], *, cwd: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=APT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ProvisionError(f"{argv[0]} is not there: the virtual machine is set up for Debian 12") from None
    except subprocess.TimeoutExpired:
        raise ProvisionError(f"`{' '.join(argv)}` took more than {APT_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise ProvisionError(f"`{' '.join(argv)}` failed with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout


def _apt_get(*arguments: str, cwd: Path | None = None) -> str:
    # As root apt drops to a user that often cannot write where we are; it would only warn, at length.
    sandbox = ("-o", "APT::Sandbox::User=root") if os.geteuid() == 0 else ()
    return _run(("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", *sandbox, *arguments), cwd=cwd)


def _need_root(to_do: str) -> None:
    if os.geteuid() != 0:
        raise ProvisionError(f"this needs root: run `{to_do}` as root, then tests/vm/setup again")


def _install(package: str) -> None:
    _need_root(f"apt-get update && apt-get install --no-install-recommends {package}")
    try:
        _apt_get("install", "--no-install-recommends", package)
    except ProvisionError:  # no list, or a list so old that the mirror no longer has what it names
        _apt_get("update")
        _apt_get("install", "--no-install-recommends", package)


def _resolve(meta: str) -> str:
    """The package that a kernel meta package depends on, e.g. `linux-image-6.1.0-49-amd64`."""
    for attempt in (1, 2):
        try:
            text = _run(("apt-cache", "depends", "--important", meta))
        except ProvisionError:
            text = ""
        if found := re.search(r"^\s*Depends: (linux-image-\d\S*)$", text, re.MULTILINE):
            return found[1]
        if attempt == 1:
            _need_root("apt-get update")
            _apt_get("update")
    raise ProvisionError(f"apt knows no kernel for {meta}: is this Debian 12 with its own package sources?")


def _unpack(package: str) -> None:
    """Download one package, without its dependencies, and unpack it into the cache. Needs no root."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetch-") as scratch_name:
        scratch = Path(scratch_name)
        try:
            _apt_get("download", package, cwd=scratch)
        except ProvisionError:
            _need_root("apt-get update")
            _apt_get("update")
            _apt_get("download", package, cwd=scratch)
        (archive,) = scratch.glob("*.deb")
        _run(("dpkg-deb", "-x", str(archive), str(scratch / "root")))
        target = cache_dir() / package
        if target.exists():
            shutil.rmtree(target)
        # The rename is last: a directory under its final name is complete.
        (scratch / "root").rename(target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `tests/vm/setup`."""
    parser = argparse.ArgumentParser(prog="tests/vm/setup", description="Fetch QEMU, a kernel and busybox.")
    parser.add_argument("--refresh", action="store_true", help="fetch the kernel and busybox anew")
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
