"""The watcher of a history inside a daemon: the steps of its registry, over the port of the flight recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gpuactors.core.devices.index import Index
from gpuactors.core.events.deviceplugin import AllocateAsked, CallAbandoned
from gpuactors.core.values.effects import Reply
from gpuactors.core.values.model import Token
from gpuactors.ports.node import Journal, Step
from tests.histories.trace import Trace
from tests.support.in_order import check_sorted


@final
class Watch:
    """Stands before one daemon's journal: the steps go into the trace as well. Implements `ports.node.Journal`.

    `cut_off` gets each Allocate that reached the daemon and was abandoned before it was answered; `on_step` gets every
    step.
    """

    def __init__(
        self,
        journal: Journal,
        trace: Trace,
        daemon: str,
        cut_off: list[str],
        on_step: Callable[[str, Step], None],
    ) -> None:
        self._journal = journal
        self._trace = trace
        self._daemon = daemon
        self._cut_off = cut_off
        self._on_step = on_step
        self._asked: dict[Token, AllocateAsked] = {}
        self._checked: Index | None = None

    def record(self, step: Step) -> None:
        """Implement `ports.node.Journal.record`. Raises AssertionError, which ends the daemon, where what follows from
        the state is not sorted."""
        if step.before.index is not self._checked:
            check_sorted(step.before.index)
            self._checked = step.before.index
        self._journal.record(step)
        self._trace.stepped(self._daemon, step)
        self._on_step(self._daemon, step)
        match step.event:
            case AllocateAsked(token):
                self._asked[token] = step.event
            case CallAbandoned(token) if token in self._asked:
                call = self._asked.pop(token)
                self._cut_off.append(f"{self._daemon} did not answer Allocate of {call.requests}")
        for effect in step.effects:
            if isinstance(effect, Reply):
                self._asked.pop(effect.token, None)

    async def run(self) -> None:
        """Implement `ports.node.Journal.run`."""
        await self._journal.run()
