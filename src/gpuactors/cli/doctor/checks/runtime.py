"""Whether the container runtime gives claims to containers: CDI is on, and reads the directory of the claims' files. It
reads the runtime's configuration files; without one, as in a pod, it reports nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from gpuactors.cli.doctor.facts import Facts, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, warned
from gpuactors.core.values.quote import quoted
from gpuactors.host.runtime import Runtime

_BY_DEFAULT: Final = ("/etc/cdi", "/var/run/cdi")
"""The default CDI directories of containerd and of CRI-O."""
_CONTAINERD_2: Final = 3
"""The version of the configuration that containerd 2.0 brought."""
_SWITCH_ON: Final = (
    'Set enable_cdi = true in the CRI plugin\'s section of {path} ([plugins."io.containerd.grpc.v1.cri"] in a '
    "configuration of version 2), and restart containerd."
)


def check(facts: Facts) -> Iterator[Finding]:
    """Check each runtime; nothing where claims are off."""
    match facts.runtimes:
        case None:
            return
        case Unknown(reason):
            yield warned(Check.RUNTIME_CDI, reason, "Run this as root on the node.")
        case runtimes:
            for runtime in runtimes:
                yield _judged(runtime, str(facts.config.cdi_dir))


def _judged(runtime: Runtime, cdi_dir: str) -> Finding:
    if runtime.problem:
        return warned(
            Check.RUNTIME_CDI,
            f"whether CDI is on in {runtime.name} is not known: {runtime.path} cannot be read "
            f"({quoted(runtime.problem)})",
            f"Correct {runtime.path}, or run this as root on the node.",
        )
    if runtime.enable_cdi is False:
        return failed(
            Check.RUNTIME_CDI,
            f"{runtime.path} switches CDI off: no container gets the devices of its claim",
            _SWITCH_ON.format(path=runtime.path),
        )
    dirs = runtime.cdi_dirs if runtime.cdi_dirs is not None else _BY_DEFAULT
    if _plain(cdi_dir) not in map(_plain, dirs):
        return failed(
            Check.RUNTIME_CDI,
            f"{runtime.name} reads CDI files in {', '.join(map(quoted, dirs)) or 'no directory'}, and those of claims "
            f"are in {cdi_dir} (--cdi-dir)",
            f"Add {cdi_dir} to cdi_spec_dirs in {runtime.path}, or set --cdi-dir to one of these.",
        )
    is_containerd = runtime.name == "containerd"
    if is_containerd and runtime.enable_cdi is None and runtime.version < _CONTAINERD_2:
        return warned(
            Check.RUNTIME_CDI,
            f"{runtime.path} does not say whether CDI is on: it is in containerd 2.x, and is not in 1.7",
            f"With containerd 2.x nothing; else: {_SWITCH_ON.format(path=runtime.path)}",
        )
    why = (
        "enable_cdi"
        if runtime.enable_cdi
        else "by default of containerd 2.x"
        if is_containerd
        else "by default"
    )
    return passed(Check.RUNTIME_CDI, f"{runtime.name} has CDI on ({why}; {runtime.path})")


def _plain(directory: str) -> str:
    """Normalize a path; /var/run is a link to /run."""
    return os.path.normpath(directory).removeprefix("/var")
