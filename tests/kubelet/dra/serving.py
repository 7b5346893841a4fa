"""A DRA plugin that serves on real sockets, with a core whose answers a test gives; grpcio calls it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import trio

from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.claim import ClaimName, DeviceHealth, Prepared, PreparedDevice, Unprepared
from gpuactors.core.values.effects import Refusal, Refused
from gpuactors.kubelet.dra.plugin import PluginIo, UnixClaims, UnixClaimsEndpoint, plugin_io_of_the_node
from gpuactors.ports.claims import PluginStatus
from tests.support.patience import patient

DRIVER: Final = "gpu.nvidia.com"
WITHIN_S: Final = patient(20.0)

GPU: Final = PreparedDevice(("gpu",), "node-1", "gpu-0000-01-00-0", ("k8s.gpu.nvidia.com/claim=u-gpu",))


def refused(reason: str) -> Refused:
    return Refused(Refusal.FAILED_PRECONDITION, reason, ())


@dataclass
class Core:
    """Answers each claim by its UID: what a test has set, else that it is done. Implements `ClaimCaller`."""

    prepared: dict[str, Prepared | Refused | Exception] = field(default_factory=dict)
    unprepared: dict[str, Unprepared | Refused | Exception] = field(default_factory=dict)
    hold: trio.Event | None = None
    """Every prepare waits for it."""
    asked: list[tuple[str, ClaimName]] = field(default_factory=list)
    cancelled: list[ClaimName] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    async def prepare(self, claim: ClaimName) -> Prepared | Refused:
        self._note("prepare", claim)
        try:
            if self.hold is not None:
                await self.hold.wait()
        except trio.Cancelled:
            self.cancelled.append(claim)
            self._wake()
            raise
        answer = self.prepared.get(claim.uid, Prepared((GPU,)))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused:
        self._note("unprepare", claim)
        answer = self.unprepared.get(claim.uid, Unprepared())
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until it holds; looked at after each call."""
        with trio.fail_after(WITHIN_S):
            while not condition():
                await self.changed.wait()

    def _note(self, call: str, claim: ClaimName) -> None:
        self.asked.append((call, claim))
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


@contextmanager
def short_directory() -> Iterator[Path]:
    """A short path, as a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ga-") as directory:
        yield Path(directory)


@dataclass
class Plugin:
    """One that serves."""

    kubelet_dir: Path
    core: Core
    health: Latest[tuple[DeviceHealth, ...]]
    endpoint: UnixClaimsEndpoint
    told: list[PluginStatus]
    failures: list[Exception]
    instance: str | None

    @property
    def api(self) -> Path:
        suffix = f"-{self.instance}" if self.instance else ""
        return self.kubelet_dir / "plugins" / DRIVER / f"dra{suffix}.sock"

    @property
    def registration(self) -> Path:
        suffix = f"-{self.instance}" if self.instance else ""
        return self.kubelet_dir / "plugins_registry" / f"{DRIVER}{suffix}-reg.sock"

    @contextmanager
    def dialled(self, path: Path | None = None) -> Iterator[grpc.Channel]:
        """A connection to the API, or to the socket at `path`."""
        with grpc.insecure_channel(f"unix:{path or self.api}") as channel:
            yield channel

    async def call(self, stub: Any, request: Any, timeout_s: float = WITHIN_S) -> Any:
        """The answer. Raises grpc.RpcError."""
        with trio.fail_after(WITHIN_S):
            return await trio.to_thread.run_sync(
                lambda: stub(request, timeout=timeout_s), abandon_on_cancel=True
            )


@asynccontextmanager
async def serving(
    kubelet_dir: Path,
    core: Core | None = None,
    *,
    instance: str | None = None,
    driver: str = DRIVER,
    io: PluginIo | None = None,
    health: tuple[DeviceHealth, ...] = (),
) -> AsyncIterator[Plugin]:
    told: list[PluginStatus] = []
    failures: list[Exception] = []
    core = core or Core()
    cell: Latest[tuple[DeviceHealth, ...]] = Latest(health)
    claims = UnixClaims(
        str(kubelet_dir),
        driver,
        instance,
        lambda _, exc: failures.append(exc),
        io=io or plugin_io_of_the_node(),
    )
    async with claims.serve_claims(core, cell.subscribe(), told.append) as endpoint:
        yield Plugin(kubelet_dir, core, cell, endpoint, told, failures, instance)
