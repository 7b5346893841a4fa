"""Every order of a few events in worlds of a card and one mediated device of it (`just small-worlds`; two in `just
test`): each is given away, by the device plugin, while its driver, its type or its presence changes. Only the core.

Reads are answered when an event says so, as in `small_world.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, TypeVar

import pytest
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.devices import index, inventory
from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.events.host import FunctionInspected, HostChanged, HostScanned
from gpuactors.core.events.kubelet import LedgerEvent, LedgerUnreadable
from gpuactors.core.ledger import identity
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.step import initial_state, next_deadline
from gpuactors.core.values.cause import AS_BEFORE, MEANINGS
from gpuactors.core.values.effects import Granted, Ready, Refusal, Refused, Reply
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import (
    AdvertisedDevice,
    Asking,
    DeviceId,
    DeviceKey,
    GroupUse,
    Health,
    Holder,
    LedgerEntry,
    PciFunction,
    Pod,
    ResourceName,
    Token,
    device_key,
)
from tests.core import host_side, orders
from tests.core.builders import SETTINGS, ledger_read
from tests.core.kinds.test_mediated_device import A10_12Q, A10_24Q, PARENT, card, mdev
from tests.core.orders import Happening, SmallWorld, WrongError, all_answered, check_every_order, is_found
from tests.core.sameness import numbers_of, of_node, ranked
from tests.support.mdev_files import UUID

EXTERNAL: Final = "external process"
A10: Final = ResourceName("nvidia.com/GA102GL_A10")
TYPES: Final = {
    A10_24Q: ("NVIDIA A10-24Q", "nvidia-593"),
    A10_12Q: ("NVIDIA A10-12Q", "nvidia-592"),
}
SETTLING_S: Final = (31.0, 6.0, 6.0, 6.0)
"""The same as `small_world.SETTLING_S`."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two devices."""

    name: str
    key: DeviceKey
    group: int


CARD: Final = Side("the card", device_key(PARENT), 35)
MDEV: Final = Side("the mediated device", UUID, 70)
SIDES: Final = (CARD, MDEV)


class Given(Struct, frozen=True):
    """The pod that kubelet has given a device to, and the resource that it was a device of."""

    resource: ResourceName
    pod: str


class Outside(Struct, frozen=True):
    """The node without the daemon."""

    on_vfio: bool = False
    """The card is on vfio-pci; else on NVIDIA's driver."""
    profile: ResourceName | None = None
    """The resource of the mediated device's type; None: it is not there."""
    linked: bool = True
    """Its link `mdev_type` is there, which comes after the last uevent."""
    made: int = 0
    """How often it has been made."""
    given: tuple[Given | None, Given | None] = (None, None)
    """To whom each device was given."""
    holders: tuple[str | None, str | None] = (None, None)
    """Who has each device open: the external process, or a pod's virtual machine by the pod's name."""
    uevents: frozenset[int] = frozenset()
    """Devices whose uevents have not arrived yet."""
    pods: int = 0
    """How many there have been."""
    admitting: tuple[int, Given] | None = None
    """The device and the pod of the Allocate that is not answered yet."""
    disputed: bool = False
    """That device could not be had for a moment since the Allocate came."""
    starting: frozenset[int] = frozenset()
    """Devices whose PreStartContainer is not answered yet."""
    readable: bool = True
    """Kubelet's ledger can be read."""
    known: frozenset[str] = frozenset()
    """Pods that this daemon has read of in kubelet's ledger."""

    @property
    def functions(self) -> tuple[PciFunction, ...]:
        """The card."""
        function = card("vfio-pci" if self.on_vfio else "nvidia")
        nodes = function.nodes if self.on_vfio else ()
        return (replace(function, vfio_bound=self.on_vfio, nodes=nodes),)

    @property
    def mediated(self) -> tuple[MediatedDevice, ...]:
        """The mediated device, if it is there."""
        if self.profile is None:
            return ()
        name, type_id = TYPES[self.profile] if self.linked else ("", None)
        made = mdev(group=MDEV.group, profile=name, presence=self.made)
        return (replace(made, type_id=type_id),)

    def ledger_event(self, read: int, asking: Asking) -> LedgerEvent:
        """What kubelet's ledger says."""
        if not self.readable:
            return LedgerUnreadable(read, "kubelet is away")
        return ledger_read(
            read,
            tuple(
                LedgerEntry(given.resource, DeviceId(side.key), Pod("default", given.pod, ""))
                for side, given in zip(SIDES, self.given, strict=True)
                if given is not None
            ),
        )

    def group_use(self, target: PollTarget) -> GroupUse:
        """Who uses a group."""
        holder = next(h for s, h in zip(SIDES, self.holders, strict=True) if s.group == target.group)
        enabled = {a: int(holder is not None) for a in target.functions}
        active = frozenset(a for a, count in enabled.items() if count)
        found = (_process(target.group, holder),) if holder is not None else ()
        return GroupUse(target.group, enabled, active, found, None)

    def offered_as(self, at: int) -> ResourceName | None:
        """The resource that a virtual machine could have the device by; None if it could not open it."""
        if SIDES[at] is CARD:
            return A10 if self.on_vfio else None
        return self.profile if self.linked else None

    def is_taken(self, at: int) -> bool:
        """A pod has the card or its part. One that is not there excludes nobody."""
        return any(
            given is not None and (SIDES[other] is CARD or self.profile is not None)
            for other, given in enumerate(self.given)
            if other != at
        )

    def had_part(self, at: int) -> bool:
        """A pod is given a part of the card that is not there any more."""
        return SIDES[at] is CARD and self.given[1] is not None and self.profile is None


class Node(orders.Node[Outside], frozen=True):
    """The world and the daemon's state, and what was there when each outstanding read was requested."""

    asked: Mapping[int, Outside] = {}

    @property
    def answers(self) -> dict[int, Callable[[], Event]]:
        """The answer to each outstanding read, as it is now."""
        return _answers(self, self.outside)

    def entry(self, resource: ResourceName, at: int) -> AdvertisedDevice | None:
        """The device in a resource's list."""
        entries = self.state.published.device_lists.get(resource, ())
        return next((e for e in entries if e.key == SIDES[at].key), None)

    def with_asked(self) -> Self:
        """The node with what is there now remembered for each new read."""
        return replace(self, asked={number: self.asked.get(number, self.outside) for number in self.answers})

    def noticed(self, before: Self, event: Event) -> Self:
        if before.outside.admitting is not None:
            at, given = before.outside.admitting
            if before.entry(given.resource, at) is not None and self.entry(given.resource, at) is None:
                raise WrongError(f"{SIDES[at].name} left the list during a call: kubelet panics")
        read = frozenset(pod.name for pod in self.state.kubelet.ledger.entries.values())
        return self.with_(known=self.outside.known | read).with_asked()

    def replied(self, before: Self, reply: Reply) -> Self:
        o = self.outside
        match reply.answer:
            case Granted():
                assert o.admitting is not None
                at, given = o.admitting
                _check_grant(self, at, reply.answer)
                return _starts(self.with_(admitting=None, given=_set(o.given, at, given)), at)
            case Ready():
                at = _started(reply.token)
                if o.holders[at] is not None or o.offered_as(at) is None:
                    raise WrongError(f"the virtual machine was let start, and cannot open {SIDES[at].name}")
                given_to = o.given[at]
                assert given_to is not None
                return self.with_(starting=o.starting - {at}, holders=_set(o.holders, at, given_to.pod))
            case Refused() if reply.token > _STARTS:
                return self.with_(starting=o.starting - {_started(reply.token)})
            case Refused():
                _check_refusal(o, reply.answer)
                return self.with_(admitting=None)
            case _:
                return self


N = TypeVar("N", bound=Node)


def _answers(node: Node, outside: Outside) -> dict[int, Callable[[], Event]]:
    """Those of `host_side`, and the mediated device."""

    def whole(answer: Callable[[], Event]) -> Event:
        match event := answer():
            case HostScanned():
                return replace(event, mediated=outside.mediated)
            case FunctionInspected(address=address) if address == UUID:
                return replace(event, mediated=outside.mediated, functions=outside.functions)
            case _:
                return event

    found = host_side.answers(node.state, outside)
    return {number: partial(whole, answer) for number, answer in found.items()}


def _process(group: int, holder: str) -> Holder:
    if holder == EXTERNAL:
        return Holder(9000 + group, "vfio-tool", None)
    return Holder(int(holder.removeprefix("vm-")), "qemu-system-x86", f"uid-{holder}")


# --- what happens -----------------------------------------------------------------------------------------------------


def _set(values: tuple[object, object], at: int, value: object) -> tuple[object, object]:
    return (value, values[1]) if at == 0 else (values[0], value)


def _changed(node: Node, at: int, **changes: object) -> Node:
    """The node after the administrator has changed a device, of which a uevent is under way."""
    return node.with_(**changes, uevents=node.outside.uevents | {at}, disputed=True)


def _made(resource: ResourceName) -> Happening[Node]:
    return Happening(
        f"a mediated device is made for {resource}",
        lambda node: node.outside.profile is None and not node.outside.on_vfio,
        lambda node: _changed(node, 1, profile=resource, linked=False, made=node.outside.made + 1),
    )


def _is_unheld(node: Node) -> bool:
    return node.outside.profile is not None and node.outside.holders[1] is None


def _goes_to_vfio(node: Node) -> Node:
    """NVIDIA's driver takes its mediated devices with it."""
    node = _changed(node, 1, profile=None, linked=True) if node.outside.profile is not None else node
    return _changed(node, 0, on_vfio=True)


def _takes(at: int) -> Happening[Node]:
    def enabled(node: Node) -> bool:
        o = node.outside
        is_free = o.holders[at] is None and o.given[at] is None and o.offered_as(at) is not None
        return is_free and (o.admitting is None or o.admitting[0] != at)

    return Happening(
        f"an external process takes {SIDES[at].name}",
        enabled,
        lambda node: node.with_(holders=_set(node.outside.holders, at, EXTERNAL)),
    )


def _lets_go(at: int) -> Happening[Node]:
    """The external process, or a virtual machine that ends: its pod may live on."""
    return Happening(
        f"whoever has {SIDES[at].name} open lets it go",
        lambda node: node.outside.holders[at] is not None,
        lambda node: node.with_(holders=_set(node.outside.holders, at, None)),
    )


def _pod_ends(at: int) -> Happening[Node]:
    def enabled(node: Node) -> bool:
        return node.outside.given[at] is not None and at not in node.outside.starting

    def happens(node: Node) -> Node:
        o, given = node.outside, node.outside.given[at]
        assert given is not None
        holder = None if o.holders[at] == given.pod else o.holders[at]
        return node.with_(given=_set(o.given, at, None), holders=_set(o.holders, at, holder))

    return Happening(f"the pod of {SIDES[at].name} ends", enabled, happens)


def _pod_comes(at: int, resource: ResourceName) -> Happening[Node]:
    def enabled(node: Node) -> bool:
        entry, o = node.entry(resource, at), node.outside
        is_free = o.admitting is None and o.given[at] is None
        return is_free and entry is not None and entry.health is Health.HEALTHY

    def happens(node: Node) -> Node:
        o, number = node.outside, node.outside.pods + 1
        given = Given(resource, f"vm-{number}")
        disputed = o.offered_as(at) != resource or o.holders[at] is not None or o.is_taken(at)
        node = node.with_(pods=number, admitting=(at, given), disputed=disputed)
        ids = ((DeviceId(SIDES[at].key),),)
        return node.stepped(AllocateAsked(Token(number), resource, ids))

    return Happening(f"a pod comes for {resource}", enabled, happens)


def _uevents_arrive(node: Node) -> Node:
    for at in sorted(node.outside.uevents):
        event = (
            HostChanged(PARENT, None, "bind pci") if at == 0 else HostChanged(None, None, "bind mdev", UUID)
        )
        node = node.stepped(event)
    return node.with_(uevents=frozenset())


def _daemon_restarts(node: Node) -> Node:
    outside = replace(node.outside, admitting=None, starting=frozenset(), known=frozenset())
    # The file of the resources that were served is still there.
    return Node(outside, initial_state(SETTINGS, node.state.published.served), node.at).with_asked()


_FIRST_ANSWER: Final[Happening[Node]] = Happening(
    "the first answer comes",
    lambda node: bool(node.answers),
    lambda node: node.stepped(node.answers[min(node.answers)]()),
)


def _answered(node: Node, *, early: bool) -> Node:
    """All that is outstanding is answered, with what was there when it was asked for, or with what is there now."""
    for number, asked in sorted(node.asked.items()):
        if (answer := _answers(node, asked if early else node.outside).get(number)) is not None:
            node = node.stepped(answer())
    return all_answered(node, (_FIRST_ANSWER,))


HAPPENINGS: Final[tuple[Happening[Node], ...]] = (
    _made(A10_24Q),
    _made(A10_12Q),
    Happening("its type is linked", lambda n: not n.outside.linked, lambda n: n.with_(linked=True)),
    Happening(
        "the mediated device is removed", _is_unheld, lambda n: _changed(n, 1, profile=None, linked=True)
    ),
    Happening(
        "the card goes to vfio-pci",
        lambda n: not n.outside.on_vfio and n.outside.holders[1] is None,
        _goes_to_vfio,
    ),
    Happening(
        "the card goes to nvidia",
        lambda n: n.outside.on_vfio and n.outside.holders[0] is None,
        lambda n: _changed(n, 0, on_vfio=False),
    ),
    *(_takes(at) for at in (0, 1)),
    *(_lets_go(at) for at in (0, 1)),
    *(_pod_ends(at) for at in (0, 1)),
    _pod_comes(0, A10),
    _pod_comes(1, A10_24Q),
    _pod_comes(1, A10_12Q),
    Happening("uevents arrive", lambda node: bool(node.outside.uevents), _uevents_arrive),
    Happening("answers come, as when asked", lambda n: bool(n.answers), lambda n: _answered(n, early=True)),
    Happening("answers come, as now", lambda n: bool(n.answers), lambda n: _answered(n, early=False)),
    Happening("kubelet cannot be asked", lambda n: n.outside.readable, lambda n: n.with_(readable=False)),
    Happening(
        "time passes",
        lambda node: next_deadline(node.state) < math.inf,
        lambda node: node.ticked(max(node.at, next_deadline(node.state))),
    ),
    Happening("the daemon restarts", lambda _node: True, _daemon_restarts),
)
"""Everything that can happen, in no order."""

# --- kubelet's calls --------------------------------------------------------------------------------------------------

_STARTS: Final = 100
"""Tokens of PreStartContainer: this, and the device."""


def _started(token: Token) -> int:
    return token - _STARTS - 1


def _starts(node: N, at: int) -> N:
    given = node.outside.given[at]
    assert given is not None
    node = node.with_(starting=node.outside.starting | {at})
    return node.stepped(PreStartAsked(Token(_STARTS + 1 + at), given.resource, (DeviceId(SIDES[at].key),)))


def _check_grant(node: Node, at: int, grant: Granted) -> None:
    o, side = node.outside, SIDES[at]
    (container,) = grant.containers
    if container.nodes != ("/dev/vfio/vfio", f"/dev/vfio/{side.group}"):
        raise WrongError(f"{side.name} was given with {container.nodes}")
    ((variable, value),) = container.envs
    if variable.startswith("MDEV_") is not (side is MDEV) or value != side.key:
        raise WrongError(f"{side.name} was given as {variable}={value}")
    readable = node.state.kubelet.ledger.problem is None
    if readable and (o.holders[at] == EXTERNAL or o.is_taken(at)):
        raise WrongError(f"{side.name} is handed out, and somebody has it, or its card or part")


def _check_refusal(outside: Outside, refused: Refused) -> None:
    """A pod is turned away only from what it could not have."""
    assert outside.admitting is not None
    at, given = outside.admitting
    late = refused.status is Refusal.UNAVAILABLE or not outside.readable or outside.uevents
    if outside.offered_as(at) == given.resource and not (outside.disputed or late):
        raise WrongError(f"{SIDES[at].name} could be had, and is refused: {refused.reason}")


# --- what must hold ---------------------------------------------------------------------------------------------------


def _check_always(node: Node) -> None:
    o, lists = node.outside, node.state.published.device_lists
    for listed in (a for entries in lists.values() for a in entries):
        if MEANINGS[listed.cause].health not in (listed.health, AS_BEFORE):
            raise WrongError(f"{listed.id} is {listed.health}, and its cause is {listed.cause}")
    known = node.state.kubelet.ledger.entries
    for at, given in enumerate(o.given):
        if given is None or not lists or (given.resource, DeviceId(SIDES[at].key)) not in known:
            continue
        entry = node.entry(given.resource, at)
        if entry is None:
            raise WrongError(f"{SIDES[at].name} is given away and not listed: capacity is below allocated")
        is_quiet = not o.uevents and not node.asked
        if is_quiet and o.offered_as(at) == given.resource and entry.health is not Health.HEALTHY:
            raise WrongError(f"{SIDES[at].name} is allocated and Unhealthy: it is subtracted twice")


def _settled(node: Node) -> Node:
    """Nothing happens any more, and time passes; kubelet repeats the starts that were refused."""
    node = _answered(_uevents_arrive(node.with_(readable=True, linked=True)), early=False)
    for seconds in SETTLING_S:
        o = node.outside
        for at, given in enumerate(o.given):
            is_usable = given is not None and o.offered_as(at) == given.resource
            if given is not None and is_usable and o.holders[at] != given.pod and at not in o.starting:
                node = _starts(node, at)
        node = _answered(node.ticked(node.at + seconds), early=False)
    return node


def _check_settled(node: Node) -> None:
    """When it is quiet, each list says what a naive reading of the world says."""
    o = node.outside
    if o.admitting is not None:
        raise WrongError("Allocate was never answered")
    for at, side in enumerate(SIDES):
        given, offered = o.given[at], o.offered_as(at)
        for resource in (A10,) if side is CARD else (A10_24Q, A10_12Q):
            mine = given is not None and given.resource == resource
            wanted: Health | None = None
            if resource == offered:
                is_free = given is None and o.holders[at] is None and not o.is_taken(at)
                wanted = Health.HEALTHY if mine or is_free else Health.UNHEALTHY
            elif mine:
                wanted = Health.UNHEALTHY
            entry = node.entry(resource, at)
            if wanted is Health.HEALTHY and not mine and o.had_part(at):
                continue  # a daemon that saw the part withholds its card until the pod ends
            if (entry.health if entry is not None else None) != wanted:
                raise WrongError(
                    f"{side.name} should be {wanted or 'not listed'} in {resource}, and is {entry}"
                )
        if given is not None and offered == given.resource and o.holders[at] is None:
            raise WrongError(f"nobody holds {side.name}, and the virtual machine was not let start")


def _check(node: Node) -> None:
    _check_always(node)
    _check_settled(_settled(node))


def _canonical(node: Node) -> object:
    ranks = ranked(numbers_of(node.state))
    asked = tuple((ranks[n], o) for n, o in sorted(node.asked.items()))
    return (
        node.outside,
        asked,
        of_node(node.state, ranks, node.at),
        frozenset(node.state.host.mediated.items()),
    )


# --- every order ------------------------------------------------------------------------------------------------------


def world(outside: Outside) -> SmallWorld[Node]:
    """All that can happen there, after a daemon has just started and seen it."""
    start = _answered(Node(outside, initial_state(SETTINGS), 0.0).with_asked(), early=False)
    return SmallWorld(start, HAPPENINGS, _check, _canonical)


WORLDS: Final = {
    "a card that can have one": Outside(),
    "a free one": Outside(profile=A10_24Q, made=1),
    "a pod has it": Outside(
        profile=A10_24Q, made=1, given=(None, Given(A10_24Q, "vm-1")), holders=(None, "vm-1"), pods=1
    ),
    "a pod has the card": Outside(
        on_vfio=True, given=(Given(A10, "vm-1"), None), holders=("vm-1", None), pods=1
    ),
    "the machine of the pod that had the card has ended, and one was made": Outside(
        profile=A10_12Q, made=1, given=(Given(A10, "vm-1"), None), pods=1
    ),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.timeout(600)
def test_the_lists_are_right_after_every_order(name: str) -> None:
    check_every_order(world(WORLDS[name]))


def _any_type_is_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inventory, identity):
        monkeypatch.setattr(module, "may_be_of", lambda device, model: device.model in (model, ""))


def _a_card_and_its_part_have_two_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "relatives_owned", lambda *_: {})


@pytest.mark.parametrize(
    ("plant", "length"), [(_any_type_is_the_pods, 4), (_a_card_and_its_part_have_two_owners, 1)]
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(is_found(world(of), length) for of in WORLDS.values())
