"""The daemon's answers to the requests over its control socket: it reports the state, once or after each change, or
waits for the end of the hand-over. Must not decide anything, nor know how it is asked (`server.py`,
`grpc_control.py`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Final, final

import msgspec
import trio

from gpuactors import VERSION, limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.control.about import About
from gpuactors.control.messages import BUSY, Answer
from gpuactors.core.state import NodeState

if TYPE_CHECKING:
    from gpuactors.control.view import NodeView

WATCH_PAUSE_S: Final = 0.2
"""From one look at the state to the next for a command that watches: whatever happens meanwhile is in the next
message."""


@final
class ControlService:
    """The answers to each request. The first hand-over is answered when `released` is set."""

    def __init__(self, state: LatestReader[NodeState], about: Callable[[], About], pid: int) -> None:
        self._state = state
        self._about = about
        self._pid = pid
        self._derived: tuple[NodeState, NodeView] | None = None
        self.asked = trio.Event()
        self.released = trio.Event()

    def status(self) -> Answer:
        """Report the state now."""
        return self._answer(self._state.value)

    async def changes(self) -> AsyncGenerator[Answer, None]:
        """Report the state now and after each change. After WATCH_BEAT_S without a change, answer without a status."""
        states, facts = self._state.subscribe(), None
        while True:
            changed: NodeState | None = None
            with trio.move_on_after(limits.WATCH_BEAT_S):
                async for state in states:
                    if (view := self._facts(state)) != facts:
                        facts, changed = view, state
                        break
                    # Most changes of the state do not change the view: kubelet's calls must not wait for each look.
                    await trio.sleep(WATCH_PAUSE_S)
                else:
                    return
            yield self._answer(changed) if changed is not None else Answer(pid=self._pid)
            await trio.sleep(WATCH_PAUSE_S)

    def _facts(self, state: NodeState) -> NodeView:
        """Return the view of the state without ages, derived once for all watchers."""
        from gpuactors.control.node_view import AGELESS, view_of  # with the first command that asks

        if self._derived is None or self._derived[0] is not state:
            self._derived = state, view_of(state, AGELESS)
        return self._derived[1]

    def _answer(self, state: NodeState) -> Answer:
        from gpuactors.control.node_view import view_of  # as in `_facts`
        from gpuactors.control.view import DaemonStatus  # as in `_facts`

        status = DaemonStatus(self._about(), view_of(state, trio.current_time()))
        return Answer(self._pid, VERSION, msgspec.Raw(msgspec.json.encode(status)))

    async def hand_over(self) -> Answer:
        """Answer when the daemon has handed over, or at once with BUSY while it does so to another successor."""
        if self.asked.is_set():
            return Answer(error=BUSY)
        self.asked.set()
        await self.released.wait()
        return Answer(self._pid, VERSION)
