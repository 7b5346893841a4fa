"""A world of two GPUs of the device plugin, and what kubelet has after each event: only the core.

The world outside is two functions, kubelet's ledger, and who holds which group. What the daemon reads (inspections,
polls, kubelet's ledger) is answered when an event says so, with what was there when it was requested or with what is
there then: every true answer lies between the two. Numbers of inspections are compared by their order, which is all
that the core does with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import PreStartAsked
from gpuactors.core.events.host import HostChanged
from gpuactors.core.events.kubelet import LedgerEvent, LedgerUnreadable
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.step import initial_state, next_deadline
from gpuactors.core.values.cause import AS_BEFORE, MEANINGS, Cause
from gpuactors.core.values.effects import Granted, Ready, Refusal, Refused, Reply
from gpuactors.core.values.model import (
    AdvertisedDevice,
    Asking,
    DeviceId,
    GroupUse,
    Health,
    Holder,
    LedgerEntry,
    PciAddress,
    PciFunction,
    Pod,
    ResourceName,
    Token,
    device_key,
)
from tests.core import orders
from tests.core.builders import H100, SETTINGS, allocate_call, gpu, ledger_read
from tests.core.host_side import answers
from tests.core.orders import Happening, SmallWorld, WrongError, all_answered
from tests.core.other_driver import NOTHING, OthersClaim, Told, as_asked, listed, losses
from tests.core.sameness import numbers_of, of_node, ranked

SLOTS: Final = (0, 1)
ADDRESSES: Final = (PciAddress("0000:01:00.0"), PciAddress("0000:02:00.0"))
PHYSICAL: Final = PciAddress("0000:03:00.0")
"""The card that both functions are parts of, in a world of virtual functions."""

PHYSICAL_SLOT: Final = 2
"""It stands for that card among what uevents tell of."""

EXTERNAL: Final = "external process"
OTHERS: Final = ResourceName("vendor.example/gpu")
"""Another plugin's resource."""

SETTLING_S: Final = (31.0, 6.0, 6.0, 6.0)
"""How the clock jumps until everything must be settled: beyond every grace at once, then a few periods."""


class Outside(Struct, frozen=True):
    """The node without the daemon."""

    bound: tuple[bool, bool]
    """Each function is bound to vfio-pci; else the first one is bound to nothing, and the second one is not there."""
    holders: tuple[str | None, str | None] = (None, None)
    """Who has each group open: the external process, or a pod's virtual machine by the pod's name."""
    ledger: tuple[str | None, str | None] = (None, None)
    """The pod that kubelet has given each device to."""
    uevents: frozenset[int] = frozenset()
    """Functions whose uevents have not arrived yet."""
    pods: int = 0
    """How many there have been."""
    admitting: tuple[int, str] | None = None
    """The device and the pod of the Allocate that is not answered yet; kubelet admits one pod after another."""
    disputed: bool = False
    """That device could not be had for a moment since the Allocate came: it was not bound, or its group in use by
    somebody else than a pod that is gone."""
    starting: frozenset[int] = frozenset()
    """Devices whose PreStartContainer is not answered yet."""
    readable: bool = True
    """Kubelet's ledger can be read."""
    known: frozenset[str] = frozenset()
    """Pods that this daemon has read of in kubelet's ledger: of others it cannot know that they are gone."""
    shared: bool = False
    """Both functions are in the first group; the second one does not exist."""
    names: bool = True
    """A poll sees who holds a group (`--holders proc`), not only that its device is open."""
    waiting: frozenset[int] = frozenset()
    """Functions that are bound no more and that a process has open: their unbind, or unplug, waits for it."""
    silent: bool = False
    """An unbind that waits is announced by no uevent before it ends (kernel 6.1)."""
    others: tuple[str | None, str | None] = (None, None)
    """The pod that another plugin, or another driver's claim, has given each device to, by its address."""
    crowded: bool = False
    """There are other plugins."""
    older: bool = False
    """The first device was given away by a plugin that calls it by its group's number."""
    moved: bool = False
    """The first function is in another group than it was: it came back there."""
    has_driver: bool = False
    """There is another DRA driver; and kubelet is asked for List only where the daemon asks for that."""
    claim: OthersClaim | None = None
    """A claim of that driver has the first function."""
    claims: int = 0
    """How many there have been."""
    told: Told = NOTHING
    """What the daemon has been told of the claim."""
    virtual: bool = False
    """Both are virtual functions of one card, whose driver leaves SR-IOV on when it goes (pci-pf-stub). The second one
    is unplugged when SR-IOV is switched off: while that waits for its holder it is no virtual function any more."""
    has_physical_driver: bool = True
    """That card is on its host's driver."""

    @property
    def functions(self) -> tuple[PciFunction, ...]:
        """The functions in sysfs."""
        on_vfio = {self.group(s) + 1 for s in SLOTS if self.bound[s] or s in self.waiting}
        functions = tuple(
            gpu(
                ADDRESSES[s],
                group := self.group(s) + 1,
                driver="vfio-pci" if self.bound[s] else None,
                has_node=group in on_vfio,
            )
            for s in SLOTS
            if self.is_there(s)
        )
        return _virtual(self, functions) if self.virtual else functions

    def can_be_given(self, slot: int) -> bool:
        """A virtual machine could open the function if nobody has it."""
        return self.bound[slot] and (self.has_physical_driver or not self.virtual)

    def ledger_event(self, read: int, asking: Asking) -> LedgerEvent:
        """What kubelet's ledger says."""
        if not self.readable:
            return LedgerUnreadable(read, "kubelet is away")
        answer = ledger_read(read, _entries(self), listed(self.claim))
        return as_asked(answer, asking, self.claim, self.claims) if self.has_driver else answer

    def group_use(self, target: PollTarget) -> GroupUse:
        """Who holds a group."""
        holder = self.holders[target.group - 1] if target.group <= len(SLOTS) else None
        found = (_process(target.group, holder),) if holder is not None else ()
        enabled = {a: int(holder is not None and _is_open(self, a)) for a in target.functions}
        active = frozenset(a for a, count in enabled.items() if count)
        return GroupUse(target.group, enabled, active, found if self.names else None, None)

    def group(self, slot: int) -> int:
        """The IOMMU group of a function, counted from 0."""
        return 2 if self.moved and slot == 0 else 0 if self.shared else slot

    def holder(self, slot: int) -> str | None:
        """Who has the function's group open. (Nobody opens the one that a function has moved to.)"""
        return None if self.moved and slot == 0 else self.holders[self.group(slot)]

    def owners(self, slot: int) -> set[str | None]:
        """The pods that kubelet has given a device of the function's group to, if that is on the node."""
        there = [s for s in SLOTS if self.group(s) == self.group(slot) and self.is_there(s)]
        owners = {given[s] for s in there for given in (self.ledger, self.others)} - {None}
        return owners | ({"a claim"} if self.is_claimed(slot) else set())

    def is_claimed(self, slot: int) -> bool:
        """Another driver's claim has the function's group."""
        return self.claim is not None and self.claim.group == self.group(slot) + 1

    @property
    def is_vague(self) -> bool:
        """Nothing has said which function the claim has."""
        return self.claim is not None and not (self.claim.has_file or self.told.by_file)

    def is_there(self, slot: int) -> bool:
        """The function is on the node."""
        return slot == 0 or self.bound[slot] or slot in self.waiting


class Node(orders.Node[Outside], frozen=True):
    """The world, the daemon's state, and what was there when each outstanding read was requested."""

    asked: Mapping[int, Outside] = {}

    @property
    def answers(self) -> dict[int, Callable[[], Event]]:
        """The answer to each outstanding read, as it is now."""
        return answers(self.state, self.outside)

    @property
    def listed(self) -> dict[DeviceId, AdvertisedDevice]:
        """The devices in kubelet's list."""
        return {device.id: device for device in self.state.published.device_lists.get(H100, ())}

    def with_asked(self) -> Self:
        """The node with what is there now remembered for each new read."""
        wanted = self.answers.keys()
        if wanted == self.asked.keys():
            return self
        return replace(self, asked={number: self.asked.get(number, self.outside) for number in wanted})

    def noticed(self, before: Self, event: Event) -> Self:
        o = before.outside
        if o.admitting is not None and (left := before.listed.keys() - self.listed.keys()):
            raise WrongError(f"{left} left the list during a call: kubelet panics")
        gone = {d.key for d in before.listed.values()} - {d.key for d in self.listed.values()}
        for slot in sorted(o.waiting):
            if device_key(ADDRESSES[slot]) in gone:
                raise WrongError(f"device {slot} left the list although somebody has it open")
        node = self.with_(told=o.told.after(event, o.claim)).with_asked()
        read = frozenset(pod.name for pod in self.state.kubelet.ledger.entries.values())
        return node.with_(known=o.known | read)

    def replied(self, before: Self, reply: Reply) -> Self:
        o = self.outside
        match reply.answer:
            case Granted():
                assert o.admitting is not None
                slot, pod = o.admitting
                _check_grant(self, slot, reply.answer)
                return _starts(self.with_(admitting=None, ledger=_set(o.ledger, slot, pod)), slot)
            case Ready():
                slot = _slot_of(reply.token)
                if o.holder(slot) is not None:
                    raise WrongError(
                        f"device {slot} is held by {o.holder(slot)}: the virtual machine meets EBUSY"
                    )
                if not o.bound[slot]:
                    raise WrongError(f"device {slot} is not bound, and the virtual machine was let start")
                return _held_by(self.with_(starting=o.starting - {slot}), slot, o.ledger[slot])
            case Refused() if reply.token > _STARTS:
                return self.with_(starting=o.starting - {_slot_of(reply.token)})
            case Refused():
                assert o.admitting is not None
                _check_refusal(o, o.admitting[0], reply.answer)
                return self.with_(admitting=None)
            case _:
                return self


def start(outside: Outside) -> Node:
    """A daemon that has just started in that world, and has seen it."""
    return answered(Node(outside, initial_state(SETTINGS), 0.0).with_asked(), early=False)


N = TypeVar("N", bound=Node)

# --- what happens -----------------------------------------------------------------------------------------


def _set(values: tuple[object, object], slot: int, value: object) -> tuple[object, object]:
    return (value, values[1]) if slot == 0 else (values[0], value)


def _binds(slot: int, bound: bool) -> Happening[Node]:
    def enabled(node: Node) -> bool:
        o = node.outside
        return o.bound[slot] is not bound and not (bound and o.holder(slot) is not None)

    def happens(node: Node) -> Node:
        o = node.outside
        disputed = o.disputed or _is_chosen(o, slot)
        # Whoever holds a group has all of its functions open: none is bound while it is held.
        waiting = o.waiting | {slot} if o.holder(slot) is not None else o.waiting
        told = o.uevents if o.silent and slot in waiting else o.uevents | {slot}
        bounds = _set(o.bound, slot, bound)
        if slot == 0 and o.older and bound:
            node = node.with_(moved=not o.moved)
        return node.with_(bound=bounds, waiting=waiting, uevents=told, disputed=disputed)

    words = (("unbind", "bind"), ("unplug", "plug"))[slot]
    return Happening(f"{words[bound]} {slot}", enabled, happens)


def _takes(slot: int) -> Happening[Node]:
    def enabled(node: Node) -> bool:
        o = node.outside
        free = o.can_be_given(slot) and o.holder(slot) is None and not o.owners(slot)
        return free and not _is_chosen(o, slot) and not _is_elsewhere(o, slot)

    return Happening(
        f"an external process takes {slot}", enabled, lambda node: _held_by(node, slot, EXTERNAL)
    )


def _held_by(node: N, slot: int, holder: str | None) -> N:
    o = node.outside
    ended = frozenset(s for s in o.waiting if holder is None and o.group(s) == o.group(slot))
    holders = _set(o.holders, o.group(slot), holder)
    return node.with_(holders=holders, waiting=o.waiting - ended, uevents=o.uevents | ended)


def _is_chosen(outside: Outside, slot: int) -> bool:
    """Kubelet has chosen a device of the group for a pod that is about to open it: no program can protect it then."""
    return outside.admitting is not None and outside.group(outside.admitting[0]) == outside.group(slot)


def _lets_go(slot: int) -> Happening[Node]:
    """the external process, or the virtual machine of a pod that is gone."""

    def enabled(node: Node) -> bool:
        holder = node.outside.holder(slot)
        return holder is not None and holder not in node.outside.owners(slot)

    return Happening(
        f"whoever should not holds {slot} no more", enabled, lambda node: _held_by(node, slot, None)
    )


def _pod_goes(slot: int, *, forced: bool) -> Happening[Node]:
    """A pod ends, and its process with it; deleted by force, the process lives on."""

    def enabled(node: Node) -> bool:
        o = node.outside
        return o.ledger[slot] is not None and slot not in o.starting

    def happens(node: Node) -> Node:
        o = node.outside
        if not forced and o.holder(slot) == o.ledger[slot]:
            node = _held_by(node, slot, None)
        pod = o.ledger[slot]
        left = tuple(None if given == pod else given for given in o.ledger)
        older = o.older and left[0] is not None
        return node.with_(ledger=left, older=older)

    return Happening(f"the pod of {slot} {'is deleted by force' if forced else 'ends'}", enabled, happens)


def _other_takes(slot: int) -> Happening[Node]:
    """Another plugin, or a claim: kubelet compares no IDs of two resources, so it may be ours as well."""

    def enabled(node: Node) -> bool:
        return node.outside.crowded and node.outside.others[slot] is None

    def happens(node: Node) -> Node:
        o = node.outside
        disputed = o.disputed or _is_chosen(o, slot)
        return node.with_(others=_set(o.others, slot, f"other-{slot}"), disputed=disputed)

    return Happening(f"another plugin gives {slot} away", enabled, happens)


def _other_leaves(slot: int) -> Happening[Node]:
    return Happening(
        f"another plugin's pod gives {slot} back",
        lambda node: node.outside.others[slot] is not None,
        lambda node: node.with_(others=_set(node.outside.others, slot, None)),
    )


def _physical_is(*, bound: bool) -> Happening[Node]:
    def enabled(node: Node) -> bool:
        return node.outside.virtual and node.outside.has_physical_driver is not bound

    def happens(node: Node) -> Node:
        uevents = node.outside.uevents | {PHYSICAL_SLOT}
        return node.with_(has_physical_driver=bound, disputed=True, uevents=uevents)

    return Happening(f"the card is {'bound' if bound else 'unbound'}", enabled, happens)


def _virtual(outside: Outside, functions: tuple[PciFunction, ...]) -> tuple[PciFunction, ...]:
    """With the card, whose links to the functions go before an unplug waits (drivers/pci/iov.c)."""
    off = {ADDRESSES[1]} if 1 in outside.waiting else set()
    parts = [f if f.address in off else replace(f, physical=PHYSICAL) for f in functions]
    card = gpu(
        PHYSICAL,
        9,
        device="20b0",
        model="A100",
        driver="pci-pf-stub" if outside.has_physical_driver else None,
    )
    return (*parts, replace(card, has_virtual_functions=any(f.physical is not None for f in parts)))


def _driver_gives(*, has_file: bool) -> Happening[Node]:
    def enabled(node: Node) -> bool:
        o = node.outside
        is_free = o.bound[0] and o.holder(0) is None and not o.owners(0)
        return o.has_driver and o.claim is None and is_free and not _is_chosen(o, 0)

    def happens(node: Node) -> Node:
        number = node.outside.claims + 1
        # A pod that is being admitted may have been asked about since: what nobody knows the GPU of may be any.
        disputed = node.outside.disputed or not has_file
        claim = OthersClaim(number, node.outside.group(0) + 1, has_file=has_file)
        return node.with_(claim=claim, claims=number, disputed=disputed)

    words = "" if has_file else ", and no file says which"
    return Happening(f"another driver gives 0 to a claim{words}", enabled, happens)


def _claim_ends(node: Node) -> Node:
    return node.with_(claim=None, told=NOTHING)


def _pod_comes(*, last: bool) -> Happening[Node]:
    """Kubelet chooses among the devices that it has as Healthy and in nobody's hands; it may be any."""

    def choices(node: Node) -> list[int]:
        healthy = {d.key for d in node.listed.values() if d.health is Health.HEALTHY}
        return [s for s in SLOTS if device_key(ADDRESSES[s]) in healthy and node.outside.ledger[s] is None]

    def enabled(node: Node) -> bool:
        return node.outside.admitting is None and len(choices(node)) > int(last)

    def happens(node: Node) -> Node:
        slot, number = choices(node)[-1 if last else 0], node.outside.pods + 1
        o = node.outside
        disputed = o.holder(slot) not in {None, *o.known} or bool(o.owners(slot)) or not o.bound[slot]
        disputed = disputed or o.is_vague or not o.can_be_given(slot)
        node = node.with_(pods=number, admitting=(slot, f"vm-{number}"), disputed=disputed)
        return node.stepped(allocate_call(ADDRESSES[slot], token=number))

    return Happening(f"a pod comes{', and gets the last one' if last else ''}", enabled, happens)


def _uevents_arrive(node: Node) -> Node:
    for slot in sorted(node.outside.uevents):
        node = node.stepped(HostChanged((*ADDRESSES, PHYSICAL)[slot], None, "bind pci"))
    return node.with_(uevents=frozenset())


def _daemon_restarts(node: Node) -> Node:
    """Kubelet's calls fail with the old daemon: the pod that was being admitted is refused; the start is repeated."""
    outside = replace(node.outside, admitting=None, starting=frozenset(), known=frozenset(), told=NOTHING)
    return Node(outside, initial_state(SETTINGS), node.at).with_asked()


def _time_passes(node: Node) -> Node:
    """To the next thing that the daemon wants to do."""
    return node.ticked(max(node.at, next_deadline(node.state)))


def _has_asked(node: Node) -> bool:
    return bool(node.answers)


HAPPENINGS: Final = (
    *(_binds(s, bound) for s in SLOTS for bound in (True, False)),
    *(_takes(s) for s in SLOTS),
    *(_lets_go(s) for s in SLOTS),
    *(_pod_goes(s, forced=forced) for s in SLOTS for forced in (True, False)),
    _other_takes(0),
    *(_other_leaves(s) for s in SLOTS),
    *(_physical_is(bound=bound) for bound in (False, True)),
    _driver_gives(has_file=True),
    _driver_gives(has_file=False),
    *losses(lambda node: node.outside.claim, lambda node, claim: node.with_(claim=claim)),
    Happening("the claim ends", lambda n: n.outside.claim is not None, _claim_ends),
    _pod_comes(last=False),
    _pod_comes(last=True),
    Happening("uevents arrive", lambda node: bool(node.outside.uevents), _uevents_arrive),
    Happening("answers come, as when asked", _has_asked, lambda node: answered(node, early=True)),
    Happening(
        "answers come, as when asked, the last one first",
        lambda node: len(node.asked) > 1,
        lambda node: answered(node, early=True, reverse=True),
    ),
    Happening("kubelet cannot be asked", lambda n: n.outside.readable, lambda n: n.with_(readable=False)),
    Happening("answers come, as now", _has_asked, lambda node: answered(node, early=False)),
    Happening("time passes", lambda node: next_deadline(node.state) < math.inf, _time_passes),
    Happening("the daemon restarts", lambda _node: True, _daemon_restarts),
)
"""Everything that can happen, in no order."""


# --- kubelet's calls ------------------------------------------------------------


def _check_grant(node: Node, slot: int, grant: Granted) -> None:
    """What is handed out is what kubelet asked for, and no external process has it. (Where the ledger cannot be read,
    or a poll cannot name the holder, it may be the pod before, and the start waits for it.)"""
    (container,) = grant.containers
    o = node.outside
    if f"/dev/vfio/{o.group(slot) + 1}" not in container.nodes:
        raise WrongError(f"device {slot} was swapped for {container.nodes}: kubelet's ledger is a lie")
    if o.told and (o.is_claimed(slot) or o.is_vague):
        raise WrongError(f"device {slot} is handed out, and another driver's claim has it, or may have it")
    if o.holder(slot) == EXTERNAL and o.names and node.state.kubelet.ledger.problem is None:
        raise WrongError(f"device {slot} is handed out while an external process holds it")


def _check_refusal(outside: Outside, slot: int, refused: Refused) -> None:
    """A pod is turned away only from what it could not have: UnexpectedAdmissionError ends it for good."""
    others = outside.disputed or outside.owners(slot) or outside.is_vague
    late = refused.status is Refusal.UNAVAILABLE  # the files could not be read in time
    late = late or not outside.readable  # nor the ledger: what it said last decides
    late = late or (outside.moved and Cause.GROUP_CHANGED in refused.causes)  # under the call: ask again
    if outside.bound[slot] and not (others or outside.uevents or late):
        raise WrongError(f"device {slot} could be had, and is refused: {refused.reason}")


_STARTS: Final = 100
"""Tokens of PreStartContainer: this, and the device."""


def _slot_of(token: Token) -> int:
    return token - _STARTS - 1


def _starts(node: N, slot: int) -> N:
    node = node.with_(starting=node.outside.starting | {slot})
    return node.stepped(PreStartAsked(Token(_STARTS + 1 + slot), H100, (_id(node.outside, slot),)))


# --- what the daemon asks for --------------------------------------------------------------------------------


def _entries(outside: Outside) -> tuple[LedgerEntry, ...]:
    """The pods of other plugins first: List names pods in no order."""
    others = (
        LedgerEntry(OTHERS, DeviceId(ADDRESSES[s]), Pod("default", pod, ""))
        for s in SLOTS
        if (pod := outside.others[s]) is not None
    )
    ours = (
        LedgerEntry(H100, _id(outside, s), Pod("default", pod, ""))
        for s in SLOTS
        if (pod := outside.ledger[s]) is not None
    )
    return (*others, *ours)


def _id(outside: Outside, slot: int) -> DeviceId:
    """How kubelet's ledger calls a device that is given away."""
    return DeviceId("1" if outside.older and slot == 0 else ADDRESSES[slot])


def _is_open(outside: Outside, address: PciAddress) -> bool:
    """If its group is held, it is."""
    slot = ADDRESSES.index(address)
    return outside.bound[slot] or slot in outside.waiting


def _process(group: int, holder: str) -> Holder:
    if holder == EXTERNAL:
        return Holder(9000 + group, "vfio-tool", None)
    return Holder(int(holder.removeprefix("vm-")), "qemu-system-x86", f"uid-{holder}")


FIRST_ANSWER: Final[Happening[Node]] = Happening(
    "the first answer comes", _has_asked, lambda node: node.stepped(node.answers[min(node.answers)]())
)


def answered(node: Node, *, early: bool, reverse: bool = False) -> Node:
    """All that is outstanding is answered, with what was there when it was asked for, or with what is there now. What
    is asked for because of an answer is answered with what is there now."""
    for number, asked in sorted(node.asked.items(), reverse=reverse):
        answer = answers(node.state, asked if early else node.outside).get(number)
        if answer is not None:
            node = node.stepped(answer())
    return all_answered(node, (FIRST_ANSWER,))


# --- what must hold -----------------------------------------------------------------------------------------


def check_always(node: Node) -> None:
    """After every event: what kubelet has given away is listed, and counted once."""
    o = node.outside
    listed = node.listed
    for entry in (a for entries in node.state.published.device_lists.values() for a in entries):
        if MEANINGS[entry.cause].health not in (entry.health, AS_BEFORE):
            raise WrongError(f"{entry.id} is {entry.health}, and its cause is {entry.cause}")
    if not node.state.published.device_lists:
        return
    free = {device.id for device in listed.values() if device.cause is Cause.FREE}
    for slot in SLOTS if o.told else ():
        if _id(o, slot) in free and (o.is_claimed(slot) or o.is_vague):
            raise WrongError(f"device {slot} is another driver's claim's, or may be, and is offered")
    known = {device for resource, device in node.state.kubelet.ledger.entries if resource == H100}
    for slot in SLOTS:
        named = _id(o, slot) in known or not o.older
        if o.ledger[slot] is not None and named and _id(o, slot) not in listed:
            raise WrongError(f"device {slot} is given away and not listed: capacity is below allocated")
    if o.uevents or node.asked or _is_lost(node):
        return
    for slot in SLOTS:
        given = o.ledger[slot] is not None and _id(o, slot) in known
        if given and o.bound[slot] and listed[_id(o, slot)].health is not Health.HEALTHY:
            raise WrongError(f"device {slot} is allocated and Unhealthy: it is subtracted twice")


def _is_elsewhere(outside: Outside, slot: int) -> bool:
    """It is in another group than it was in when it was given away: no virtual machine can open it by that."""
    return outside.moved and slot == 0


def _is_lost(node: Node) -> bool:
    """What a group's number means cannot be known any more: no daemon that knew it is there, and the device is in
    another group."""
    o = node.outside
    return o.older and o.moved and (H100, DeviceId("1")) not in node.state.kubelet.resolved


def settled(node: Node) -> Node:
    """Nothing happens any more, and time passes; kubelet repeats the starts that were refused."""
    node = answered(_uevents_arrive(node.with_(readable=True)), early=False)
    for seconds in SETTLING_S:
        o = node.outside
        for slot in SLOTS:
            pod = o.ledger[slot]
            waits = pod is not None and o.holder(slot) != pod and slot not in o.starting and o.bound[slot]
            waits = waits and not _is_elsewhere(o, slot)
            if waits:
                node = _starts(node, slot)
        node = answered(node.ticked(node.at + seconds), early=False)
    return node


def check_settled(node: Node) -> None:
    """When it is quiet, each device is what a naive reading of the world says."""
    o = node.outside
    if o.admitting is not None:
        raise WrongError("Allocate was never answered")
    if o.claim is not None and not o.told:
        raise WrongError("another driver's claim is there, and kubelet is not asked for its list")
    if _is_lost(node):
        return
    for slot in SLOTS:
        device = node.listed.get(_id(o, slot))
        said = (str(device.health), device.cause) if device is not None else None
        given, holder = o.ledger[slot], o.holder(slot)
        if given is None and not o.bound[slot] and slot not in o.waiting:
            wanted: str | None = None
        elif slot in o.waiting and given is not None and o.silent:
            continue  # there was no uevent; the daemon scans everything every five minutes
        elif not o.bound[slot]:
            wanted = "Unhealthy"
        else:
            free = holder is None and not o.owners(slot) and not o.is_vague and o.can_be_given(slot)
            wanted = "Healthy" if given is not None or free else "Unhealthy"
        if (said[0] if said is not None else None) != wanted:
            raise WrongError(
                f"device {slot} should be {wanted or 'not listed'}, and is {said or 'not listed'}"
            )
        if wanted == "Unhealthy" and given is None and said is not None:
            _check_holder(node, slot)
            if slot in o.waiting and not o.silent and said[1] is not Cause.UNBINDING:
                raise WrongError(f"device {slot} waits to be let go, and the cause is {said[1]}")
        if given is not None and o.can_be_given(slot) and holder is None and not _is_elsewhere(o, slot):
            raise WrongError(
                f"nobody holds device {slot}, and the virtual machine of {given} was not let start"
            )


def _check_holder(node: Node, slot: int) -> None:
    """An external process is called one, and a process of a pod that is gone by that pod. Of a pod that this daemon
    never heard of it cannot know the name."""
    outside = node.outside
    holder = outside.holder(slot)
    if holder is None or outside.owners(slot) or outside.is_vague or not outside.names:
        return
    gone, strange = Cause.ORPHANED, Cause.HELD_BY_OTHER
    # Nor can it know that a process which was there before another plugin's pod was not that pod's.
    unheard_of = outside.crowded or outside.has_driver or (holder != EXTERNAL and holder not in outside.known)
    fitting = (gone, strange) if unheard_of else (strange,) if holder == EXTERNAL else (gone,)
    held = node.state.assessments[device_key(ADDRESSES[slot])].holding
    if held is None or held.reason.cause not in fitting:
        raise WrongError(f"device {slot} is held by {holder}, and said to be {held}")


# --- every order --------------------------------------------------------------------------------------------


def small_world(outside: Outside) -> SmallWorld[Node]:
    """All that can happen there."""
    return SmallWorld(start(outside), HAPPENINGS, _check, _canonical)


def _check(node: Node) -> None:
    check_always(node)
    check_settled(settled(node))


def _canonical(node: Node) -> object:
    """What makes two nodes the same for all that can follow: numbers of inspections by their order, times from now."""
    state = node.state
    ranks = ranked(numbers_of(state))
    return (
        node.outside,
        tuple((ranks[n], o) for n, o in sorted(node.asked.items())),
        of_node(state, ranks, node.at),
    )
