"""A world of two claims and one GPU, and what must hold after each event: only the core.

The world outside is the functions, the disk, the files, kubelet and the API server. What the daemon reads of the node
(sysfs, the groups' use, kubelet's ledger) is answered as it is at that moment when an event says so; what it asks of
the API server, of the disk and of the drivers is answered one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.claims.outputs import CheckpointWanted, FilesAct
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActDone, ActFailed
from gpuactors.core.events.host import HostChanged
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.step import initial_state, step
from gpuactors.core.values.claim import ActFault, Claim, ClaimName, ClaimsOf, ClaimUid, Target
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.effects import Effect, Granted, Reply
from gpuactors.core.values.model import (
    Asking,
    ClaimedDevice,
    DeviceId,
    GroupUse,
    Health,
    LedgerEntry,
    PciAddress,
    PciFunction,
    Pod,
    Token,
    device_key,
)
from tests.core.builders import H100, SETTINGS, allocate_call, ledger_read
from tests.core.claims.on_disk import stored
from tests.core.claims.small_world import ClaimsNode, ClaimsOutside, calls, forced_deletion
from tests.core.gpus.claim_core import (
    CLAIM_SETTINGS,
    DRIVER,
    POOL,
    allocated,
    as_bound,
    driver_after,
    name,
    on_driver,
)
from tests.core.host_side import answers
from tests.core.orders import Happening, SmallWorld, WrongError, all_answered, begun
from tests.core.other_driver import NOTHING, OthersClaim, Told, as_asked, listed, losses
from tests.core.sameness import numbers_of, of_claims, of_node, ranked, seen_early

GPU: Final = PciAddress("0000:01:00.0")
DISK: Final = PciAddress("0000:02:00.0")
"""A function of the host that may be in the GPU's group. Without ACS, say."""
CLAIMS: Final = (name("one"), name("two"))
OTHER_MODEL: Final = "20b0"
"""Another model, an A100."""

PASSING_S: Final = 61.0
"""How far the clock jumps: beyond the deadline of a call, the next try of an act, and the time between two questions
whether a claim still exists; a tombstone outlasts one jump."""


class World(Struct, frozen=True):
    """The node before the daemon's first start. All functions are in one IOMMU group; the first one is the GPU, and all
    but DISK are the GPU's."""

    functions: tuple[PciFunction, ...]
    begins: tuple[str, ...] = ()
    """What has happened before the orders begin."""
    has_other_driver: bool = False
    """Another DRA driver may give the GPU to a claim of its own; and kubelet is asked for List only where the daemon
    asks for that."""

    @property
    def is_prebound(self) -> bool:
        return self.functions[0].vfio_bound


class Outside(ClaimsOutside, frozen=True, kw_only=True):
    """The node without the daemon, its kubelet and its API server."""

    world: World
    functions: tuple[PciFunction, ...]
    admitting: Token | None = None
    """The Allocate that is not answered yet."""
    pod: bool = False
    """A pod has the GPU by the device plugin API."""
    disturbed: bool = False
    """The GPU was unplugged since an act of ours bound it, or before any."""
    had: frozenset[ClaimUid] = frozenset()
    """Claims that had the GPU before a reboot that brought another model."""
    was_unplugged: bool = False
    """The GPU was ever unplugged."""
    others: OthersClaim | None = None
    """A claim of another driver has the GPU."""
    told: Told = NOTHING
    """What the daemon has been told of that."""
    pods: int = 0
    """Pods of other drivers' claims that there have been."""

    def ledger_event(self, read: int, asking: Asking) -> LedgerRead:
        """Kubelet lists the pod, and what it has prepared for pods that it knows."""
        entries = (LedgerEntry(H100, DeviceId(GPU), Pod("default", "vm", "")),) if self.pod else ()
        ours = (
            ClaimedDevice(
                DRIVER, POOL, slice_name(device_key(GPU)), str(claim), Pod("default", claim.name, "")
            )
            for claim in CLAIMS
            if claim.uid in self.kubelet.prepared - self.deleted
        )
        answer = ledger_read(read, entries, (*ours, *listed(self.others)))
        return as_asked(answer, asking, self.others, self.pods) if self.world.has_other_driver else answer

    def group_use(self, target: PollTarget) -> GroupUse:
        """No process holds a group."""
        return GroupUse(target.group, dict.fromkeys(target.functions, 0), frozenset(), None, None)


class Node(ClaimsNode[Outside], frozen=True):
    """The world and the daemon's state."""

    of = ClaimsOf.GPUS

    @property
    def owners(self) -> set[ClaimUid]:
        """Our claims that have the GPU."""
        return {uid for uid, entry in self.entries.items() if entry.state in OWNING}

    @property
    def acts(self) -> list[DeviceAct | FilesAct]:
        """What is to be done at devices and files, in the order in which it was asked for."""
        found: list[DeviceAct | FilesAct] = [*self.orders.devices.values(), *self.orders.files.values()]
        return sorted(found, key=lambda act: act.number)

    def in_api(self, claim: ClaimName) -> Claim:
        return allocated(claim, GPU)

    def apply(self, event: Event) -> tuple[NodeState, list[Effect]]:
        return step(self.state, event, self.at)  # what is derived the device plugin's world compares

    def noticed(self, before: Self, event: Event) -> Self:
        o = self.outside
        if _is_others(o) and (taken := self.owners - before.owners):
            raise WrongError(f"another driver's claim has the GPU, and {taken} gets it")
        return self.with_(told=o.told.after(event, o.others))

    def replied(self, before: Self, reply: Reply) -> Self:
        o = self.outside
        if reply.token != o.admitting:
            return super().replied(before, reply)
        granted = isinstance(reply.answer, Granted)
        if granted:
            _check_grant(self)
        return self.with_(admitting=None, pod=o.pod or granted)

    def check_prepared(self, before: Self, uid: ClaimUid) -> None:
        super().check_prepared(before, uid)
        o = self.outside
        if uid in o.had and any(f.address == GPU and f.device == OTHER_MODEL for f in o.functions):
            raise WrongError(f"{uid} is said to be prepared, and another model is in the slot than it had")
        if uid in o.kubelet.prepared and (seen := _seen_driver(self)) != "vfio-pci":
            raise WrongError(f"{uid} is said to be prepared again, and its GPU was seen on {seen}")

    def check_step(self, before: Self) -> None:
        check_always(self)

    def asked(self, claim: ClaimName, *, prepares: bool) -> Self:
        had = self.outside.had if prepares else self.outside.had - {claim.uid}
        return ClaimsNode.asked(self.with_(had=had), claim, prepares=prepares)


def start(world: World) -> Node:
    """A daemon that has started in this world, and has seen it."""
    node = seen(_started(Outside(world=world, functions=world.functions), 0.0))
    return begun(node, HAPPENINGS, world.begins)


def _started(outside: Outside, at: float) -> Node:
    """A new daemon reads the checkpoint at once, and the node when it is seen."""
    state = initial_state(SETTINGS, claim_settings=CLAIM_SETTINGS)
    return Node(outside, state, at).loaded()


# --- what kubelet and the operator do -------------------------------------------------------------------------


def _is_offered(node: Node) -> bool:
    listed = chain.from_iterable(node.state.published.device_lists.values())
    return any(entry.key == device_key(GPU) and entry.health is Health.HEALTHY for entry in listed)


def _allocated(node: Node) -> Node:
    kubelet = node.outside.kubelet
    token = Token(kubelet.tokens + 1)
    node = node.with_(kubelet=replace(kubelet, tokens=token), admitting=token)
    return node.stepped(allocate_call(GPU, token=token))


def _unplugged(node: Node) -> Node:
    node = node.with_(functions=(), disturbed=True, was_unplugged=True)
    return node.stepped(HostChanged(GPU, None, "remove pci"))


def _plugged(group: int | None = None) -> Callable[[Node], Node]:
    """It is bound as at the node's start, and in this IOMMU group."""

    def happens(node: Node) -> Node:
        functions = node.outside.world.functions
        if group is not None:
            functions = tuple(on_driver(replace(f, iommu_group=group), f.driver) for f in functions)
        return node.with_(functions=functions).stepped(HostChanged(GPU, None, "add pci"))

    return happens


def _disk_goes_to(driver: str | None) -> Happening[Node]:
    """The host takes its disk, or leaves it."""

    def enabled(node: Node) -> bool:
        return any(f.address == DISK and f.driver != driver for f in node.outside.functions)

    words = "leaves its disk" if driver is None else "takes its disk"
    return Happening(f"the host {words}", enabled, lambda node: _with_disk_on(node, driver))


def _with_disk_on(node: Node, driver: str | None) -> Node:
    functions = tuple(on_driver(f, driver) if f.address == DISK else f for f in node.outside.functions)
    return node.with_(functions=functions).stepped(HostChanged(DISK, None, "bind pci"))


def _disk_driver(disk: PciFunction | None) -> str | None:
    return disk.driver if disk is not None else None


def _other_gets_it(*, has_file: bool) -> Happening[Node]:
    """Another driver gives nobody a GPU that somebody has; for one of ours that is about to get it, it may be first."""

    def enabled(node: Node) -> bool:
        o = node.outside
        is_free = not (o.pod or o.admitting or o.kubelet.prepared or node.owners or node.state.gpus.owed)
        return o.world.has_other_driver and o.others is None and _group(o) is not None and is_free

    def happens(node: Node) -> Node:
        group = _group(node.outside)
        assert group is not None
        number = node.outside.pods + 1
        return node.with_(others=OthersClaim(number, group, has_file=has_file), pods=number)

    words = "" if has_file else ", and no file says which"
    return Happening(f"another driver's claim gets it{words}", enabled, happens)


def _group(outside: Outside) -> int | None:
    """The GPU's IOMMU group; None if it is not there."""
    return next((f.iommu_group for f in outside.functions if f.address == GPU), None)


def _other_ends(node: Node) -> Node:
    return node.with_(others=None, told=NOTHING)


def restarted(node: Node) -> Node:
    """The daemon is killed and starts again: what is on disk counts, and kubelet's calls fail."""
    kubelet = node.outside.kubelet.failed()
    return _started(replace(node.outside, kubelet=kubelet, admitting=None, told=NOTHING), node.at)


def _rebooted(node: Node) -> Node:
    """The node reboots, and comes back with another model in the slot: the checkpoint is of an earlier boot, the CDI
    directory is empty, and kubelet prepares anew what its pods have."""
    o = node.outside
    functions = tuple(replace(f, device=OTHER_MODEL) if f.address == GPU else f for f in o.world.functions)
    models = dict(o.disk.earlier_models) if o.disk is not None else {}
    gpu = device_key(GPU)
    models |= {uid: {gpu: gpus_of(entry).gpus[0].functions[0].ids} for uid, entry in stored(o.disk).items()}
    disk = CheckpointWanted(o.disk.number, (), (), earlier_models=models) if o.disk is not None else None
    kubelet = replace(o.kubelet.failed(), prepared=frozenset())
    had = frozenset(models)
    o = replace(o, functions=functions, disk=disk, files={}, kubelet=kubelet, told=NOTHING, had=had)
    return _started(o, node.at)


def _can_reboot(node: Node) -> bool:
    o = node.outside
    return bool(o.functions) and not (o.pod or o.admitting or o.others or o.world.has_other_driver)


def _time_passes(node: Node) -> Node:
    return node.ticked(node.at + PASSING_S)


# --- what the daemon asks for -----------------------------------------------------------------------------------


def act_done(node: Node, act: DeviceAct | FilesAct) -> Node:
    """The act is carried out."""
    match act:
        case FilesAct():
            return node.files_done(act)
        case DeviceAct():
            there = {f.address: f for f in node.outside.functions}
            if act.target is Target.VFIO and _disk_driver(there.get(DISK)) is not None:
                failed = ActFailed(
                    act.number, "the host has the disk", ActFault.NOT_VIABLE, driver_kind=ClaimsOf.GPUS
                )
                return node.stepped(failed)
            if GPU not in there:
                return node.stepped(
                    ActFailed(act.number, "it is gone", ActFault.GONE, driver_kind=ClaimsOf.GPUS)
                )
            after = dict(there)
            for first in act.functions:
                known = there[first.address]
                after[first.address] = on_driver(known, driver_after(known, first, act.target))
            node = node.with_(functions=tuple(after.values()))
            if act.target is Target.VFIO:
                node = node.with_(disturbed=False)
            bound = tuple(as_bound(after[first.address]) for first in act.functions)
            return node.stepped(ActDone(act.number, bound, driver_kind=ClaimsOf.GPUS))


def _act_failed(fault: ActFault | None) -> Callable[[Node], Node]:
    """The first act fails. One that the kernel refuses may leave a device without a driver."""

    def happens(node: Node) -> Node:
        act, before = node.acts[0], node.outside.functions
        if isinstance(act, DeviceAct) and fault is ActFault.REFUSED:
            node = node.with_(functions=tuple(_unbound(f, act) for f in before))
        moved = tuple(as_bound(f) for f in node.outside.functions if f not in before)
        return node.stepped(ActFailed(act.number, "it failed", fault, moved=moved, driver_kind=ClaimsOf.GPUS))

    return happens


def _unbound(function: PciFunction, act: DeviceAct) -> PciFunction:
    first = next((f for f in act.functions if f.address == function.address), None)
    if first is None:
        return function
    stays = driver_after(function, first, act.target) == function.driver
    return function if stays else on_driver(function, None)


def _reads(node: Node) -> Iterable[Callable[[], Event]]:
    return answers(node.state, node.outside).values()


def seen(node: Node) -> Node:
    """Everything that the daemon reads of the node is answered, as it is now."""
    return all_answered(node, (FIRST_READ,))


# --- what happens -----------------------------------------------------------------------------------------------


def all_done(node: Node) -> Node:
    """Everything that the daemon asks for is done."""
    return all_answered(node, ANSWERS)


FIRST_READ: Final[Happening[Node]] = Happening(
    "the first read is answered", lambda n: any(_reads(n)), lambda n: n.stepped(next(iter(_reads(n)))())
)

ANSWERS: Final[tuple[Happening[Node], ...]] = (
    Happening("the node is seen", FIRST_READ.enabled, seen),
    Happening("the claim is read", lambda n: bool(n.orders.reads), Node.claim_read),
    Happening(
        "the checkpoint is written", lambda n: n.orders.disk.checkpoint is not None, Node.checkpoint_written
    ),
    Happening("the act is done", lambda n: bool(n.acts), lambda n: act_done(n, n.acts[0])),
)
"""What the daemon asks for is done, each by itself."""

HAPPENINGS: Final[tuple[Happening[Node], ...]] = (
    *calls(CLAIMS),
    *(forced_deletion(claim) for claim in CLAIMS),
    *ANSWERS,
    Happening("the last act is done", lambda n: len(n.acts) > 1, lambda n: act_done(n, n.acts[-1])),
    Happening("the act is refused", lambda n: bool(n.acts), _act_failed(ActFault.REFUSED)),
    Happening("the act finds the GPU in use", lambda n: bool(n.orders.devices), _act_failed(ActFault.IN_USE)),
    Happening("all that is asked for is done", lambda n: n.orders.disk.load > 0, all_done),
    Happening("the daemon restarts", lambda _: True, restarted),
    Happening(
        "the device plugin allocates it",
        lambda n: _is_offered(n) and not (n.outside.pod or n.outside.admitting),
        _allocated,
    ),
    Happening("its pod ends", lambda n: n.outside.pod, lambda n: n.with_(pod=False)),
    Happening("it is unplugged", lambda n: bool(n.outside.functions), _unplugged),
    Happening("it is plugged in", lambda n: not n.outside.functions, _plugged()),
    Happening("it is plugged in, in another group", lambda n: not n.outside.functions, _plugged(9)),
    Happening("the node reboots with another model in the slot", _can_reboot, _rebooted),
    _disk_goes_to("nvme"),
    _disk_goes_to(None),
    _other_gets_it(has_file=True),
    _other_gets_it(has_file=False),
    *losses(lambda node: node.outside.others, lambda node, claim: node.with_(others=claim)),
    Happening("the other claim ends", lambda n: n.outside.others is not None, _other_ends),
    Happening("time passes", lambda _: True, _time_passes),
)
"""Everything that can happen, in no order."""


# --- what must hold ---------------------------------------------------------------------------------------------


def check_always(node: Node) -> None:
    """After every event."""
    o, claims = node.outside, node.state.gpus.claims
    owners = [e for e in claims.entries.values() if e.state in OWNING]
    if len(owners) + o.pod > 1:
        raise WrongError(f"the GPU has several owners: {[str(e.name) for e in owners]}, pod {o.pod}")
    if owners and _is_offered(node):
        raise WrongError(f"the GPU is {owners[0].name}'s, and offered to pods")
    if o.told and _is_others(o) and _is_offered(node) and not _was_given(node):
        raise WrongError("the GPU is another driver's claim's, and offered to pods")
    there = next((f for f in o.functions if f.address == GPU), None)
    if there is not None and not o.disturbed and _is_offered(node) and not there.vfio_bound:
        raise WrongError(f"the GPU is on {there.driver}, and offered to pods")
    host_has_disk = _disk_driver(node.state.host.functions.get(DISK)) is not None
    if host_has_disk and _is_offered(node) and not _was_given(node):
        raise WrongError("the host was seen to have a disk in the group, and the GPU is offered to pods")
    if there is not None and o.world.is_prebound and not there.vfio_bound:
        raise WrongError(f"a pre-bound GPU is on {there.driver}")
    for claim in CLAIMS:
        _check_claim(node, claim)
    for act in node.acts:
        _check_act(node, act)


def _was_given(node: Node) -> bool:
    """A pod has the GPU, or had it when kubelet was last asked: it stays Healthy, and kubelet subtracts it once."""
    kubelet, of_pod = node.state.kubelet, (H100, DeviceId(GPU))
    return node.outside.pod or of_pod in kubelet.ledger.entries or of_pod in kubelet.pending_allocations


def _is_others(outside: Outside) -> bool:
    """Another driver's claim has the GPU: it has the group that the GPU was in, and no other."""
    return outside.others is not None and outside.others.group == _group(outside)


def _check_claim(node: Node, claim: ClaimName) -> None:
    uid = claim.uid
    o, entry = node.outside, node.entries.get(uid)
    kept = frozenset({ClaimState.PREPARED, ClaimState.VERIFYING})
    if o.was_unplugged:  # its files are removed, and written again when it is back
        kept = OWNING - {ClaimState.RELEASING}
    is_asked = o.kubelet.waits_for(claim, prepares=True)  # whether it goes on running is being decided
    if uid in o.kubelet.prepared - o.deleted and not is_asked and (entry is None or entry.state not in kept):
        raise WrongError(f"kubelet runs containers with {uid}, and the claim is {entry and entry.state}")
    if entry is None or entry.state is not ClaimState.PREPARED or not node.state.host.scanned:
        return
    drift = [f for f in o.functions if not (f.vfio_bound or o.disturbed or f.address == DISK)]
    if drift:
        raise WrongError(f"{drift[0].address} of the prepared claim {uid} is on {drift[0].driver}")


def _seen_driver(node: Node) -> str | None:
    """The GPU's driver, as the daemon knows it."""
    function = node.state.host.functions.get(GPU)
    return function.driver if function is not None else None


def _check_grant(node: Node) -> None:
    if node.owners or node.outside.kubelet.prepared:
        raise WrongError("a claim has the GPU, and a pod gets it")
    if node.outside.told and _is_others(node.outside):
        raise WrongError("another driver's claim has the GPU, and a pod gets it")


def _check_act(node: Node, act: DeviceAct | FilesAct) -> None:
    """Its intent is on disk, and nobody else has the device."""
    o = node.outside
    undoes = act.claim is None if isinstance(act, FilesAct) else act.target is Target.ORIGINAL_DRIVER
    clears = False
    meant = [e for e in stored(o.disk).values() if undoes == (e.state is ClaimState.RELEASING)]
    if isinstance(act, FilesAct):
        uid = node.claim_of(act)
        meant = [e for e in meant if e.name.uid == uid]
        is_nobodys = uid not in {*stored(o.disk), *o.kubelet.prepared}
        clears = undoes and (is_nobodys or node.entries[uid].state is ClaimState.DRIFTED)
    if not (meant or clears):
        raise WrongError(f"{act} is wanted, and the checkpoint on disk does not say so")
    if isinstance(act, DeviceAct) and any(f.address == DISK for f in act.functions):
        raise WrongError(f"{act} is wanted, of the host's disk")
    if isinstance(act, DeviceAct) and (o.pod or _is_others(o)):
        raise WrongError(f"{act} is wanted, and somebody else has the GPU")


def check_settled(node: Node, met: set[object]) -> None:
    """When everything is answered, and all claims are unprepared, nothing is left. `met` are the nodes of which this is
    known."""
    node = all_done(_with_disk_on(node, None)).with_(pod=False)
    _check_files(all_done(_time_passes(node)))
    if node.outside.others is not None:
        node = _other_ends(_seen_later(node))
    for claim in CLAIMS:
        node = node.asked(claim, prepares=False)
    node = all_done(node)
    key = canonical(node)
    if key in met:
        return
    met.add(key)
    for _ in range(4):
        node = all_done(_time_passes(all_done(node)))
    o, claims = node.outside, node.state.gpus.claims
    if o.kubelet.calls or claims.calls or o.admitting:
        raise WrongError(f"calls were never answered: {dict(o.kubelet.calls)}")
    if claims.entries or o.files or stored(o.disk):
        raise WrongError(f"something is left: {dict(claims.entries)}, files {o.files}, disk {stored(o.disk)}")
    if node.state.gpus.reserved or node.state.gpus.returned or claims.reads:
        raise WrongError("something is left of claims in the daemon")
    for now in o.functions:
        rightful = next(f for f in o.world.functions if f.address == now.address)
        if now.driver != rightful.driver:
            raise WrongError(f"{now.address} is on {now.driver}, and should be on {rightful.driver}")
    of_the_gpu = [f for f in o.world.functions if f.address != DISK]
    if o.functions and _is_offered(node) is not all(f.vfio_bound for f in of_the_gpu):
        raise WrongError(f"the GPU is {'' if _is_offered(node) else 'not '}offered to pods")
    again = all_done(node.with_(deleted=frozenset()).asked(CLAIMS[1], prepares=True))
    if o.functions and again.outside.kubelet.prepared != {CLAIMS[1].uid}:
        raise WrongError("the GPU cannot be claimed again")


def _seen_later(node: Node) -> Node:
    """Some time later the daemon knows of another driver's claim, whatever said so."""
    for _ in range(2):
        node = all_done(_time_passes(node))
    if not node.outside.told:
        raise WrongError("another driver's claim is listed, and kubelet is not asked for its list")
    return node


def _check_files(node: Node) -> None:
    """When everything is answered: no claim's files name another group than its GPU's, which may be anybody's. Of a
    claim that kubelet was not told to be prepared no container gets them."""
    groups = {f.iommu_group for f in node.outside.functions}
    for uid, named in node.outside.files.items():
        if uid in node.outside.kubelet.prepared and not named <= groups:
            raise WrongError(f"the files of {uid} name the groups {set(named)}, and the GPU is in {groups}")


# --- every order ------------------------------------------------------------------------------------------------


def small_world(world: World) -> SmallWorld[Node]:
    """All that can happen there."""
    settled: set[object] = set()
    return SmallWorld(start(world), HAPPENINGS, lambda node: check_settled(node, settled), canonical)


def canonical(node: Node) -> object:
    """What makes two nodes the same for all that can follow: numbers by their order, times from now."""
    state, gpus, o = node.state, node.state.gpus, node.outside
    claims = gpus.claims
    of_host = {*numbers_of(state), *(e.since for e in claims.entries.values())}
    of_host |= {r.since for r in gpus.returned.values()} | {*gpus.settled.values()}
    ranks = ranked(of_host)
    return (
        (o.functions, _disk(o), frozenset(o.files.items()), o.deleted, o.kubelet.key),
        (o.pod, o.disturbed, o.was_unplugged, o.admitting is None, o.had),
        (o.others, o.told, o.pods),
        of_node(state, ranks, node.at),
        of_claims(claims, ranks, node.at),
        tuple(seen_early(state, entry.since_at) for entry in claims.entries.values()),
        frozenset(gpus.original_drivers.items()),
        (gpus.acted, gpus.left_out, frozenset(gpus.reserved.items())),
        frozenset((a, r.claim, ranks[r.since]) for a, r in gpus.returned.items()),
        frozenset((a, ranks[n]) for a, n in gpus.settled.items()),
        frozenset((a, o.gpu, bool(o.act), o.retry_at - node.at) for a, o in gpus.owed.items()),
    )


def _disk(outside: Outside) -> object:
    if outside.disk is None:
        return None
    entries = tuple(
        (e.name.uid, e.state, gpus_of(e).gpus, frozenset(gpus_of(e).bound.items()))
        for e in outside.disk.entries
    )
    models = frozenset((uid, *of_claim.items()) for uid, of_claim in outside.disk.earlier_models.items())
    return entries, outside.disk.original_drivers, outside.disk.owed, models
