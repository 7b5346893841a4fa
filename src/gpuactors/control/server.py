"""The Control service of the daemon. A handler decides nothing: it reports the state, once or after each change, or
waits for the end of the hand-over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Final, final

import msgspec
import trio
from grpclib import GRPCError, Status

from gpuactors import VERSION, limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.control.about import About
from gpuactors.control.pb.control import v1 as pb
from gpuactors.core.state import NodeState
from gpuactors.grpc_trio import BoundListener, Server, TrioService
from gpuactors.grpc_trio.limits import GRPC_CLOSE_S
from gpuactors.ports.errors import ControlError, ControlTakenError

if TYPE_CHECKING:
    from gpuactors.control.view import NodeView

WATCH_PAUSE_S: Final = 0.2
"""From one look at the state to the next for a command that watches: whatever happens meanwhile is in the next
message."""


class ControlService(TrioService, pb.ControlBase):
    """Reports the state; the first request for a hand-over is answered when `released` is set."""

    def __init__(self, state: LatestReader[NodeState], about: About, pid: int) -> None:
        self._state = state
        self._about = about
        self._pid = pid
        self._derived: tuple[NodeState, NodeView] | None = None
        self.asked = trio.Event()
        self.released = trio.Event()

    async def view(self, message: pb.ViewRequest) -> pb.ViewResponse:
        return self._answer(self._state.value)

    async def watch_view(self, message: pb.ViewRequest) -> AsyncIterator[pb.ViewResponse]:
        states, facts = self._state.subscribe(), None
        while True:
            changed: NodeState | None = None
            with trio.move_on_after(limits.WATCH_BEAT_S):
                async for state in states:
                    if (found := self._facts(state)) != facts:
                        facts, changed = found, state
                        break
                    # Most changes of the state are none of the facts: kubelet's calls are not to wait for each look.
                    await trio.sleep(WATCH_PAUSE_S)
                else:
                    return
            yield self._answer(changed) if changed is not None else pb.ViewResponse()
            await trio.sleep(WATCH_PAUSE_S)

    def _facts(self, state: NodeState) -> NodeView:
        """Everything of the state but its ages, derived once for all watchers."""
        from gpuactors.control.node_view import AGELESS, view_of  # with the first command that asks

        if self._derived is None or self._derived[0] is not state:
            self._derived = state, view_of(state, AGELESS)
        return self._derived[1]

    def _answer(self, state: NodeState) -> pb.ViewResponse:
        from gpuactors.control.node_view import view_of  # as in `_facts`
        from gpuactors.control.view import DaemonStatus  # as in `_facts`

        status = DaemonStatus(self._about, view_of(state, trio.current_time()))
        return pb.ViewResponse(pid=self._pid, version=VERSION, status=msgspec.json.encode(status))

    async def hand_over(self, message: pb.HandOverRequest) -> pb.HandOverResponse:
        if self.asked.is_set():
            raise GRPCError(
                Status.ABORTED, "this daemon is handing over to another successor: ask again in a moment"
            )
        self.asked.set()
        await self.released.wait()
        return pb.HandOverResponse(pid=self._pid)


@final
class UnixHeldControl:
    """The control socket while it is ours, at each of its places. Implements `ports.node.HeldControl`.

    `bind` makes the socket at a path. Raises `ControlTakenError`, `ControlError`.
    """

    def __init__(
        self, service: ControlService, paths: Iterable[str], bind: Callable[[str], BoundListener]
    ) -> None:
        self._service = service
        self._bind = bind
        self._listeners: dict[str, BoundListener | None] = dict.fromkeys(paths)
        self._server = Server([service], drain_s=GRPC_CLOSE_S)
        self._nursery: trio.Nursery | None = None
        self._is_taken = False

    def bind(self) -> str:
        """Makes the sockets that are missing; returns why one cannot be made, empty if all are there. Raises
        `ControlTakenError`."""
        problems: list[str] = []
        for path in [path for path, listener in self._listeners.items() if listener is None]:
            try:
                self._listeners[path] = self._bind(path)
            except ControlTakenError:
                raise
            except ControlError as exc:
                problems.append(str(exc))
        return "; ".join(problems)

    def has_any(self) -> bool:
        """The socket is there at one place at least."""
        return any(listener is not None for listener in self._listeners.values())

    async def serve(self, nursery: trio.Nursery) -> None:
        """Serves at each place, in this nursery."""
        self._nursery = nursery
        for listener in self._listeners.values():
            if listener is not None:
                await nursery.start(self._server.serve, listener)

    async def complete(self) -> str:
        """Implement `ports.node.HeldControl.complete`."""
        missing = [path for path, listener in self._listeners.items() if listener is None]
        if not missing or self._nursery is None:
            return ""
        try:
            problem = self.bind()
        except ControlTakenError as exc:
            self._is_taken, problem = True, str(exc)
        for path in missing:
            if (listener := self._listeners[path]) is not None:
                await self._nursery.start(self._server.serve, listener)
        return problem

    def still_ours(self) -> bool:
        """Implement `ports.node.HeldControl.still_ours`."""
        made = [listener for listener in self._listeners.values() if listener is not None]
        return not self._is_taken and all(listener.still_there() for listener in made)

    async def asked(self) -> None:
        """Implement `ports.node.HeldControl.asked`."""
        await self._service.asked.wait()

    async def give_up(self) -> None:
        """Implement `ports.node.HeldControl.give_up`. After the answer the successor takes the socket's place."""
        for listener in self._listeners.values():
            if listener is not None:
                await listener.aclose()
        self._service.released.set()
        await self._server.drain(limits.DRAIN_S)
