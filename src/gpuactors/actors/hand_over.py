"""The hand-over: which of two daemons on a node serves kubelet.

Theory of operation. The daemon that has the control socket serves: the one that all daemons of a node find, whatever
their state directories are. A new daemon, once it is ready, sends a request to the daemon that has it; that one ends
its plugins, releases the socket and answers; the new one takes the socket and serves. The old process stays, as a
DaemonSet would restart it, and serves again if its successor disappears. The core decides the role (`NodeState.role`);
this actor carries it out and posts the result, and can be restarted at any time.

A daemon that hung during the request has lost its socket to its successor when it continues: that counts as a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar, assert_never

import trio
from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import HandOverRequested, PredecessorGone, SuccessorLost
from gpuactors.core.state import NodeState
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.model import PciAddress, ResourceName, Role
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.ports.errors import ControlBlockedError, ControlError, ControlTakenError
from gpuactors.ports.node import Control, HeldControl

CONTROL_CHECK_S: Final = 2.0
"""The interval between two checks that the control socket is still the daemon's own, at both places (two lstat), in
seconds. It is not if the directory was cleaned, or if this daemon was taken for hanging (stopped, frozen) and a
successor serves. Well below SUCCESSOR_GONE_S: the socket is there again before a predecessor takes this daemon for
gone. Also how often a daemon that finds one that it cannot ask looks again."""

CONTROL_RETRY_S: Final = 30.0
"""The wait before the control socket is tried again if it cannot be made (disk full, read-only), in seconds."""

SUCCESSOR_CHECK_S: Final = 1.0
"""The interval between two checks of the predecessor that a process listens on the control socket, in seconds. It has
little else to do, and an upgrade ends it soon."""

SUCCESSOR_GONE_S: Final = 5.0
"""The time without a listening process after which the successor has ended, in seconds (kubelet restarts a container
after 10 s, then 20 s), and no GPU of this node is healthy until a daemon serves. Another hand-over costs some
milliseconds."""

T = TypeVar("T")


class HandOverPorts(Struct, frozen=True):
    control: Control
    state: LatestReader[NodeState]
    ready: LatestReader[bool]
    """The core's `take_over`: this daemon is ready to serve, and may ask the running one to hand over."""
    running: LatestReader[frozenset[ResourceName]]
    """The plugins whose streams and sockets may still be there."""
    inbox: trio.MemorySendChannel[Event]
    served: Callable[[], Awaitable[Mapping[ResourceName, frozenset[str]]]]
    """The resources that this node's daemons have served until now. The last one may have used other resource names,
    and pods have devices under those names."""
    vgpu_types: Callable[[], Awaitable[Mapping[PciAddress, CardTypes]]]
    """The names of vGPU types that this node's daemons have read until now."""
    dead_signs: Callable[[], Awaitable[DeadSigns]]
    """The signs of dead functions that this node's daemons have kept until now."""
    on_problem: Callable[[str], None]
    """Called with the reason why the control socket is missing at one of its places, each time the reason changes."""
    on_blocked: Callable[[str], None]
    """Called with the reason why this daemon may not serve, each time the reason changes."""


async def run(ports: HandOverPorts) -> None:
    """Run for ever."""
    ports = replace(ports, on_problem=_changes(ports.on_problem), on_blocked=_changes(ports.on_blocked))
    while True:
        try:
            match ports.state.value.daemon.role:
                case Role.TAKING_OVER:
                    await _take_over(ports)
                case Role.SERVING:
                    await _serve(ports)
                case Role.HANDED_OVER:
                    await _watch_successor(ports)
                case other:
                    assert_never(other)
        except ControlBlockedError as exc:
            ports.on_blocked(str(exc))
            await trio.sleep(CONTROL_CHECK_S)
        except ControlError as exc:
            # Kubelet is served without it; only requests over the socket fail.
            ports.on_problem(str(exc))
            await trio.sleep(CONTROL_RETRY_S)


def _changes(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap `tell` so that it is called only with a reason that differs from the last one; an empty one is none."""
    last = ""

    def told(reason: str) -> None:
        nonlocal last
        if reason and reason != last:
            tell(reason)
        last = reason

    return told


async def _take_over(ports: HandOverPorts) -> None:
    await _until(ports.ready, bool)
    # Before the request: from its answer until this daemon has registered, no GPU of the node can be allocated. Pods
    # have nothing yet of a resource that the other daemon begins to serve meanwhile.
    before = PredecessorGone("", await ports.served(), await ports.vgpu_types(), await ports.dead_signs())
    how = await ports.control.ask()
    try:
        async with ports.control.hold(ports.state) as held:
            await _begin_to_serve(ports, replace(before, how=how))
            await _attend(held, ports)
    except ControlTakenError:  # another daemon was quicker: send the request to that one
        await trio.sleep(limits.HAND_OVER_RETRY_S)
    except ControlError:
        await _begin_to_serve(ports, replace(before, how=how))
        raise


async def _begin_to_serve(ports: HandOverPorts, gone: PredecessorGone) -> None:
    await ports.inbox.send(gone)
    await _until(ports.state, lambda state: state.daemon.role is not Role.TAKING_OVER)


async def _serve(ports: HandOverPorts) -> None:
    """Get the control socket for a daemon that serves without it."""
    try:
        async with ports.control.hold(ports.state) as held:
            await _attend(held, ports)
    except ControlTakenError:
        await _end_plugins(ports)


async def _attend(held: HeldControl, ports: HandOverPorts) -> None:
    """Hold the socket until a successor has got it, or it is not ours any more."""
    while True:
        ports.on_problem(await held.complete())
        with trio.move_on_after(CONTROL_CHECK_S) as waiting:
            await held.asked()
        if not waiting.cancelled_caught:
            break
        if not held.still_ours():
            return
    await _end_plugins(ports)
    await held.give_up()


async def _end_plugins(ports: HandOverPorts) -> None:
    """End the plugins: wait until kubelet's calls are finished, the streams have ended and the sockets are removed.

    The calls first: a stream that ends while another plugin's call is finished would be missed for as long.
    """
    with trio.move_on_after(limits.DRAIN_S):
        await _until(ports.state, lambda state: not state.calls.waiting)
    await ports.inbox.send(HandOverRequested())
    # The registry withdraws the plugins in the same step, so none can begin after this.
    await _until(ports.state, lambda state: state.daemon.role is not Role.SERVING)
    await _until(ports.running, lambda names: not names)


async def _watch_successor(ports: HandOverPorts) -> None:
    gone_for_s = 0.0
    while gone_for_s < SUCCESSOR_GONE_S:
        await trio.sleep(SUCCESSOR_CHECK_S)
        gone_for_s = 0.0 if await ports.control.is_held() else gone_for_s + SUCCESSOR_CHECK_S
    await ports.inbox.send(SuccessorLost())
    await _until(ports.state, lambda state: state.daemon.role is not Role.HANDED_OVER)


async def _until(cell: LatestReader[T], condition: Callable[[T], bool]) -> None:
    while not condition(cell.value):
        await cell.receive()
