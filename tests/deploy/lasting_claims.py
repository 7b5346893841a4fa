"""Claims that stay as they are, and a kubelet that goes on asking: twenty minutes of each, scraped every minute.

A film for each state of a claim, made by the core itself: what a claim does that cannot go on is not what its present
state alone says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpuactors.core.events.claims import ActFailed, CheckpointWritten
from gpuactors.core.values.claim import ActFault, ClaimName, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Refused
from gpuactors.core.values.model import Token
from gpuactors.observe.counts import Counts
from gpuactors.observe.metrics import Metrics
from tests.core.builders import A, B, gpu
from tests.core.claims.calls_core import CallsCore
from tests.core.domains import domain_core
from tests.core.domains.domain_core import BLUE, RED, DomainCore, channel, with_daemon
from tests.core.gpus import test_takeover
from tests.core.gpus.claim_core import ON_HOST, ClaimCore, allocated, core_with, name
from tests.deploy.scrapes import scrape

MINUTES: Final = 20
STEP_S: Final = 10
AGAIN_S: Final = 70.0
"""After this kubelet repeats a failed prepare."""

ONE, TWO = name("one"), name("two")
CHANNEL, OF_THE_NODE = domain_core.name("one"), domain_core.name("two")

NO_ALERT: Final = frozenset[str]()
STUCK: Final = frozenset({"GpuactorsClaimStuck"})
REFUSED: Final = frozenset({"GpuactorsRefusals"})

Shot = Mapping[str, float]
Film = Sequence[Shot]
"""What each scrape has, by series."""


class Kubelet:
    """A kubelet that prepares a claim, and again whenever that has failed for long enough; each answer is counted."""

    def __init__(self, core: CallsCore, counts: Counts) -> None:
        self.core, self.counts = core, counts
        self.asked: dict[Token, ClaimName] = {}
        self.again: dict[ClaimName, float] = {}

    def prepare(self, claim: ClaimName) -> None:
        self.asked[self.core.prepare(claim)] = claim

    def unprepare(self, claim: ClaimName) -> None:
        self.asked[self.core.unprepare(claim)] = claim

    def goes_on(self) -> None:
        for token, claim in [*self.asked.items()]:
            if (answer := self.core.answer(token)) is None:
                continue
            del self.asked[token]
            method = "NodeUnprepareResources" if isinstance(answer, Unprepared) else "NodePrepareResources"
            self.counts.called(method, 1.0, answer)
            if isinstance(answer, Refused):
                self.again[claim] = self.core.at + AGAIN_S
        for claim, at in [*self.again.items()]:
            if at <= self.core.at:
                del self.again[claim]
                self.prepare(claim)


def _nothing(kubelet: Kubelet, second: int) -> None:
    """Nothing happens by itself."""


@dataclass(frozen=True, slots=True)
class Script:
    """What happens on a node: once, half a minute after the beginning, and then every few seconds."""

    core: CallsCore
    begin: Callable[[Kubelet], None]
    goes_on: Callable[[Kubelet, int], None] = _nothing


def filmed(script: Script) -> Film:
    """Each minute of it. The time of day begins at 0, as promtool's does."""
    core, counts, began = script.core, Counts(), script.core.at
    kubelet = Kubelet(core, counts)
    metrics = Metrics("1", counts, now=lambda: core.at - began, process=False)
    shots = [scrape(metrics, core.state, core.at)]
    for second in range(STEP_S, 60 * MINUTES + 1, STEP_S):
        core.pass_time(STEP_S)
        if second == 30:
            script.begin(kubelet)
        script.goes_on(kubelet, second)
        kubelet.goes_on()
        if second % 60 == 0:
            shots.append(scrape(metrics, core.state, core.at))
    return shots


# --- claims of GPUs -----------------------------------------------------------------------------------------------


def _node(*held_back: str) -> ClaimCore:
    """A GPU on its host's driver, a pre-bound one, and a claim of each."""
    core = core_with(ON_HOST, gpu(B), one=(A,), two=(A,))
    core.held_back = {*held_back}
    return core


def _asked(*held_back: str) -> Script:
    """A prepare for which something never answers."""
    return Script(_node(*held_back), lambda kubelet: kubelet.prepare(ONE))


def quiet() -> Script:
    """Nobody asks for a claim."""
    return Script(_node(), lambda _: None)


def waiting() -> Script:
    core = _node()
    core.prepare(TWO)
    return Script(core, lambda kubelet: kubelet.prepare(ONE))


def reserved() -> Script:
    """The disk is full."""
    core = _node("checkpoint")

    def full(_: Kubelet, __: int) -> None:
        if (wanted := core.wanted.disk.checkpoint) is not None:
            core.feed(CheckpointWritten(wanted.number, core.of, failure="no space left on device"))

    return Script(core, lambda kubelet: kubelet.prepare(ONE), full)


def committing() -> Script:
    """The disk hangs when the claim's files have been written."""
    core = _node("files")

    def hangs(kubelet: Kubelet) -> None:
        kubelet.prepare(ONE)
        core.held_back |= {"checkpoint"}
        core.release("files")

    return Script(core, hangs)


def verifying() -> Script:
    """A container of a prepared claim starts again, and sysfs does not answer."""
    core = _node()
    core.prepare(ONE)
    core.held_back = {"inspection"}
    return Script(core, lambda kubelet: kubelet.prepare(ONE))


def drifted() -> Script:
    core = _node()
    core.prepare(ONE)

    def unplugged(_: Kubelet) -> None:
        core.unplugged(A)

    return Script(core, unplugged)


def taken_over() -> Script:
    """NVIDIA's driver has prepared it, and its pod runs."""
    core = test_takeover.taken_over(test_takeover.theirs(A))
    return Script(core, lambda _: None)


def stopped() -> Script:
    """The kernel refuses each bind."""
    core = _node("device")

    def refuses(_: Kubelet, __: int) -> None:
        for act in [*core.wanted.devices.values()]:
            core.feed(ActFailed(act.number, "invalid argument", ActFault.REFUSED, driver_kind=core.of))

    return Script(core, lambda kubelet: kubelet.prepare(ONE), refuses)


def releasing() -> Script:
    """Its pod has ended, and the GPU cannot be returned to its driver."""
    core = _node()
    core.prepare(ONE)
    core.held_back = {"device"}
    return Script(core, lambda kubelet: kubelet.unprepare(ONE))


def clearing() -> Script:
    """It was never prepared here, and what could be left of it cannot be removed."""
    return Script(_node("files"), lambda kubelet: kubelet.unprepare(ONE))


def prepared() -> Script:
    return Script(_node(), lambda kubelet: kubelet.prepare(ONE))


def unprepared() -> Script:
    """A claim of a pod of a minute, every two minutes."""
    core = _node()

    def comes_and_goes(kubelet: Kubelet, second: int) -> None:
        if second % 120 == 30:
            kubelet.prepare(ONE)
        if second % 120 == 90:
            kubelet.unprepare(ONE)

    return Script(core, lambda _: None, comes_and_goes)


def one_after_the_other() -> Script:
    """Each minute another claim, whose bind takes half a minute: at each scrape one is Binding."""
    core = _node()

    def next_one(kubelet: Kubelet, second: int) -> None:
        minute, of_minute = divmod(second, 60)
        if of_minute == 40:
            core.held_back = {"device"}
            core.created(allocated(name(f"job-{minute}"), A))
            kubelet.prepare(name(f"job-{minute}"))
        if of_minute == 10:
            core.release("device")
        if of_minute == 30 and minute:
            kubelet.unprepare(name(f"job-{minute - 1}"))

    return Script(core, lambda _: None, next_one)


OF_EACH_STATE: Final[Mapping[ClaimState, tuple[Callable[[], Script], frozenset[str]]]] = {
    ClaimState.FETCHING: (lambda: _asked("read"), REFUSED),
    ClaimState.WAITING: (waiting, REFUSED),
    ClaimState.RESERVED: (reserved, STUCK | REFUSED | {"GpuactorsClaimsNotServed"}),
    ClaimState.BINDING: (lambda: _asked("device"), STUCK | REFUSED),
    ClaimState.WRITING: (lambda: _asked("files"), STUCK | REFUSED),
    ClaimState.COMMITTING: (committing, STUCK | REFUSED),
    ClaimState.PREPARED: (prepared, NO_ALERT),
    ClaimState.VERIFYING: (verifying, REFUSED),
    ClaimState.DRIFTED: (drifted, STUCK),
    ClaimState.TAKEN_OVER: (taken_over, NO_ALERT),
    ClaimState.STOPPED: (stopped, STUCK | REFUSED),
    ClaimState.RELEASING: (releasing, STUCK),
    ClaimState.CLEARING: (clearing, STUCK),
    ClaimState.TOMBSTONE: (unprepared, NO_ALERT),
}
"""A claim that is in this state, at times if it cannot stay there, and the alerts that it must set off."""


# --- claims of compute domains --------------------------------------------------------------------------------------


def _asked_for_a_channel(core: DomainCore) -> Script:
    return Script(core, lambda kubelet: kubelet.prepare(CHANNEL))


def domain_not_ready() -> Script:
    """The domain's daemon does not come up on this node."""
    return _asked_for_a_channel(with_daemon(channel(CHANNEL), ready=False))


def other_domain() -> Script:
    """The node takes part in another domain."""
    core = with_daemon(channel(CHANNEL, BLUE), channel(OF_THE_NODE, RED))
    core.prepare(OF_THE_NODE)
    return _asked_for_a_channel(core)


def foreign_label() -> Script:
    core = DomainCore(channel(CHANNEL))
    core.labelled("somebody-elses")
    return _asked_for_a_channel(core)


def domain_ready() -> Script:
    return _asked_for_a_channel(with_daemon(channel(CHANNEL)))


def directory_left() -> Script:
    """A container has left mounts in the directory of an ended daemon."""
    core = with_daemon()
    core.stuck = True
    return Script(core, lambda kubelet: kubelet.unprepare(domain_core.DAEMON))


OF_DOMAINS: Final[Mapping[str, tuple[Callable[[], Script], frozenset[str]]]] = {
    "a channel of a domain whose daemon is not ready": (domain_not_ready, STUCK | REFUSED),
    "a channel of another domain than the node's": (other_domain, REFUSED),
    "a channel on a node with somebody else's label": (foreign_label, REFUSED),
    "a channel that is prepared": (domain_ready, NO_ALERT),
    "a directory that cannot be removed": (directory_left, STUCK),
}
"""Claims of compute domains that stay as they are, and the alerts that each must set off."""
