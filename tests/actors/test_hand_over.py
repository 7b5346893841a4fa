"""Who of two daemons serves: the actor with the real core and a control socket that is a value, in no real time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.actors import hand_over
from gpuactors.actors.hand_over import SUCCESSOR_CHECK_S, SUCCESSOR_GONE_S
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import HandOverRequested, PredecessorGone, SuccessorLost
from gpuactors.core.state import NodeState, with_waiting
from gpuactors.core.step import initial_state, step
from gpuactors.core.values.dead_signs import DeadSign, DeadSigns
from gpuactors.core.values.model import Call, CallKind, PciAddress, ResourceName, Role, Settings, Sign, Token
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.ports.errors import ControlError, ControlTakenError
from tests.support.patience import patient

H100 = ResourceName("nvidia.com/GH100_H100_SXM5_80GB")
SETTINGS = Settings(selectors=(), resync_interval_s=300.0, pre_start_gate=True, hand_over=True)


class Held:
    """The control socket in the actor's hands."""

    def __init__(self) -> None:
        self.ours = True
        self.request = trio.Event()
        self.answered = trio.Event()

    def still_ours(self) -> bool:
        return self.ours

    async def complete(self) -> str:
        await trio.lowlevel.checkpoint()
        return ""

    async def asked(self) -> None:
        await self.request.wait()

    async def give_up(self) -> None:
        await trio.lowlevel.checkpoint()
        self.answered.set()


class FakeControl:
    """A control socket in a directory that other daemons share."""

    def __init__(self) -> None:
        self.asks = 0
        self.answers: deque[str] = deque()
        """What asking leads to, one after the other; then `none`."""
        self.faults: deque[ControlError] = deque()
        """What making the socket raises, one after the other; then it can be made."""
        self.held: Held | None = None
        self.holds = 0
        self.others = False
        """Somebody else listens on it."""

    async def ask(self) -> str:
        await trio.lowlevel.checkpoint()
        self.asks += 1
        return self.answers.popleft() if self.answers else "none"

    @asynccontextmanager
    async def hold(self, state: LatestReader[NodeState]) -> AsyncIterator[Held]:
        await trio.lowlevel.checkpoint()
        if self.faults:
            raise self.faults.popleft()
        self.holds += 1
        self.held = Held()
        try:
            yield self.held
        finally:
            self.held = None

    async def is_held(self) -> bool:
        await trio.lowlevel.checkpoint()
        return self.others


@dataclass
class Daemon:
    """What stands around the actor: the core behind an inbox, and the cells."""

    control: FakeControl
    state: Latest[NodeState]
    ready: Latest[bool] = field(default_factory=lambda: Latest(True))
    running: Latest[frozenset[ResourceName]] = field(default_factory=lambda: Latest(frozenset()))
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    served: Mapping[ResourceName, frozenset[str]] = field(default_factory=dict)
    """What the state directory has."""
    types: Mapping[PciAddress, CardTypes] = field(default_factory=dict)
    signs: DeadSigns = field(default_factory=dict)

    async def read(self) -> Mapping[ResourceName, frozenset[str]]:
        await trio.lowlevel.checkpoint()
        return self.served

    async def read_types(self) -> Mapping[PciAddress, CardTypes]:
        await trio.lowlevel.checkpoint()
        return self.types

    async def read_signs(self) -> DeadSigns:
        await trio.lowlevel.checkpoint()
        return self.signs

    @property
    def role(self) -> Role:
        return self.state.value.daemon.role

    async def is_in(self, role: Role) -> None:
        await self.until(lambda: self.role is role)

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(patient(120)):
            while not condition():  # noqa: ASYNC110 - the condition is about many things; the clock jumps
                await trio.sleep(0.01)


@asynccontextmanager
async def daemon(control: FakeControl, *, role: Role = Role.TAKING_OVER) -> AsyncIterator[Daemon]:
    state = initial_state(SETTINGS)
    it = Daemon(
        control,
        Latest(replace(state, daemon=replace(state.daemon, role=role))),
    )
    post, inbox = trio.open_memory_channel[Event](4)

    async def core() -> None:
        async for event in inbox:
            it.events.append(event)
            state, _effects = step(it.state.value, event, trio.current_time())
            it.state.set(state)

    ports = hand_over.HandOverPorts(
        control=control,
        state=it.state.subscribe(),
        ready=it.ready.subscribe(),
        running=it.running.subscribe(),
        inbox=post,
        served=it.read,
        vgpu_types=it.read_types,
        dead_signs=it.read_signs,
        on_problem=it.problems.append,
        on_blocked=it.problems.append,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(core)
        nursery.start_soon(hand_over.run, ports)
        yield it
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_nobody_is_asked_before_we_are_ready(autojump_clock: MockClock) -> None:
    control = FakeControl()
    async with daemon(control) as it:
        it.ready.set(False)
        await trio.sleep(30)
        assert (control.asks, control.holds, it.events) == (0, 0, [])
        it.ready.set(True)
        await it.is_in(Role.SERVING)
        assert control.asks == 1
        assert control.held is not None


@pytest.mark.trio
async def test_the_log_learns_how_the_predecessor_went(autojump_clock: MockClock) -> None:
    control = FakeControl()
    control.answers.append("process 7 has handed over")
    async with daemon(control) as it:
        await it.is_in(Role.SERVING)
        assert it.events == [PredecessorGone("process 7 has handed over")]


@pytest.mark.trio
async def test_the_socket_is_ours_before_kubelet_is_served(autojump_clock: MockClock) -> None:
    """Else a third daemon would find nobody to ask."""
    control = FakeControl()
    control.faults.append(ControlTakenError("process 8 listens on it"))
    async with daemon(control) as it:
        await it.is_in(Role.SERVING)
        assert control.asks == 2
        assert it.events == [PredecessorGone("none")]
        assert it.problems == []


@pytest.mark.trio
async def test_a_successor_is_answered_when_the_last_plugin_has_ended(
    autojump_clock: MockClock,
) -> None:
    control = FakeControl()
    async with daemon(control) as it:
        await it.is_in(Role.SERVING)
        it.running.set(frozenset({H100}))
        held = control.held
        assert held is not None
        held.request.set()
        await it.is_in(Role.HANDED_OVER)
        await trio.sleep(3)
        assert not held.answered.is_set()
        assert control.held is held
        control.others = True
        it.running.set(frozenset())
        with trio.fail_after(1):
            await held.answered.wait()
        await it.until(lambda: control.held is None)
        assert it.events == [PredecessorGone("none"), HandOverRequested()]


@pytest.mark.trio
@pytest.mark.parametrize("answered_after_s", [limits.DRAIN_S / 2, math.inf])
async def test_no_stream_ends_while_a_call_may_still_be_answered(
    autojump_clock: MockClock, answered_after_s: float
) -> None:
    """The devices of a plugin that has nothing to finish would be Unhealthy while another one finishes its call."""
    control = FakeControl()
    async with daemon(control) as it:
        await it.is_in(Role.SERVING)
        call = Call(CallKind.ALLOCATE, H100, ((),), {}, 0, math.inf)
        # One that waits for an inspection: the core does not answer it at once.
        it.state.set(with_waiting(it.state.value, {Token(1): call}))
        assert control.held is not None
        began = trio.current_time()
        control.held.request.set()
        with trio.move_on_after(answered_after_s):
            await it.is_in(Role.HANDED_OVER)
        it.state.set(with_waiting(it.state.value, {}))
        await it.is_in(Role.HANDED_OVER)
        assert trio.current_time() - began == pytest.approx(min(answered_after_s, limits.DRAIN_S), abs=0.1)


@pytest.mark.trio
async def test_a_successor_that_stays_is_left_alone(autojump_clock: MockClock) -> None:
    control = FakeControl()
    control.others = True
    async with daemon(control, role=Role.HANDED_OVER) as it:
        await trio.sleep(3600)
        control.others = False
        await trio.sleep(SUCCESSOR_GONE_S - 2 * SUCCESSOR_CHECK_S)
        control.others = True  # it was only being started again
        await trio.sleep(3600)
        assert it.events == []
        assert control.holds == 0


@pytest.mark.trio
async def test_a_successor_that_has_gone_is_replaced(autojump_clock: MockClock) -> None:
    control = FakeControl()
    async with daemon(control, role=Role.HANDED_OVER) as it:
        began = trio.current_time()
        await it.is_in(Role.SERVING)
        assert trio.current_time() - began <= SUCCESSOR_GONE_S + 2 * SUCCESSOR_CHECK_S
        assert it.events == [SuccessorLost(), PredecessorGone("none")]
        assert control.held is not None


@pytest.mark.trio
async def test_who_serves_again_knows_what_its_successor_served(autojump_clock: MockClock) -> None:
    """It may have had another pci.ids: pods have GPUs by names that this daemon would not make."""
    successors = {ResourceName("nvidia.com/H100"): frozenset({"10de:2330"})}
    async with daemon(FakeControl(), role=Role.HANDED_OVER) as it:
        it.served = successors
        await it.is_in(Role.SERVING)
        assert it.state.value.published.served == successors


@pytest.mark.trio
async def test_who_serves_again_knows_which_functions_its_successor_saw_dead(
    autojump_clock: MockClock,
) -> None:
    signs = {PciAddress("0000:3b:00.0"): DeadSign(4711, Sign.SILENT)}
    async with daemon(FakeControl(), role=Role.HANDED_OVER) as it:
        it.signs = signs
        await it.is_in(Role.SERVING)
        assert it.state.value.host.dead_signs == signs


@pytest.mark.trio
async def test_it_hands_over_again_and_again(autojump_clock: MockClock) -> None:
    control = FakeControl()
    async with daemon(control) as it:
        for _ in range(3):
            await it.is_in(Role.SERVING)
            assert control.held is not None
            control.held.request.set()
            await it.is_in(Role.HANDED_OVER)
        assert it.events.count(HandOverRequested()) == 3
        assert control.asks == 3


@pytest.mark.trio
async def test_a_socket_that_was_removed_is_made_again(autojump_clock: MockClock) -> None:
    control = FakeControl()
    async with daemon(control) as it:
        await it.is_in(Role.SERVING)
        assert control.held is not None
        control.held.ours = False
        await it.until(lambda: control.holds == 2)
        await trio.sleep(60)
        assert it.role is Role.SERVING
        assert it.events == [PredecessorGone("none")]


@pytest.mark.trio
async def test_a_socket_that_another_daemon_took_counts_as_a_request(
    autojump_clock: MockClock,
) -> None:
    """We hung, were asked in vain, and live again: whoever took our place serves."""
    control = FakeControl()
    async with daemon(control) as it:
        await it.is_in(Role.SERVING)
        assert control.held is not None
        control.faults.append(ControlTakenError("process 9 listens on it"))
        control.others = True
        control.held.ours = False
        await it.is_in(Role.HANDED_OVER)
        await trio.sleep(3600)
        assert it.role is Role.HANDED_OVER
        assert control.holds == 1


@pytest.mark.trio
async def test_kubelet_is_served_without_a_control_socket(autojump_clock: MockClock) -> None:
    """A full disk must not cost the node its GPUs; it is said once, and tried again."""
    control = FakeControl()
    full = ControlError("no control socket: the file system is full")
    control.faults.extend([full] * 4)
    async with daemon(control) as it:
        await it.is_in(Role.SERVING)
        assert control.held is None
        await it.until(lambda: control.held is not None)
        assert it.problems == [str(full)]
        assert it.events == [PredecessorGone("none")]


@pytest.mark.trio
@pytest.mark.parametrize("role", list(Role))
async def test_it_can_be_restarted_in_every_role(role: Role, autojump_clock: MockClock) -> None:
    """The supervisor restarts it alone; what there is to do is read off the state."""
    control = FakeControl()
    async with daemon(control, role=role) as it:
        await it.until(lambda: control.held is not None)
        await it.is_in(Role.SERVING)
        assert (PredecessorGone("none") in it.events) is (role is not Role.SERVING)
