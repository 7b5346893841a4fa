"""The control socket `gpuactors.sock` in the state directory. Implements `ports.node.Control`.

A daemon that was asked and did not hand over is taken over anyway. It may hang and still listen, on this socket and on
those of its plugins: `bind_unix` does not replace the socket of a live process unless its pid is known to be the
hanging one. So this adaptor publishes that pid (`hanging`), and the kubelet adaptor reads it. The pid is the kernel's
for the listening process; for a process in another PID namespace (the DaemonSet's other pod) it is 0, which is
sufficient: the names of the sockets are ours, and no third gpuactors belongs there.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, assert_never, final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.control.about import About
from gpuactors.control.hand_over import HandedOver, NotRunning, Unanswered, ask_to_hand_over
from gpuactors.control.path import socket_path
from gpuactors.control.server import ControlService, UnixHeldControl
from gpuactors.core.state import NodeState
from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import (
    Bind,
    Dial,
    Owner,
    OwnerOf,
    Server,
    SocketError,
    SocketInUseError,
    bind_unix,
    connect_unix,
    owner_of,
)
from gpuactors.grpc_trio.limits import GRPC_CLOSE_S
from gpuactors.ports.errors import ControlError, ControlTakenError
from gpuactors.process.resource_exhaustion import shortage

SOCKET_MODE: Final = 0o600
"""A process that may request a hand-over may end the service of this node's GPUs."""


class ControlIo(Struct, frozen=True):
    """The paths and the process behind the control socket: the node's, or a simulation's."""

    dial: Dial
    bind: Bind
    owner_of: OwnerOf
    pid: int


@final
class UnixControl:
    """The control socket in `state_dir`. Implements `ports.node.Control`.

    `hanging` is set to the process that was asked to hand over and did not, and is empty otherwise.
    """

    def __init__(
        self,
        state_dir: str,
        hanging: Latest[frozenset[Owner]],
        *,
        about: About | None = None,
        deadline_s: float = limits.HAND_OVER_DEADLINE_S,
        io: ControlIo | None = None,
    ) -> None:
        self._path = socket_path(state_dir)
        self._hanging = hanging
        self._about = about or About()
        self._deadline_s = deadline_s
        self._io = io or ControlIo(connect_unix, bind_unix, owner_of, os.getpid())

    async def ask(self) -> str:
        """Implement `ports.node.Control.ask`."""
        return encodable(await self._ask())

    async def _ask(self) -> str:
        self._hanging.set(frozenset())
        io = self._io
        match await ask_to_hand_over(
            self._path, within_s=self._deadline_s, dial=io.dial, owner_of=io.owner_of
        ):
            case NotRunning():
                return "none"
            case HandedOver(pid):
                return f"process {pid} has handed over"
            case Unanswered(reason):
                # Not allowed to dial it: then its socket cannot be taken either. Or no descriptor is left.
                with suppress(SocketError, OSError):
                    if (owner := io.owner_of(self._path)) is not None:
                        self._hanging.set(frozenset({owner}))
                return f"did not hand over, taken over anyway: {reason}"
            case other:
                assert_never(other)

    @asynccontextmanager
    async def hold(self, state: LatestReader[NodeState]) -> AsyncIterator[UnixHeldControl]:
        """Implement `ports.node.Control.hold`."""
        try:
            listener = self._io.bind(self._path, mode=SOCKET_MODE, evict=self._hanging.value)
        except SocketInUseError as exc:
            raise ControlTakenError(str(exc)) from exc
        except (SocketError, OSError) as exc:
            raise ControlError(f"no control socket: {shortage(exc) or exc}") from exc
        service = ControlService(state, self._about, self._io.pid)
        server = Server([service], drain_s=GRPC_CLOSE_S)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listener)
            yield UnixHeldControl(listener, server, service)
            nursery.cancel_scope.cancel()

    async def is_held(self) -> bool:
        """Implement `ports.node.Control.is_held`."""
        await trio.lowlevel.checkpoint()
        try:
            return self._io.owner_of(self._path) is not None
        except (SocketError, OSError):  # not known at the moment
            return True
