"""Build the kernel modules that Debian does not have, against its headers: its own sample of mediated devices, and our
stand-in for NVIDIA's vendor VFIO driver.

They lie beside the kernel's own modules in the cache, so nothing else knows the difference. Standard library only; no
root but for what the build itself takes (a compiler). Must not change the sample: it is Debian's source.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.vm.build_kernel import install_missing
from tests.vm.commands import ProvisionError, run
from tests.vm.kernels import DEFAULT_KERNEL
from tests.vm.provision import MACHINES_APT, Kernel, cache_dir, cached_kernel

SOURCES: Final = Path(__file__).with_name("modules")
"""Our own modules, one file each."""

SAMPLE: Final = "samples/vfio-mdev/mtty.c"
"""In the kernel's source: serial ports as mediated devices (Documentation/driver-api/vfio-mediated-device.rst)."""

PLACE: Final = Path("kernel", "extra")
"""Below the directory of a kernel's modules, where `initramfs.py` finds what is built."""

RECORD: Final = "sources.sha256"

BUILD_PACKAGES: Final = ("gcc-12", "libelf1", "make", "xz-utils")
"""The compiler of Debian 12's kernels, as their headers name it."""

BUILD_TIMEOUT_S: Final = 600.0
"""Measured: 4 s on quiet cores, and 15 s to fetch and search the source; 153 MB are fetched."""


def build() -> str:
    """Build them for the default kernel if they are not there, and say what was done. Raises ProvisionError."""
    kernel = cached_kernel(DEFAULT_KERNEL)
    target = kernel.modules / PLACE
    digest = _digest()
    if (target / RECORD).is_file() and (target / RECORD).read_text(encoding="ascii").strip() == digest:
        return "everything is there"
    install_missing(BUILD_PACKAGES)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".build-") as scratch_name:
        scratch = Path(scratch_name)
        headers = _headers(kernel, scratch)
        built = _compile(headers, _sources(kernel, scratch))
        (built / RECORD).write_text(digest + "\n", encoding="ascii")
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        # The rename is last: a directory under its final name is complete.
        built.rename(target)
    return f"built {', '.join(sorted(path.stem for path in target.glob('*.ko')))} for {kernel.release}"


def _digest() -> str:
    """Changes with every source of ours and with this file."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(SOURCES.glob("*.c"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _headers(kernel: Kernel, scratch: Path) -> Path:
    """The headers of exactly this kernel, unpacked, as a directory in which modules can be made."""
    headers = f"linux-headers-{kernel.release}"
    common = f"{headers.removesuffix('-amd64')}-common"
    kbuild = f"linux-kbuild-{'.'.join(kernel.release.split('.')[:2])}"
    root = scratch / "headers"
    for package in (headers, common, kbuild):
        run(("dpkg-deb", "-x", str(_downloaded(package, scratch)), str(root)))
    made = root / "usr" / "src" / headers
    # It names the common headers where a package that is installed has them.
    makefile = made / "Makefile"
    text = makefile.read_text(encoding="ascii")
    makefile.write_text(text.replace("/usr/src/", f"{root}/usr/src/"), encoding="ascii")
    return made


def _sources(kernel: Kernel, scratch: Path) -> Path:
    """A directory with all sources and a Kbuild that names them."""
    directory = scratch / "modules"
    shutil.copytree(SOURCES, directory)
    package = f"linux-source-{'.'.join(kernel.release.split('.')[:2])}"
    archive = _downloaded(package, scratch)
    run(("dpkg-deb", "-x", str(archive), str(scratch / "source")))
    archive.unlink()
    tarball = scratch / "source" / "usr" / "src" / f"{package}.tar.xz"
    wanted = f"{package}/{SAMPLE}"
    run(("tar", "-x", "-J", "-f", str(tarball), "-C", str(scratch), "--occurrence=1", wanted))
    shutil.move(scratch / wanted, directory)
    objects = " ".join(f"{path.stem}.o" for path in sorted(directory.glob("*.c")))
    (directory / "Kbuild").write_text(f"obj-m := {objects}\n", encoding="ascii")
    return directory


def _downloaded(package: str, scratch: Path) -> Path:
    """The package's file. Raises ProvisionError: also where the archive has a newer kernel than the cache."""
    try:
        MACHINES_APT.get("download", package, cwd=scratch)
    except ProvisionError:
        MACHINES_APT.update()
        try:
            MACHINES_APT.get("download", package, cwd=scratch)
        except ProvisionError as error:
            raise ProvisionError(
                f"{error}\nIf the kernel in the cache is older than Debian's: tests/vm/setup --refresh"
            ) from None
    (archive,) = scratch.glob(f"{package}_*.deb")
    return archive


def _compile(headers: Path, sources: Path) -> Path:
    """A directory with the modules alone. Raises ProvisionError with the compiler's words."""
    run(("make", "-s", "-C", str(headers), f"M={sources}", "modules"), timeout_s=BUILD_TIMEOUT_S)
    built = sources / "built"
    built.mkdir()
    for module in sources.glob("*.ko"):
        module.rename(built / module.name)
    return built


def main() -> int:
    """The second part of `tests/vm/setup`."""
    started = time.monotonic()
    try:
        done = build()
    except ProvisionError as error:
        print(f"tests/vm/setup: modules: {error}", file=sys.stderr)
        return 1
    print(f"tests/vm/setup: modules: {done}, {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
