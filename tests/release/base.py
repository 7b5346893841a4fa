"""A stand-in for debian:trixie-slim, where no image registry can be reached: the same packages, with the same files
left out, by mmdebstrap from the apt sources of this machine.

What differs from the original: it holds today's packages and not those of its last release, and it names no source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.vm.apt import Source, codename, sources_of
from tests.vm.commands import ProvisionError, run

SUITE: Final = "trixie"

NAME: Final = "debian:trixie-slim"

_SUITES: Final = (SUITE, f"{SUITE}-updates", f"{SUITE}-security")

_DPKG: Final = (
    "force-unsafe-io",
    *(f"path-exclude=/usr/share/{left_out}/*" for left_out in ("doc", "info", "locale", "man")),
    "path-include=/usr/share/doc/*/copyright",
)
"""As in the original: no documentation, and no fsync for a tree that is thrown away if the machine fails."""

_LEFT_OVER: Final = (
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d/*",
    "/var/lib/apt/extended_states",
    "/var/cache/ldconfig/aux-cache",
    "/etc/hostname",
    "/etc/resolv.conf",
    *(f"/var/cache/debconf/{name}.dat-old" for name in ("config", "templates")),
)


def write_sources(directory: Path) -> tuple[Path, ...]:
    """The machine's own sources of Debian with the image's suite in place of the machine's, a file each, for apt's
    sources.list.d. Raises ProvisionError."""
    own = codename()
    found: list[Source] = []
    for suite in _SUITES:
        # An entry may name several suites at once; each is asked for by itself.
        of_machine = suite.replace(SUITE, own)
        found += [source for source in sources_of(suite, base=of_machine) if source not in found]
    if not any(f" {SUITE}" in source.text for source in found):
        raise ProvisionError(
            f"the image is made of packages of {SUITE}, from where apt on this machine has its own, and apt (of "
            f"{own or 'no Debian'}) has no source of the kind"
        )
    directory.mkdir(parents=True)
    files = [directory / f"{number}{source.suffix}" for number, source in enumerate(found)]
    for file, source in zip(files, found, strict=True):
        file.write_text(source.text, encoding="utf-8")
    return tuple(files)


def make_base(archive: Path, sources: tuple[Path, ...], environment: Mapping[str, str]) -> None:
    """Write the stand-in's files to `archive`, a tar. Same packages, same bytes. Raises ProvisionError."""
    run(
        (
            "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase",
            "--include=usr-is-merged",
            # A runtime makes /dev.
            "--skip=output/dev",
            # Without it apt takes usrmerge, and with that all of Perl.
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            *(f"--dpkgopt={option}" for option in _DPKG),
            *(f'--customize-hook=rm -f "$1"{path}' for path in _LEFT_OVER),
            SUITE, str(archive), *map(str, sources),
        ),
        environment=environment,
    )  # fmt: skip
