"""Makes calls of the daemon to the outside raise, in a simulated node: each kind of call once, or one of them.

A call is known by the method that is called and by the lines of the program that lead to it, innermost first. Calls of
the simulation itself are none.
"""

from __future__ import annotations

import builtins
import errno
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any, Final, final

import pytest

from gpuactors import host
from gpuactors.acts.blocking_runner import StoredCheckpoint, StoredFiles
from gpuactors.acts.disk import Disk
from gpuactors.acts.driver import SysfsBinder
from gpuactors.acts.writes import Writes
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.domains import KubeDomains
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.ports import claims as ports_claims
from gpuactors.ports import kube as ports_kube
from gpuactors.ports import node as ports
from gpuactors.process import plain_files
from gpuactors_simulation.memory import acts
from tests.memory import kube, kubelet, served
from tests.memory.disk import FakeDisk
from tests.memory.host import FaultyReader, FaultyUse
from tests.support.inline_host import InlineImex

_FEW: Final = (errno.EIO, errno.EMFILE, errno.ENOENT)
"""What no adaptor knows, and what most of them answer in a way of its own."""


def every_error(*numbers: int) -> tuple[int, ...]:
    """These errors with `EVERY_ERROR=1` (`just failures`), else a few of them."""
    return tuple(n for n in numbers if os.environ.get("EVERY_ERROR") or n in _FEW)


Call = tuple[str, ...]
"""What is called, and the functions from which: `("open", "sysfs._read", "sysfs._attribute", …)`."""

_DEPTH: Final = 3
"""How many functions tell one call from another: `_read` is called for vendor, device and class."""

_NO_CALLS: Final = ("close", "fsdecode", "fsencode", "fspath", "major", "makedev", "minor", "uname")
"""Of `os`: what asks the system nothing, or cannot be undone by an error (man 2 close)."""

_HOST: Final[tuple[ModuleType, ...]] = (
    plain_files,
    *(import_module(f"{host.__name__}.{found.name}") for found in pkgutil.iter_modules(host.__path__)),
)

Methods = Mapping[type, tuple[str, ...]]


def _of_class(outside: type) -> tuple[str, ...]:
    """Its methods, without its properties."""
    return tuple(name for name, value in vars(outside).items() if callable(value) and name[0] != "_")


OF_ADAPTORS: Final[Methods] = {
    FakeDisk: _of_class(Disk),
    acts._Act: _of_class(Writes),
    kubelet._MemoryKubeletIo: tuple(
        name for name in _of_class(kubelet._MemoryKubeletIo) if name not in ("socket_file", "dial_plugin")
    ),
    kubelet._MemoryLedgerIo: ("dial", "read_file"),
    kubelet._Changes: ("read",),
    kube.MemoryApiServer: ("connect",),
}
"""What an adaptor calls, beside the system's own: it makes a sentence of each `OSError`. `socket_file` raises none, and
`dial_plugin` is of a hand-over (tests/kubelet/dra/test_successor.py)."""

PORTS: Final[Mapping[type, type]] = {
    FaultyReader: ports.HostReader,
    FaultyUse: ports.UseReader,
    InlineImex: ports_claims.ImexReader,
    KubeletLedger: ports.LedgerReader,
    SysfsBinder: ports_claims.DriverBinder,
    StoredCheckpoint: ports_claims.CheckpointStore,
    StoredFiles: ports_claims.ClaimFileStore,
    KubeClaims: ports_kube.ClaimApi,
    KubeDomains: ports_kube.DomainApi,
    KubeNode: ports_kube.NodeApi,
    KubeSlices: ports_kube.SliceApi,
    served.MemoryServed: ports.ServedResources,
    served.MemoryVgpuTypes: ports.VgpuTypesFile,
    served.MemoryDeadSigns: ports.DeadSignsFile,
}
"""The ports of which an actor makes requests, by what is there for them in a node in memory."""

OF_ACTORS: Final[Methods] = {
    outside: tuple(name for name in _of_class(port) if (port, name) != (ports.HostReader, "inspect"))
    for outside, port in PORTS.items()
}
"""What an actor calls: a port raises its own error, and anything else is a bug. `inspect` is called for functions that
hang (tests/actors/test_sysfs_inspector.py)."""

_PROGRAM: Final = f"{os.sep}gpuactors{os.sep}"
_SIMULATION: Final = f"{_PROGRAM}simulation{os.sep}"
_MEMORY: Final = f"{_SIMULATION}memory{os.sep}"


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
    """Between the functions of the program libraries may stand, and around the innermost one what plays the system in
    memory."""
    places: list[str] = []
    while frame is not None and len(places) < _DEPTH:
        path = frame.f_code.co_filename
        if _PROGRAM in path and (places or _MEMORY not in path):
            if _SIMULATION in path:
                break
            name = os.path.basename(path).removesuffix(".py")
            places.append(f"{name}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return (what, *places) if places else None


class _System:
    """`os`, whose calls can be struck."""

    def __init__(self, strikes: Strikes) -> None:
        self._strikes = strikes

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        is_call = callable(found) and not isinstance(found, type) and name not in _NO_CALLS
        return _struck(self._strikes, name, found) if is_call else found


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
