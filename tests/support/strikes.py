"""Makes calls of the daemon to the outside raise, in a simulated node: each kind of call once, or one of them.

A call is known by the method that is called and by the lines of the program that lead to it, innermost first. Calls of
the simulation itself are none.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, Final, final

import pytest

from gpuactors.acts.apart import StoredCheckpoint, StoredFiles
from gpuactors.acts.driver import SysfsBinder
from gpuactors.host import boot, faults, group, modules, procfs, sysfs, use
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.simulation.disk.disk import FakeDisk
from gpuactors.simulation.memory import acts, host, kube, kubelet, served

Call = tuple[str, ...]
"""What is called, and the functions from which: `("open", "sysfs._read", "sysfs._attribute", …)`."""

_DEPTH: Final = 3
"""How many functions tell one call from another: `_read` is called for vendor, device and class."""

_OF_THE_SYSTEM: Final = ("open", "read", "listdir", "readlink", "stat")

_HOST: Final[tuple[ModuleType, ...]] = (boot, faults, group, modules, procfs, sysfs, use)

Methods = Mapping[type, tuple[str, ...]]

OF_ADAPTORS: Final[Methods] = {
    FakeDisk: (
        "read",
        "names",
        "make_directory",
        "remove_directory",
        "write",
        "sync",
        "rename",
        "unlink",
        "sync_directory",
    ),
    acts._Act: ("write", "read", "at_the_end"),
    kubelet._MemoryKubeletIo: (
        "watch",
        "names",
        "directory",
        "bind",
        "bind_plugin",
        "watch_plugins",
        "dial",
    ),
    kubelet._MemoryLedgerIo: ("dial", "read_file"),
    kubelet._Changes: ("read",),
    kube.MemoryApiServer: ("connect",),
}
"""What an adaptor calls, beside the system's own: it makes a sentence of each `OSError`."""

OF_ACTORS: Final[Methods] = {
    host.FaultyReader: ("scan", "inspect"),
    host.FaultyUse: ("observe",),
    KubeletLedger: ("read",),
    SysfsBinder: ("bring",),
    StoredCheckpoint: ("read",),
    StoredFiles: ("found", "write", "remove"),
    KubeClaims: ("read",),
    KubeNode: ("read",),
    KubeSlices: ("create", "update", "delete", "follow"),
    served.MemoryServed: ("read", "write"),
}
"""What an actor calls: a port raises its own error, and anything else is a bug."""

_PROGRAM: Final = f"{os.sep}gpuactors{os.sep}"
_SIMULATION: Final = f"{_PROGRAM}simulation{os.sep}"


@final
class Strikes:
    """What is called, and what raises."""

    def __init__(self, error: Callable[[], Exception], only: Call | None) -> None:
        self._error = error
        self._only = only
        self.calls: set[Call] = set()
        """Those that were made; each of them has raised the first time, unless only one was to."""
        self.struck = 0

    def called(self, what: str, frame: FrameType) -> None:
        """A call is about to be made. Raises what is to be raised."""
        call = _of(what, frame)
        if call is None or call in self.calls:
            return
        self.calls.add(call)
        if self._only in (None, call):
            self.struck += 1
            raise self._error()


def _of(what: str, frame: FrameType | None) -> Call | None:
    places: list[str] = []
    while frame is not None and len(places) < _DEPTH:
        code = frame.f_code
        if _PROGRAM not in code.co_filename:
            break
        if _SIMULATION in code.co_filename:
            if not places:
                return None
            break
        places.append(
            f"{os.path.basename(code.co_filename).removesuffix('.py')}.{code.co_name}:{frame.f_lineno}"
        )
        frame = frame.f_back
    return (what, *places) if places else None


class _System:
    """`os`, whose calls can be struck."""

    def __init__(self, strikes: Strikes) -> None:
        for name in _OF_THE_SYSTEM:
            setattr(self, name, _struck(strikes, name, getattr(os, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _struck(strikes: Strikes, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        strikes.called(name, sys._getframe(1))
        return real(*args, **kwargs)

    return call


@contextmanager
def striking(
    methods: Methods, error: Callable[[], Exception], *, system: bool, only: Call | None = None
) -> Iterator[Strikes]:
    """Each call of these methods raises the first time that it is made, and so do those of the system below `host/` if
    `system`; `only`: no other call does."""
    strikes = Strikes(error, only)
    with pytest.MonkeyPatch.context() as patch:
        for module in _HOST if system else ():
            patch.setattr(module, "os", _System(strikes), raising=False)
            patch.setattr(module, "open", _struck(strikes, "open", builtins.open), raising=False)
        for of, names in methods.items():
            for name in names:
                patch.setattr(of, name, _struck(strikes, f"{of.__name__}.{name}", of.__dict__[name]))
        yield strikes
