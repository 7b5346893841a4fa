"""The control socket `gpuactors.sock`, at two places. Implements `ports.node.Control`.

Below kubelet's directory of device plugins every daemon of the node finds it, and it decides who serves. In the state
directory commands find it, and older daemons, which know no other place. A daemon asks at both, and has both
(ADR 0020).

A daemon that was asked and did not hand over is taken over anyway. It may hang and still listen, on this socket and on
those of its plugins: `bind_unix` does not replace the socket of a live process unless its pid is known to be the
hanging one. So this adaptor publishes that pid (`hanging`), and the kubelet adaptor reads it. The pid is the kernel's
for the listening process; for a process in another PID namespace (the DaemonSet's other pod) it is 0, which is
sufficient: the names of the sockets are ours, and no third gpuactors belongs there.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Final, assert_never, final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.control.about import About
from gpuactors.control.hand_over import HandedOver, NotRunning, Unanswered, ask_to_hand_over
from gpuactors.control.path import node_socket_path, socket_path
from gpuactors.control.server import UnixHeldControl
from gpuactors.control.service import ControlService
from gpuactors.core.state import NodeState
from gpuactors.core.values.quote import first_of
from gpuactors.core.values.text import encodable
from gpuactors.grpc_trio import (
    Bind,
    BoundListener,
    Dial,
    Owner,
    OwnerOf,
    SocketError,
    SocketInUseError,
    bind_unix,
    connect_unix,
    owner_of,
)
from gpuactors.ports.errors import ControlBlockedError, ControlError, ControlTakenError
from gpuactors.process.resource_exhaustion import shortage

SOCKET_MODE: Final = 0o600
"""A process that may request a hand-over may end the service of this node's GPUs."""


class ControlIo(Struct, frozen=True):
    """The paths and the process behind the control socket: the node's, or a simulation's."""

    dial: Dial
    bind: Bind
    owner_of: OwnerOf
    pid: int
    make_directory: Callable[[str], None]
    """Makes a directory in one that exists. Raises `OSError`."""
    is_directory: Callable[[str], bool]
    """Returns whether there is a directory, and not a removed one that a mount still shows."""


@final
class UnixControl:
    """The control socket of this node, and the one in `state_dir` if there can be one. Implements `ports.node.Control`.

    `device_plugin_dir` is kubelet's, with the node's socket; None: there is only the one in `state_dir`. `endpoints`
    names gpuactors' sockets for kubelet that are served now. `hanging` is set to the processes that were asked to hand
    over and did not, and is empty otherwise.
    """

    def __init__(
        self,
        state_dir: str | None,
        hanging: Latest[frozenset[Owner]],
        *,
        device_plugin_dir: str | None = None,
        endpoints: Callable[[], Awaitable[Sequence[str]]] | None = None,
        about: Callable[[], About] = About,
        deadline_s: float = limits.HAND_OVER_DEADLINE_S,
        io: ControlIo | None = None,
    ) -> None:
        self._places: Final = {
            path_in(directory): directory
            for directory, path_in in ((device_plugin_dir, node_socket_path), (state_dir, socket_path))
            if directory is not None
        }
        """The path of each socket, with the directory that it is in or below; the node's is first."""
        self._device_plugin_dir = device_plugin_dir
        self._endpoints = endpoints
        self._hanging = hanging
        self._about = about
        self._deadline_s = deadline_s
        self._io = io or ControlIo(
            connect_unix, bind_unix, owner_of, os.getpid(), _make_directory, _is_directory
        )

    async def ask(self) -> str:
        """Implement `ports.node.Control.ask`. Both places at once: they may be two daemons', and one may hang."""
        self._hanging.set(frozenset())
        outcomes: dict[str, str] = {}
        released = trio.Event()

        async def ask(place: str) -> None:
            outcomes[place] = await self._ask(place, released)

        async with trio.open_nursery() as nursery:
            for place in self._places:
                nursery.start_soon(ask, place)
        if self._endpoints is not None and not self._hanging.value and (served := await self._endpoints()):
            raise ControlBlockedError(
                f"another gpuactors serves {', '.join(first_of(served))} in {self._device_plugin_dir}, and has no "
                "control socket there: it is of an older version, with another state directory. This one does not "
                "serve beside it: end that one, or give this one its --state-dir"
            )
        distinct = dict.fromkeys(outcomes[place] for place in self._places)
        distinct.pop(_NONE, None)
        return encodable("; ".join(distinct) or _NONE)

    async def _ask(self, place: str, released: trio.Event) -> str:
        io = self._io
        match await ask_to_hand_over(
            place, within_s=self._deadline_s, dial=io.dial, owner_of=io.owner_of, released=released
        ):
            case NotRunning():
                return _NONE
            case HandedOver(pid):
                return f"process {pid} has handed over"
            case Unanswered(reason):
                # Not allowed to dial it: then its socket cannot be taken either. Or no descriptor is left.
                with suppress(SocketError, OSError):
                    if (owner := io.owner_of(place)) is not None:
                        self._hanging.set(self._hanging.value | {owner})
                return f"did not hand over, taken over anyway: {reason}"
            case other:
                assert_never(other)

    @asynccontextmanager
    async def hold(self, state: LatestReader[NodeState]) -> AsyncIterator[UnixHeldControl]:
        """Implement `ports.node.Control.hold`. The node's socket is made first: who has that one serves."""
        service = ControlService(state, self._about, self._io.pid)
        async with AsyncExitStack() as stack:
            held = UnixHeldControl(service, self._places, partial(self._bind, stack))
            problem = held.bind()
            if not held.has_any():
                raise ControlError(problem)
            async with trio.open_nursery() as nursery:
                await held.serve(nursery)
                yield held
                nursery.cancel_scope.cancel()

    def _bind(self, stack: AsyncExitStack, path: str) -> BoundListener:
        """Bind the socket at `path`, to be closed with `stack`. Raises `ControlTakenError`, `ControlError`."""
        with suppress(OSError):  # what is wrong with it is said when the socket cannot be made
            self._io.make_directory(os.path.dirname(path))
        try:
            listener = self._io.bind(path, mode=SOCKET_MODE, evict=self._hanging.value)
        except SocketInUseError as exc:
            raise ControlTakenError(str(exc)) from exc
        except (SocketError, OSError) as exc:
            raise ControlError(f"no control socket: {shortage(exc) or exc}") from exc
        stack.push_async_callback(listener.aclose)
        return listener

    async def is_held(self) -> bool:
        """Implement `ports.node.Control.is_held`. Return true if it is not known: when the directory of the node's
        socket is removed, its holder keeps the socket and loses the file."""
        await trio.lowlevel.checkpoint()
        nodes = next(iter(self._places.values()))
        try:
            held = any(self._io.owner_of(path) is not None for path in self._places)
            return held or not self._io.is_directory(nodes)
        except (SocketError, OSError):
            return True


_NONE: Final = "none"


def _make_directory(path: str) -> None:
    os.mkdir(path, 0o700)


def _is_directory(path: str) -> bool:
    with suppress(OSError):
        return os.stat(path).st_nlink > 0
    return False
