"""The conditions after every step, and when the node is quiet again. The one oracle of the histories, and a naive one.

It compares kubelet's view with what `truth.py` reads in the fake node; neither knows how the daemon decides. Safety is
checked after each step and after the wait that follows it, liveness when everything has stopped moving: within a bound
of simulated time kubelet's view must agree with the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.core.host.inspections import SCAN_BACKOFF_S, UNSETTLED_INSPECTIONS_S
from gpuactors.core.values.cause import Cause
from gpuactors.ports.node import Step
from gpuactors.replay.play import Played, Resumed, play
from gpuactors.replay.reading import Damage, files_to_read
from gpuactors_simulation.kubelet.values import KubeletView, LedgerEntry, Phase
from tests.histories import vgpus
from tests.histories.answers import Answers
from tests.histories.claim_check import ClaimRules
from tests.histories.domain_check import DomainRules
from tests.histories.dra_check import Problem, Rules, all_run, nothing_is_left
from tests.histories.fabric import Fabric
from tests.histories.other_plugin_events import SECOND_PLUGIN
from tests.histories.refusals import CUTS_CALLS_OFF, UNREAD, failed_for_nothing
from tests.histories.sets import LET_GO
from tests.histories.truth import (
    ANY,
    HEALTHY,
    NOT_OFFERED,
    UNHEALTHY,
    Lists,
    agree,
    expected,
    given_by_us,
    is_selected,
)
from tests.histories.world import RESYNC_S, World, states_of
from tests.memory.faults import Fault

SETTLE_S: Final = 90.0
"""Every wait that may lie between an event and kubelet's right view, added up: the longest backoffs, the last
repetition of an inspection (30 s), PreStartContainer's wait and kubelet's retry after it (40 s). Far shorter than the
resync
interval."""

AWAY_S: Final = 40.0
"""The API server stays away at least so long: longer than the daemon waits for a young kubelet to list its pods."""

CHECK_EVERY_S: Final = 1.0
CALM_S: Final = 6.0
"""Kubelet's view must stay right for so long: longer than every period of a read or a poll."""

DYING_S: Final = 10.0
"""Machines of pods that were deleted by force end as late as this."""

LONG_CALM_S: Final = 40.0
"""The period of the slowest repetition, an inspection of what cannot be read (30 s), and some."""


class ViolationError(AssertionError):
    """A condition does not hold."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check: Final = check
        """The name of what was broken, the same for every history that breaks it."""
        self.text: Final = text


# --- the naive reading ------------------------------------------------------------------------------------


def lists_of(world: World) -> Lists:
    """Kubelet's last lists of our resources; an empty list is as good as none."""
    lists: Lists = {}
    for row in world.kubelet.view.devices:
        if row.health != "not listed" and world.is_ours(row.resource):
            lists.setdefault(row.resource, {})[row.id] = row.health
    return lists


def _is_fading(resource: str, view: KubeletView) -> bool:
    """Its plugin is gone for good, and kubelet counts its devices as Unhealthy until 300 s are over: a resource whose
    last card went while no daemon ran is not served."""
    rows = [row for row in view.devices if row.resource == resource]
    return resource not in view.connected and all(row.health != "Healthy" for row in rows)


def _is_anothers(world: World, resource: str) -> bool:
    """A second plugin took it, and since pci.ids was renewed no daemon of gpuactors serves it: what kubelet has of it
    is that plugin's, and stays if it was another one that kubelet disconnected when it left."""
    serving = states_of(daemon for daemon in world.serving if daemon.is_serving)
    return world.counts[SECOND_PLUGIN[0]] > 0 and not any(
        resource in state.published.device_lists for state in serving
    )


def _is_hidden(world: World, listed: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """A second plugin is there, and lists the same healthy devices: PodResources lists only healthy devices, so it
    cannot be known that kubelet's list is not ours, and lacks our Unhealthy ones."""
    return world.second is not None and _healthy(listed) == _healthy(wanted)


def _was_hidden(world: World, resource: str, listed: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Kubelet's list was that of a second plugin, could not be told from ours, and is lost; our next list is the whole
    list. So it is right, and nothing shows that kubelet has no plugin to call."""
    return resource in world.hidden and agree(dict(listed), dict(wanted))


def _healthy(devices: Mapping[str, str]) -> set[str]:
    return {device for device, health in devices.items() if health == HEALTHY}


def _is_unseen(world: World, devices: Mapping[str, str]) -> bool:
    """A monitor dials first and no device of the resource is Healthy. A stream that ends may have been the monitor's,
    or kubelet's; kubelet's list has no healthy device either way, and its ledger does not show plugins. A device that
    turns Healthy is missing in kubelet's list then: the resource is registered again before a pod can have the device.
    """
    return bool(world.monitors) and HEALTHY not in devices.values()


def unsettled(world: World) -> list[str]:
    """The differences from the state at rest, as sentences."""
    if world.counts[SECOND_PLUGIN[0]] and world.counts["the kubelet watcher crashes"]:
        return []  # without the watcher no socket is seen to come or go, and kubelet's list may be ours by chance
    view, wanted, lists = world.kubelet.view, expected(world), lists_of(world)
    unseen = {
        r
        for r, devices in wanted.items()
        if _is_unseen(world, devices) or _was_hidden(world, r, lists.get(r, {}), devices)
    }
    # Where every card of a resource is counted under another name it need not be served: what kubelet has of it fades.
    served = {r for r, devices in wanted.items() if not {NOT_OFFERED, ANY}.issuperset(devices.values())}
    unmet = [
        f"{resource}: kubelet's list is {lists.get(resource, {})}, it should be {wanted.get(resource, {})}"
        for resource in sorted(wanted.keys() | lists.keys())
        if not agree(lists.get(resource, {}), wanted.get(resource, {}))
        and {*wanted.get(resource, {}).values()} != {ANY}
        and not _is_hidden(world, lists.get(resource, {}), wanted.get(resource, {}))
        and (resource in served or not (_is_fading(resource, view) or _is_anothers(world, resource)))
        and (resource not in unseen or resource in view.connected)
    ]
    causes = world.causes()
    unmet += [
        f"{address}: the reason should be that its unbind waits, not {world.reasons().get(address)!r}"
        for address in world.waiting()
        if any(devices.get(address, ANY) != ANY for devices in wanted.values())
        and causes.get(address) is not Cause.UNBINDING
        and not world.may_be_dead(address)
    ]
    unmet += [
        f"{address}: the cause should be that it is dead, not {causes.get(address)}"
        for address in _free_dead(world, wanted)
        if causes.get(address) is not Cause.DEAD
    ]
    unmet += [f"{r}: kubelet has lost the plugin's stream" for r in sorted(served - unseen - view.connected)]
    serving = [daemon.name for daemon in world.serving if daemon.is_serving]
    if len(serving) != 1:
        unmet.append(f"exactly one daemon should serve, but these do: {', '.join(serving) or 'none'}")
    unmet += [f"{daemon.name} is still about to take over" for daemon in world.serving if daemon.is_waiting]
    if world.egms is not None:
        for state in states_of(daemon for daemon in world.serving if daemon.is_serving):
            unmet += world.egms.wrong(state.known_sets.sets)
    if world.kata is not None:
        given = (g for g in given_by_us(world) if g.card is not None and world.is_bound(g.card))
        names = {f"{g.resource}={g.device}" for g in given}
        healthy = {f"{r}={i}" for r, devices in lists.items() for i in _healthy(devices)}
        unmet += world.kata.wrong(names | healthy)
    return unmet + _figures(world, wanted, lists) + _pods(world)


def _free_dead(world: World, wanted: Lists) -> list[str]:
    """The dead cards that are listed, and that no pod has."""
    listed = {card for devices in wanted.values() for card, health in devices.items() if health == UNHEALTHY}
    return sorted(card for card in listed - {g.device for g in given_by_us(world)} if world.is_dead(card))


def _figures(world: World, wanted: Lists, lists: Lists) -> list[str]:
    """The scheduler's arithmetic: free is what a new pod could really open, less what was really lost."""
    unmet = []
    given = _given(world)
    for resource, figures in world.kubelet.view.resources.items():
        devices = wanted.get(resource, {})
        if not world.is_ours(resource) or ANY in devices.values():
            continue
        if resource not in wanted and _is_anothers(world, resource):
            continue
        healthy = _healthy(devices)
        free = len(healthy - given[resource]) - len(given[resource] - healthy)
        unlisted = figures.allocated - len(given[resource])  # kubelet has lost its own ledger
        if figures.free != free - unlisted:
            unmet.append(f"{resource}: free is {figures.free}, should be {free - unlisted} ({figures})")
        if figures.capacity < len(given[resource]) and not _is_hidden(
            world, lists.get(resource, {}), devices
        ):
            unmet.append(f"{resource}: capacity is {figures.capacity}, allocated {sorted(given[resource])}")
    return unmet


def _pods(world: World) -> list[str]:
    view = world.kubelet.view
    unmet = []
    for pod in view.pods.values():
        if not pod.requests or not world.is_ours(pod.requests[0][0]):
            continue
        resource, size = pod.requests[0]
        free = view.resources[resource].free
        if pod.phase in (Phase.ADMITTING, Phase.TERMINATING):
            unmet.append(f"pod {pod.name} is still {pod.phase}")
        if pod.phase is Phase.PENDING and size <= free:
            unmet.append(f"pod {pod.name} is Pending although {free} of {resource} are free")
        if pod.phase is Phase.STARTING and (holding := view.holdings.get((pod.name, resource))):
            blocked = [d for d in holding.devices if not _can_start_on(world, d, resource, holding)]
            if not blocked:
                unmet.append(f"pod {pod.name} does not start although its cards are free: {pod.message}")
    return unmet


def _can_start_on(world: World, device: str, resource: str, holding: LedgerEntry) -> bool:
    """The card is there, as it was when it was allocated, its group opens, and every node that the container gets is
    still one of its cards' groups: the runtime makes no container with a node that went with another GPU of the
    group."""
    address = world.meaning(resource, device)
    if address is None or not world.is_bound(address):
        return False
    group = world.group_of(address)
    assert group is not None
    cards = (world.meaning(resource, other) for other in holding.devices)
    nodes = _nodes(world, holding)
    return (
        world.model_of(resource) == world.model(address)
        and f"/dev/vfio/{group}" in nodes
        and world.nodes_of(cards).issuperset(nodes)
        and world.is_viable(group)
        and world.tree.holder_of(group) is None
        and not world.may_be_dead(address)
    )


def _nodes(world: World, holding: LedgerEntry) -> Sequence[str]:
    """The device nodes of a container's cards; none if the runtime does not find all of its CDI names."""
    if world.kata is None:
        return [node for node in holding.nodes if not node.startswith("/dev/egm")]
    try:
        return [*holding.nodes, *world.kata.runtime(holding.cdi_ids)]
    except LookupError:
        return []


def _given(world: World) -> dict[str, set[str]]:
    given: dict[str, set[str]] = {name: set() for name in world.kubelet.view.resources}
    for g in given_by_us(world):
        given[g.resource].add(g.device)
    return given


# --- safety -----------------------------------------------------------------------------------------------


@final
class Safety:
    """The conditions at every moment; keeps the view of the moment before."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = world.kubelet.view
        self._answers = Answers(world)
        self.rules = _rules_of(world)
        """Of the claims; None where none are served."""
        world.on_step = self._stepped
        self._calm = 0
        """The number of registrations at the last moment at which nothing could move without time passing."""

    def _stepped(self, daemon: str, step: Step) -> None:
        self._answers.stepped(daemon, step)
        if (sets := self._world.sets) is not None:
            sets.stepped(daemon, step, self._is_known_free)
        if (fabric := self._world.fabric) is not None:
            fabric.stepped(daemon, step, self._cards_of)
        if (deaths := self._world.deaths) is not None:
            deaths.stepped(daemon, step, self._cards_of)
        if self.rules is not None:
            self.rules.stepped(daemon, step)

    def _cards_of(self, uid: str) -> Iterable[str]:
        return self._world.claims.given.get(uid, ()) if self._world.claims is not None else ()

    def _is_known_free(self, card: str) -> bool:
        """It is free, and no poll may still have its last holder."""
        return self._answers.is_free(card) and not any(kind in self._world.counts for kind in LET_GO)

    def check(self, *, time_passed: bool) -> None:
        """Raises `ViolationError`. More must hold after time has passed: what needs no time is done then."""
        world, view = self._world, self._world.kubelet.view
        world.note_resolved()
        if world.second is not None:
            lists, wanted = lists_of(world), expected(world)
            hidden = (r for r in lists if _is_hidden(world, lists[r], wanted.get(r, {})))
            world.hidden.update(hidden)
        second = any(kind in world.counts for kind in SECOND_PLUGIN)
        if world.kubelet.panics and second:
            # Kubelet's list cannot be kept as it is while another plugin sends its own.
            world.kubelet.panics.clear()
            world.kubelet_runs = False
            self._before = world.kubelet.view
            return
        if world.kubelet.panics:
            raise ViolationError(
                "kubelet crashed", f"a device vanished during a call: {world.kubelet.panics[0]}"
            )
        if self.rules is not None:
            _raise(self.rules.problem())
        # Without the gate a container starts as kubelet made it; a second plugin is called in our place, and has none.
        ungated = second or ("the node reboots" in world.counts and not world.can_tell_stale_nodes)
        doubles = [d for d in world.kubelet.double_handouts if not _is_unseen_use(world, d.devices)]
        ungated |= world.kata is not None and world.kata.has_misled
        if doubles and not ungated:
            blind = "; a poll was blind" if "polls can read nothing" in world.counts else ""
            raise ViolationError("handed out twice", f"pod {doubles[0].pod} met {doubles[0].message}{blind}")
        if world.problems:
            raise ViolationError("the daemon misbehaved", world.problems[0])
        self._answers.inspect()
        if world.kata is not None:
            world.kata.look()
        parts = (world.sets, world.fabric, world.deaths, world.kata, world.egms)
        of_parts = (problem for part in parts if part is not None for problem in part.problems)
        for problem in (*self._answers.problems, *of_parts):
            raise ViolationError(*problem)
        _check_swap(world)
        _check_owner(world)
        _check_failed(world, self._answers)
        if not second:
            self._check_listed(view)
            if time_passed:
                self._check_figures(view)
        self._before = view

    def _is_left_out(self, device: str) -> bool:
        """The configuration file that the daemon follows does not choose it any more."""
        spec = self._world.tree.functions.get(device)
        return self._world.config is not None and spec is not None and not is_selected(self._world, spec)

    def _check_listed(self, view: KubeletView) -> None:
        """A device that a pod has never leaves the list during one registration, nor one whose unbind waits for the
        process that has it open."""
        before = self._before
        if not view.running or view.registrations != before.registrations:
            return
        if self._world.ends_pods_of_file():
            return
        listed = {(row.resource, row.id) for row in before.devices if row.health != "not listed"}
        had = {(row.resource, row.id) for row in before.devices if row.pod is not None}
        for row in view.devices:
            key = (row.resource, row.id)
            if self._world.counts["the ledger file is damaged"] and not self._is_known(*key):
                continue
            if row.health == "not listed" and key in listed & had and row.resource in view.connected:
                knows = "knows this" if self._is_known(*key) else "knows this only from its own Allocate"
                raise ViolationError(
                    "a list shrank", f"{row.id} left the list while pod {row.pod} has it; the daemon {knows}"
                )
        still = {(row.resource, row.id) for row in view.devices if row.health != "not listed"}
        for resource, device in sorted(listed - still):
            if self._is_listed(device):
                continue  # its pod has ended, or is read to have it by an older ID: it is listed by that now
            if self._is_left_out(device):
                continue
            if device in self._world.waiting() and resource in view.connected:
                raise ViolationError(
                    "a list shrank", f"{device} left the list while its unbind waits for its holder"
                )

    def _is_listed(self, device: str) -> bool:
        """A daemon lists it, by any name and ID: kubelet may not have that list in this moment."""
        return any(
            device in (a.id, a.key)
            for state in states_of(self._world.daemons)
            for device_list in state.published.device_lists.values()
            for a in device_list
        )

    def _is_known(self, resource: str, device: str) -> bool:
        """A daemon has read this allocation in kubelet's ledger."""
        return any(
            (resource, device) in state.kubelet.ledger.entries for state in states_of(self._world.daemons)
        )

    def _check_figures(self, view: KubeletView) -> None:
        """Free is not negative beyond what was really lost, and capacity is never below what was allocated, from the
        first list of a plugin on."""
        calm, self._calm = self._calm, view.registrations
        if not view.running or calm != view.registrations or _is_blind(self._world):
            return
        if self._world.ends_pods_of_file():
            return
        given = _given(self._world)
        for resource in filter(self._world.is_ours, sorted(view.connected)):
            figures = view.resources[resource]
            whole = given[resource] - self._world.disturbed
            lost = len(given[resource]) - len(whole)
            unlisted = figures.allocated - len(given[resource])
            if figures.free < -lost - max(0, unlisted):
                raise ViolationError("free is negative", f"{resource}: {figures}, really lost {lost}")
            if figures.capacity < len(whole):
                raise ViolationError(
                    "capacity below allocated", f"{resource}: {figures}, given away {sorted(whole)}"
                )


def _rules_of(world: World) -> Rules | None:
    if world.claims is not None:
        return ClaimRules(world, world.claims)
    return DomainRules(world, world.domains) if world.domains is not None else None


def _is_blind(world: World) -> bool:
    """The daemon that serves selects other cards than the one before it, or names them otherwise, and could never read
    kubelet's ledger: it cannot know what else the pods have that were there before it."""
    changed = ("the next daemon selects other cards", "the next daemon has another pci.ids")
    serving = states_of(daemon for daemon in world.serving if daemon.is_serving)
    return any(world.counts[kind] for kind in changed) and any(
        state.kubelet.ledger.read == 0 for state in serving
    )


def _is_unseen_use(world: World, devices: Iterable[str], resources: Iterable[str] = ()) -> bool:
    """The use of a mediated device, which sysfs does not show: a daemon that does not read the processes knows it from
    kubelet alone, and a pod may have ended before its machine."""
    is_mediated = any(map(vgpus.is_uuid, devices)) or not set(resources).isdisjoint(vgpus.MDEV_RESOURCES)
    return world.holders != "proc" and is_mediated


def _check_swap(world: World) -> None:
    """The devices that the containers really got are those of kubelet's ledger."""
    for (pod, resource), entry in world.kubelet.view.holdings.items():
        if not world.is_ours(resource) or not entry.response:
            continue  # another plugin's
        if world.kata is not None:
            continue  # `Kata` has seen the answer
        mediated = "MDEV_" if resource in vgpus.MDEV_RESOURCES else ""
        name = f"{mediated}PCI_RESOURCE_{resource.upper().replace('/', '_').replace('.', '_')}"
        got = entry.envs.get(name, "").split(",")
        by_address = {device for device in entry.devices if world.meaning(resource, device) == device}
        if not by_address.issubset(got) or len(got) != len(entry.devices):
            raise ViolationError(
                "swapped", f"pod {pod} got {got} and {entry.nodes}, kubelet's ledger has {entry.devices}"
            )


def _check_failed(world: World, answers: Answers) -> None:
    clients = ("another client abandons an Allocate", "another client allocates nonsense")
    if world.cut_off and not any(kind in world.counts for kind in (*CUTS_CALLS_OFF, *clients)):
        raise ViolationError("a call in flight was cut off", world.cut_off[0])
    for pod in world.kubelet.view.pods.values():
        if pod.phase is not Phase.FAILED:
            continue
        refused = answers.refusal_of(pod)
        has_sets = world.sets is not None or world.fabric is not None
        if has_sets and refused is not None and Cause.NOT_A_SET in refused.causes:
            continue  # `Sets` judges it
        by_older_id = any((resource, i) in world.older for resource, _ in pod.requests for i in pod.asked_for)
        if "Device or resource busy" in pod.message and _is_unseen_use(world, (), dict(pod.requests)):
            continue
        if failed_for_nothing(pod.message, refused, world.counts, by_older_id=by_older_id):
            raise ViolationError("a pod failed for nothing", f"{pod.name}: {pod.message}")


def _check_owner(world: World) -> None:
    """No two pods have one card. By two names they may: a daemon that names cards otherwise than the one before it, and
    cannot read kubelet's ledger, does not know of a pod that has none of its groups open yet. That pod's container
    waits for a plugin of the former name, so no card is opened twice."""
    counts = world.counts
    unknown = counts["the next daemon has another pci.ids"] and any(counts[kind] for kind in UNREAD)
    given = given_by_us(world)
    owners = Counter((g.resource, g.device) if unknown else g.device for g in given)
    for device, pods in owners.items():
        if pods > 1:
            raise ViolationError("two owners", f"kubelet has given {device} to {pods} pods")


# --- liveness ---------------------------------------------------------------------------------------------


async def settle(world: World, safety: Safety, *, long: bool = False) -> None:
    """Ends what only the node can end, and waits until kubelet's view is right, and stays so.

    `long` watches for longer afterwards: nothing may be sent to kubelet any more. Raises `ViolationError` if the view
    is not right within `SETTLE_S`, counted from the next full scan where a change was missed, and from the last
    inspection or scan that is to fail.
    """
    if not world.kubelet.has_api_server:
        await trio.sleep(AWAY_S)
        safety.check(time_passed=True)
    rules = safety.rules
    await make_quiet(world, rules)
    if rules is not None:
        _raise(await all_run(world, rules, partial(safety.check, time_passed=True)))
        safety.check(time_passed=True)
    silent = world.has_silent_removal() or (world.tree.waits_silently and world.waiting())
    silent = silent or (world.deaths is not None and world.deaths.any_silent)
    missed_s = RESYNC_S if world.missed or silent else 0.0
    # What could not be read is read again ever more seldom: each fault that is still to come costs one such wait.
    late = world.faults.left(Fault.INSPECTION_FAILS, Fault.INSPECTION_HANGS)
    late_s = late * (UNSETTLED_INSPECTIONS_S[-1] + limits.INSPECTION_DEADLINE_S)
    late_s += world.faults.left(Fault.SCAN_FAILS, Fault.INSPECTOR_CRASHES) * SCAN_BACKOFF_S[-1]
    await _settled(world, safety, trio.current_time() + missed_s + late_s + SETTLE_S)
    if long and rules is None:
        await _stay_calm(world, safety)
    if rules is not None:
        # Kubelet's retries of a prepare may come minutes later: it is calm when all pods are gone.
        check = partial(safety.check, time_passed=True)
        _raise(await nothing_is_left(world, rules, check, long=long))
        safety.check(time_passed=True)
    if world.fabric is not None:
        await _partitions_end(world, world.fabric, safety)
    if rules is None and world.dead_places():
        await _dead_come_back(world, safety)


async def _settled(world: World, safety: Safety, deadline: float) -> None:
    while True:
        unmet = unsettled(world)
        safety.check(time_passed=True)
        if not unmet:
            await trio.sleep(CALM_S)
            safety.check(time_passed=True)
            unmet = unsettled(world)
            if not unmet:
                break
        if trio.current_time() >= deadline:
            raise ViolationError("kubelet's view does not settle", "; ".join(unmet))
        await trio.sleep(CHECK_EVERY_S)


async def _dead_come_back(world: World, safety: Safety) -> None:
    """All is read again, also what has answered since, and nothing comes back. Then all pods go, the kernel enumerates
    every card again that may be dead, and each is offered like any other."""
    world.overflow()
    await trio.sleep(CHECK_EVERY_S)
    await _settled(world, safety, trio.current_time() + SETTLE_S)
    await _all_go(world, safety)
    for place in world.dead_places():
        world.enumerate_again(place)
    await _settled(world, safety, trio.current_time() + SETTLE_S)


async def _all_go(world: World, safety: Safety) -> None:
    """No pod and no process has a card any more."""
    for external in list(world.external):
        world.end_external(external)
    for name in list(world.kubelet.view.pods):
        world.kubelet.delete(name, dies_after_s=0.0)
    for pod in list(world.kubelet.containers):
        world.kubelet.end_process(pod.name)
    deadline = trio.current_time() + SETTLE_S
    while world.kubelet.view.pods or world.kubelet.containers:
        safety.check(time_passed=True)
        if trio.current_time() >= deadline:
            raise ViolationError("a pod does not end", ", ".join(world.kubelet.view.pods))
        await trio.sleep(CHECK_EVERY_S)


async def _partitions_end(world: World, fabric: Fabric, safety: Safety) -> None:
    """Only the partitions of owners are active; then all pods go, and none is."""
    await _none_left(lambda: fabric.left(world.owned(), world.held()), safety)
    for external in list(world.external):
        world.end_external(external)
    for name in list(world.kubelet.view.pods):
        world.kubelet.delete(name, dies_after_s=0.0)
    for pod in list(world.kubelet.containers):
        world.kubelet.end_process(pod.name)
    await _none_left(lambda: fabric.left((), ()), safety)


async def _none_left(left_now: Callable[[], list[str]], safety: Safety) -> None:
    deadline = trio.current_time() + SETTLE_S
    while left := left_now():
        safety.check(time_passed=True)
        if trio.current_time() >= deadline:
            raise ViolationError("a partition is left", "; ".join(left))
        await trio.sleep(CHECK_EVERY_S)


def _raise(problem: Problem | None) -> None:
    if problem is not None:
        raise ViolationError(*problem)


async def _stay_calm(world: World, safety: Safety) -> None:
    """Nothing happens on the node, so nothing is sent to kubelet: no list, no registration. What flaps slowly shows
    here."""
    # The ledger may be read for the first time so late, and a kubelet that has just started is not taken for complete
    # until so long after that: what only its file names is released then.
    await trio.sleep(max(DYING_S, limits.LEDGER_QUIET_S + limits.LEDGER_SETTLE_S + limits.LEDGER_S))
    before = world.kubelet.view
    await trio.sleep(LONG_CALM_S)
    safety.check(time_passed=True)
    after = world.kubelet.view
    if unmet := unsettled(world):
        raise ViolationError("kubelet's view does not stay settled", "; ".join(unmet))
    if (after.registrations, after.lists) != (before.registrations, before.lists):
        raise ViolationError(
            "the daemon does not rest",
            f"within {LONG_CALM_S:g} s in which nothing happened there were {after.lists - before.lists} lists "
            f"and {after.registrations - before.registrations} registrations",
        )


async def make_quiet(world: World, rules: Rules | None = None) -> None:
    """Repair what is broken, deliver what is late, and run both processes."""
    if world.second is not None and (world.second.is_stubborn or world.counts[SECOND_PLUGIN[0]] > 1):
        world.second.leave()  # the daemon waits longer each time: neither is to win such a fight
    world.find_api_server()
    if world.fabric is not None:
        world.fabric.end_faults()
    if world.kata is not None:
        world.kata.end_faults()
    if world.egms is not None:
        world.egms.is_unreadable = False
    if rules is not None:
        rules.end_faults()
    world.faults.end(Fault.NO_DESCRIPTORS)
    if not world.kubelet_runs:
        await world.start_kubelet()
    if not world.serving:
        await world.start_daemon()
    world.uevent_mode = None
    world.restore_attributes()
    world.deliver_late()
    while world.changing:  # noqa: ASYNC110 - a change on its way takes some hundredths of a second
        await trio.sleep(CHECK_EVERY_S)


def check_journal(world: World) -> None:
    """The daemons' journals, fed to the core again, have the same results; what is missing has a reason."""
    files, damaged = files_to_read(world.journal_directory)
    moments = [*damaged, *play(files)]
    if not any(isinstance(moment, Played) for moment in moments) and not world.journal_is_torn:
        raise ViolationError("the journal is empty", world.journal_directory)
    for moment in moments:
        match moment:
            case Damage() if not world.journal_is_torn:
                raise ViolationError("the journal is damaged", str(moment))
            case Played(differences=(_, *_)) | Resumed(differences=(_, *_)):
                raise ViolationError("a replay differs", "; ".join(moment.differences))
            case _:
                pass
