"""Whether the answers to Allocate and GetPreferredAllocation were right by kubelet's ledger during the call.

A view that is old is not a fact: what was in kubelet's ledger when the call came, and is still there when it is
answered, a fresh read would have shown. So a card that another pod had all the time is not granted, and none is refused
because of an owner that was never in the ledger during the call. GetPreferredAllocation is answered from memory: what
another plugin has given away may be unknown then, but not what we have. Only the cards that kubelet offered could have
been preferred; it chooses them before it calls, so one that was released since may not be among them. KubeVirt must
find the granted devices by its own rules. Must not know how the daemon decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked
from gpuactors.core.host.asking import LIST_NAMES_S
from gpuactors.core.ledger.ledger import LIST_HELD_S
from gpuactors.core.values.effects import Granted, Preferred, Refused, Reply
from gpuactors.core.values.model import Pod, Token
from gpuactors.ports.node import Step
from gpuactors_simulation.kubelet.values import Phase
from gpuactors_simulation.kubelet.values import Pod as FailedPod
from tests.histories.refusals import UNREAD
from tests.histories.truth import claimed_cards, given_by_us, is_any_withheld, others_cards
from tests.histories.world import World
from tests.support.kubevirt import NotReadableError, host_devices

UNREADABLE: Final = "KubeVirt reads other devices"

CLAIM_SEEN_S: Final = limits.LEDGER_QUIET_S + LIST_NAMES_S + 2 * LIST_HELD_S
"""Only List shows the claim of another driver that has no file, and it is not called in an Allocate: how late it is
seen after its pod has come (docs/dev/adr/0017)."""

FRESH_S: Final = 0.1
"""A ledger as old as this is fresh enough."""

YOUNG_S: Final = 31.0
"""The list of a kubelet as young as this may lack pods, and is not believed."""


@dataclass(slots=True)
class _Asked:
    """An Allocate that is not answered yet."""

    call: AllocateAsked
    taken: set[str]
    """Its cards that others had when it came, and for long enough."""
    free: set[str]
    """Its cards in groups of which no pod had a card."""


@final
class Answers:
    """Watches the daemons of one node; each wrong answer is in `problems`, as a check's name and a text."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: dict[tuple[str, Token], _Asked] = {}
        self._seen: dict[str, float] = {}
        """Cards that others have, and since when (trio's clock). While the machine slept nobody looked."""
        self._jumps = 0
        self._refusals: dict[tuple[str, frozenset[str]], Refused] = {}
        """The last answer to an Allocate of these devices of that resource, if it was refused."""
        self._failed: dict[str, Refused | None] = {}
        """By the UID of a pod that failed: the answer to its Allocate, None if that was not refused."""
        self.problems: list[tuple[str, str]] = []

    def inspect(self) -> None:
        """Something has happened on the node."""
        now = trio.current_time()
        # A kubelet that has just started lists no pod before the API server has sent it its pods.
        named = others_cards(self._world) if self._world.kubelet.knows_pods else {}
        if (jumps := self._world.counts["the clock jumps"]) != self._jumps:
            self._jumps, self._seen = jumps, {}
        self._seen = {card: self._seen.get(card, now) for card in named}
        for asked in self._asked.values():
            asked.taken &= self._seen.keys()
            asked.free &= self._unowned(asked.call)
        for pod in self._world.kubelet.view.pods.values():
            if pod.phase is Phase.FAILED and pod.uid not in self._failed:
                call = pod.requests[0][0] if pod.requests else "", frozenset(pod.asked_for)
                refused = self._refusals.get(call)
                # Other clients make the same calls: it is this pod's if kubelet has kept the answer's own text.
                its = refused is not None and refused.reason in pod.message
                self._failed[pod.uid] = refused if its else None

    def refusal_of(self, pod: FailedPod) -> Refused | None:
        """The daemon's refusal of the Allocate of a pod that failed; None if it did not refuse that."""
        return self._failed.get(pod.uid)

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event."""
        if isinstance(step.event, AllocateAsked):
            self.inspect()
            call = step.event
            long_ago = trio.current_time() - FRESH_S
            taken = {c for c in self._cards(call) if self._seen.get(c, long_ago + 1) < long_ago}
            self._asked[daemon, call.token] = _Asked(call, taken, self._unowned(call))
        for effect in step.effects:
            if isinstance(step.event, PreferenceAsked) and isinstance(effect, Reply):
                self._preferred(step.event, effect)
            elif isinstance(effect, Reply) and (asked := self._asked.pop((daemon, effect.token), None)):
                self._note(asked.call, effect)
                self._answered(asked, effect)

    def _note(self, call: AllocateAsked, reply: Reply) -> None:
        key = call.resource, frozenset(i for request in call.requests for i in request)
        if isinstance(reply.answer, Refused):
            self._refusals[key] = reply.answer
        else:
            self._refusals.pop(key, None)

    def _answered(self, asked: _Asked, reply: Reply) -> None:
        if isinstance(reply.answer, Granted):
            self._read_by_kubevirt(asked.call, reply.answer)
        if not self._is_readable():
            return
        match reply.answer:
            case Granted():
                self._granted(asked)
            case Refused() as refused if any(given.to is not None for given in refused.owners):
                self._refused(asked, refused)
            case _:
                pass

    def _read_by_kubevirt(self, call: AllocateAsked, granted: Granted) -> None:
        """Its virt-launcher finds exactly the devices in the variables of the container. Kata has CDI names instead."""
        for ids, grant in zip(call.requests, granted.containers, strict=True):
            cards = self._meant(call.resource, ids)
            if grant.cdi_ids or len(cards) != len(ids):
                continue
            try:
                found = {of.address for of in host_devices(dict(grant.envs), [call.resource] * len(ids))}
            except NotReadableError as error:
                self.problems.append((UNREADABLE, f"{sorted(cards)}: {error}"))
            else:
                if found != cards:
                    text = f"{sorted(found)} is in the variables of {sorted(cards)}"
                    self.problems.append((UNREADABLE, text))

    def _granted(self, asked: _Asked) -> None:
        others = others_cards(self._world)
        claiming = {pod.name for pod in self._world.kubelet.view.pods.values() if pod.claims}
        for card in sorted(asked.taken & others.keys()):
            since_s = trio.current_time() - self._seen[card]
            if since_s < CLAIM_SEEN_S and others[card] in claiming:
                continue
            text = f"{card} was granted; kubelet's ledger has named {others[card]} for it for {since_s:.3f} s"
            self.problems.append(("what another pod has was granted", text))

    def _refused(self, asked: _Asked, refused: Refused) -> None:
        """The reason is an owner in kubelet's ledger."""
        # What only kubelet's file names is believed beside a List that may not know every pod.
        if any(isinstance(given.to, Pod) and not given.to.name for given in refused.owners):
            return
        young = trio.current_time() - self._world.kubelet_since < YOUNG_S
        if asked.free & self._unowned(asked.call) == set(self._cards(asked.call)) and not young:
            self.problems.append(("refused for an owner that is not in kubelet's ledger", refused.reason))

    def _preferred(self, call: PreferenceAsked, reply: Reply) -> None:
        """Only a choice of one card is judged: kubelet's choice of several may need a group in use."""
        if not isinstance(reply.answer, Preferred) or len(call.requests) != 1 or not self._is_readable():
            return
        answered = reply.answer.containers[0]
        chosen = self._meant(call.resource, answered)
        if len(chosen) != 1:
            return
        # A pod has the chosen card itself only by another ID. The daemon knows that of an address, not of any number.
        ours = {g.card for g in given_by_us(self._world)} - chosen
        ours |= {g.card for g in given_by_us(self._world) if g.card == g.device and g.device not in answered}
        given = sorted(self._members(*chosen) & ours)
        offered = self._meant(call.resource, call.requests[0].available)
        free = sorted(card for card in offered - chosen if self.is_free(card))
        if given and free:
            text = f"{min(chosen)} was chosen, of whose group a pod has {given[0]}, though {free[0]} was free"
            self.problems.append(("a group in use was preferred to a free one", text))

    def _is_readable(self) -> bool:
        """A daemon can have read kubelet's ledger in time."""
        return not any(kind in self._world.counts for kind in UNREAD) and self._world.kubelet.knows_pods

    def _cards(self, call: AllocateAsked) -> list[str]:
        return sorted(self._meant(call.resource, (i for request in call.requests for i in request)))

    def _meant(self, resource: str, ids: Iterable[str]) -> set[str]:
        """The cards that these IDs mean."""
        return {card for i in ids if (card := self._world.meaning(resource, i)) is not None}

    def is_free(self, card: str) -> bool:
        """A virtual machine could open it, and no pod has a card of its group."""
        world = self._world
        group = world.group_of(card)
        return (
            group is not None
            and self._is_unowned(card)
            and world.tree.holder_of(group) is None
            and world.is_viable(group)
            and world.is_bound(card)
            and world.can_be_opened(card)
            and not world.may_be_dead(card)
        )

    def _unowned(self, call: AllocateAsked) -> set[str]:
        """The call's cards in groups of which no pod and no claim has a card."""
        return {card for card in self._cards(call) if self._is_unowned(card)}

    def _is_unowned(self, card: str) -> bool:
        owned = {g.card for g in given_by_us(self._world)} | others_cards(self._world).keys()
        owned = owned.union(*claimed_cards(self._world))
        if is_any_withheld(self._world):
            return False
        members = self._members(card)
        return bool(members) and owned.isdisjoint(members)

    def _members(self, card: str) -> set[str]:
        """The cards of its group; none if it is in no group."""
        group = self._world.group_of(card)
        return set() if group is None else set(self._world.tree.group_members(group))
