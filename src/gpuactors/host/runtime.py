"""The container runtimes' own configuration files: whether CDI, by which claims reach containers, is switched on.

For `gpuactors doctor`. Synchronous, and read once; it may block. The files are the operator's: whatever is in them is
decoded without recursion beyond a bound, or is not known. Must not judge.
"""

from __future__ import annotations

import fnmatch
import os
import tomllib
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from gpuactors.host.best_effort import names_in
from gpuactors.host.faults import raise_if_short
from gpuactors.host.root import CONTAINERD_CONFIGS, CRIO_CONFIG, CRIO_CONFIGS, HostRoot
from gpuactors.process.plain_files import read_plain

_FILE_MAX_BYTES: Final = 1 << 20
_IMPORTS_MAX: Final = 64
_CRI: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri")
"""The plugin's name in a configuration of version 3 (containerd 2.x), and of version 2."""


class Runtime(Struct, frozen=True):
    """One runtime's configuration."""

    name: str
    """The runtime's name, `containerd` or `CRI-O`."""
    path: str
    """The file's path on the host."""
    version: int = 0
    """The version of a containerd configuration: 3 in containerd 2.x; 0 if the file has none."""
    enable_cdi: bool | None = None
    """The setting; None if it is not in the file."""
    cdi_dirs: tuple[str, ...] | None = None
    """The setting; None if it is not in the file."""
    problem: str = ""
    """Why it could not be read, as a part of a sentence; the rest does not count then."""


def read(root: HostRoot) -> tuple[Runtime, ...]:
    """Read the runtimes whose configuration is below `root`. Raises `HostShortError`."""
    return (*_containerd(root), *_crio(root))


def _containerd(root: HostRoot) -> Iterator[Runtime]:
    for path in CONTAINERD_CONFIGS:
        try:
            main = _decoded(root, path)
        except (OSError, ValueError) as error:
            yield Runtime("containerd", path, problem=_why(error))
            continue
        if main is None:
            continue
        try:
            imported = [file for name in _imports(root, main) if (file := _decoded(root, name)) is not None]
        except (OSError, ValueError) as error:
            yield Runtime("containerd", path, problem=f"a file that it imports: {_why(error)}")
            continue
        enabled: bool | None = None
        dirs: tuple[str, ...] | None = None
        for config in (main, *imported):
            for name in _CRI:
                cri = _table(_table(config, "plugins"), name)
                enabled = cri["enable_cdi"] if isinstance(cri.get("enable_cdi"), bool) else enabled
                dirs = _texts(cri.get("cdi_spec_dirs")) or dirs
        version = main.get("version")
        yield Runtime("containerd", path, version if isinstance(version, int) else 0, enabled, dirs)


def _imports(root: HostRoot, config: dict[str, Any]) -> list[str]:
    """Return the files that it imports; their last name may be a pattern."""
    paths: list[str] = []
    for pattern in _texts(config.get("imports")) or ():
        directory, name = os.path.split(pattern)
        paths += [f"{directory}/{n}" for n in _names(root, directory) if fnmatch.fnmatchcase(n, name)]
    return paths[:_IMPORTS_MAX]


def _crio(root: HostRoot) -> Iterator[Runtime]:
    names = [f"{CRIO_CONFIGS}/{name}" for name in _names(root, CRIO_CONFIGS) if not name.startswith(".")]
    dirs: tuple[str, ...] | None = None
    first_path = ""
    for path in [CRIO_CONFIG, *names[:_IMPORTS_MAX]]:
        try:
            config = _decoded(root, path)
        except (OSError, ValueError) as error:
            yield Runtime("CRI-O", path, problem=_why(error))
            return
        if config is not None:
            first_path = first_path or path
            dirs = _texts(_table(_table(config, "crio"), "runtime").get("cdi_spec_dirs")) or dirs
    if first_path:
        yield Runtime("CRI-O", first_path, cdi_dirs=dirs)


def _decoded(root: HostRoot, path: str) -> dict[str, Any] | None:
    """Decode a TOML file; None if it is not there. Raises `OSError`, and `ValueError` for what is no TOML."""
    real = root.real(path)
    try:
        return tomllib.loads(read_plain(real, _FILE_MAX_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise_if_short(error, real)
        raise
    except RecursionError:  # the decoder is recursive
        raise ValueError("it nests too deep") from None


def _table(table: dict[str, Any], name: str) -> dict[str, Any]:
    value = table.get(name)
    return value if isinstance(value, dict) else {}


def _texts(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list):
        return None
    return tuple(item for item in value if isinstance(item, str))


def _names(root: HostRoot, directory: str) -> list[str]:
    return sorted(names_in(root.real(directory)))


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
