"""The Control service of the daemon. A handler decides nothing: it reports the state, once or after each change, or
waits for the end of the hand-over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, final

import msgspec
import trio
from grpclib import GRPCError, Status

from gpuactors import VERSION, limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.control.about import About
from gpuactors.control.pb.control import v1 as pb
from gpuactors.core.state import NodeState
from gpuactors.grpc_trio import BoundListener, Server, TrioService

if TYPE_CHECKING:
    from gpuactors.control.view import NodeView


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
                    await trio.sleep(limits.WATCH_PAUSE_S)
                else:
                    return
            yield self._answer(changed) if changed is not None else pb.ViewResponse()
            await trio.sleep(limits.WATCH_PAUSE_S)

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
    """The control socket while it is ours. Implements `ports.node.HeldControl`."""

    def __init__(self, listener: BoundListener, server: Server, service: ControlService) -> None:
        self._listener = listener
        self._server = server
        self._service = service

    def still_ours(self) -> bool:
        """Implement `ports.node.HeldControl.still_ours`."""
        return self._listener.still_there()

    async def asked(self) -> None:
        """Implement `ports.node.HeldControl.asked`."""
        await self._service.asked.wait()

    async def give_up(self) -> None:
        """Implement `ports.node.HeldControl.give_up`. After the answer the successor takes the socket's place."""
        await self._listener.aclose()
        self._service.released.set()
        await self._server.drain(limits.DRAIN_S)
