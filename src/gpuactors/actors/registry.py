"""The registry: owner of the node's state, and the only caller of `step`.

It takes one event after the other from the inbox and interprets what comes out without ever awaiting: standing outputs
go into latest-value cells, answers to whoever waits for them, log lines to the log. So no reader can slow it down and
no cycle of waiting channels can close.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from gpuactors.concurrency.latest import Latest
from gpuactors.concurrency.replies import Replies
from gpuactors.core.effects import Answer, Effect, Reply, Say
from gpuactors.core.events import Event, Ticked
from gpuactors.core.model import Frame, ResourceName
from gpuactors.core.registration import PluginOrder
from gpuactors.core.snapshot import LedgerWanted, LooksWanted, Outputs, PluginView, PollWanted, project
from gpuactors.core.state import NodeState
from gpuactors.core.step import next_deadline, step
from gpuactors.ports import Step


@dataclass(frozen=True, slots=True)
class PluginCells:
    """One plugin's two cells: what it streams, and what it is to do."""

    frame: Latest[Frame]
    order: Latest[PluginOrder]


@dataclass(frozen=True, slots=True)
class Cells:
    """Every standing output of the registry, made in the composition root. `plugins` is closed when the daemon is
    to stop."""

    looks: Latest[LooksWanted]
    poll: Latest[PollWanted]
    ledger: Latest[LedgerWanted]
    take_over: Latest[bool]
    plugins: Latest[Mapping[ResourceName, PluginCells]]
    state: Latest[NodeState]


async def run(
    initial: NodeState,
    inbox: trio.MemoryReceiveChannel[Event],
    cells: Cells,
    replies: Replies[Answer],
    say: Callable[[Say], None],
    record: Callable[[Step], None] | None = None,
) -> None:
    """Runs for ever. Any exception in here is a bug and ends the process: it is never restarted.

    `record` is given every step, the one that raised as well.
    """
    state = initial
    _show(project(state), cells)
    while True:
        event: Event = Ticked()
        with trio.move_on_at(next_deadline(state)):
            event = await inbox.receive()
        before, at = state, trio.current_time()
        try:
            state, effects = step(before, event, at)
            outputs = project(state)
        except Exception as exc:
            if record is not None:
                record(Step(before, event, at, failure=repr(exc)))
            raise
        if record is not None:
            record(Step(before, event, at, effects, outputs))
        cells.state.set(state)
        _show(outputs, cells)
        for effect in effects:
            _interpret(effect, replies, say)


def _interpret(effect: Effect, replies: Replies[Answer], say: Callable[[Say], None]) -> None:
    match effect:
        case Reply(token, answer):
            replies.reply(token, answer)
        case Say():
            say(effect)


def _show(outputs: Outputs, cells: Cells) -> None:
    """Puts each output into its cell; an equal value wakes nobody."""
    cells.looks.set(outputs.looks)
    cells.poll.set(outputs.poll)
    cells.ledger.set(outputs.ledger)
    cells.take_over.set(outputs.take_over)
    if cells.plugins.is_closed:
        return
    if outputs.stopping:
        cells.plugins.close()
        return
    known = cells.plugins.value
    if known.keys() != outputs.plugins.keys():
        cells.plugins.set({r: known.get(r) or _new_cells(v) for r, v in outputs.plugins.items()})
    for resource, view in outputs.plugins.items():
        plugin = cells.plugins.value[resource]
        plugin.frame.set(view.frame)
        plugin.order.set(view.order)


def _new_cells(view: PluginView) -> PluginCells:
    return PluginCells(Latest(view.frame), Latest(view.order))
