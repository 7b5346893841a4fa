"""The conditions on the CDI files of claims and on the answers to their prepares, by a naive reading of the host.

A file gives a tenant device nodes by number, and the kernel gives a number that was freed to the next device. So at no
moment two claims' files name the same node, no file names another card's node for long, and who is asked after a change
answers by what is there then: with its own cards, of the model that the claim had, which a virtual machine can open and
nobody else has.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Final, final

import trio

from gpuactors.core.events.claims import PrepareAsked, UnprepareAsked
from gpuactors.core.values.claim import Prepared, Unprepared
from gpuactors.core.values.effects import Reply
from gpuactors.core.values.model import Token
from gpuactors.ports.node import Step
from tests.histories.claims import DRIVER, ClaimsNode
from tests.histories.dra_check import Problem
from tests.histories.dra_node import CDI_DIR
from tests.histories.truth import others_cards
from tests.histories.world import World
from tests.memory.faults import Fault

ANOTHERS: Final = "a claim was given another card's node"

WRONG_S: Final = 60.0
"""While nothing hinders the daemon, files name another card's node for less long: longer than the longest wait before
an inspection that has failed is repeated (30 s), and some."""

_BLINDING: Final = (
    Fault.SCAN_FAILS,
    Fault.INSPECTION_FAILS,
    Fault.INSPECTION_HANGS,
    Fault.INSPECTION_SLOW,
    Fault.WATCHER_CRASHES,
    Fault.INSPECTOR_CRASHES,
)

_SHARED: Final = frozenset({"/dev/vfio/vfio", "/dev/iommu"})

Place = tuple[int | None, str, bool, bool]
"""The group and the model of a card, whether the host uses something else of the group, and whether another driver's
claim has it."""


@dataclass(slots=True)
class _Asked:
    """A prepare that is not answered yet."""

    uid: str
    places: dict[str, Place | None]
    """Of the cards of the claim; only those that have stayed as they were when it came."""


@final
class ClaimAnswers:
    """Watches the files and the daemons of one node with claims of GPUs."""

    def __init__(self, world: World, node: ClaimsNode) -> None:
        self._world = world
        self._node = node
        self._asked: dict[tuple[str, Token], _Asked] = {}
        self._models: dict[str, tuple[str, ...]] = {}
        """The models of the cards of each claim that was prepared and not unprepared, by UID."""
        self._asked_with: dict[str, set[tuple[str, ...]]] = {}
        """The models with which each claim was to be prepared: a daemon may have reserved it then."""
        self._wrong: dict[str, float] = {}
        """The claims whose files name another card's node, and since when nothing hinders the daemon."""
        self._jumps = 0
        self._problem: Problem | None = None

    # --- at every moment ------------------------------------------------------------------------------------

    def problem(self) -> Problem | None:
        """The first thing that does not hold, and must at every moment."""
        self._look()
        return self._problem or self._named_twice() or self._named_long()

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event."""
        self._look()
        match step.event:
            case PrepareAsked() as call:
                uid = str(call.claim.uid)
                places = {card: self._place(card) for card in self._node.given.get(uid, ())}
                self._asked[daemon, call.token] = _Asked(uid, places)
                self._asked_with.setdefault(uid, set()).add(self._now(uid))
            case UnprepareAsked() as call:
                self._asked[daemon, call.token] = _Asked(str(call.claim.uid), {})
            case _:
                pass
        for effect in step.effects:
            if isinstance(effect, Reply) and (asked := self._asked.pop((daemon, effect.token), None)):
                if isinstance(effect.answer, Prepared):
                    self._problem = self._problem or self._prepared(asked)
                elif isinstance(effect.answer, Unprepared):
                    self._models.pop(asked.uid, None)
                    self._asked_with.pop(asked.uid, None)

    def _look(self) -> None:
        """What has changed since a prepare came may be answered either way."""
        for asked in self._asked.values():
            for card, place in list(asked.places.items()):
                if self._place(card) != place:
                    del asked.places[card]

    def _place(self, card: str) -> Place | None:
        group = self._world.group_of(card)
        if group is None:
            return None
        is_others = card in others_cards(self._world)
        return group, self._world.model(card), self._world.host_uses_group_of(card), is_others

    # --- the answers ----------------------------------------------------------------------------------------

    def _prepared(self, asked: _Asked) -> Problem | None:
        uid, him = asked.uid, self._node.administrator
        if him is not None and uid in him.disturbed:
            return None
        for card, place in asked.places.items():
            if place is None:
                return ANOTHERS, f"{card} is not there, and {uid} was prepared with it"
            _, _, is_hosts, is_others = place
            if is_hosts and uid not in self._models:
                return "a group that the host uses was given", f"{uid} was prepared with {card}"
            if is_others and uid not in self._models:
                return "two owners", f"{uid} was prepared with {card}, which another driver's claim has"
        if len(asked.places) == len(self._node.given.get(uid, ())) and (text := self.names_others(uid)):
            return ANOTHERS, f"{text}, and it was prepared"
        if self.has_another_model(uid) and len(asked.places) == len(self._models[uid]):
            return (
                "another model was given",
                f"{uid} had {self._models[uid]}, and was prepared with {self._now(uid)}",
            )
        self._models[uid] = self._now(uid)
        return None

    def has_another_model(self, uid: str) -> bool:
        """In a slot of the claim is another model than when it was prepared, and a daemon can know that."""
        return (
            uid in self._models and self._models[uid] != self._now(uid) and uid not in self._node.unidentified
        )

    def may_have_another_model(self, uid: str) -> bool:
        """The same, or than when it was reserved."""
        return self.has_another_model(uid) or bool(self._asked_with.get(uid, set()) - {self._now(uid)})

    def _now(self, uid: str) -> tuple[str, ...]:
        world, given = self._world, self._node.given.get(uid, ())
        return tuple(world.model(card) if world.group_of(card) is not None else "" for card in given)

    # --- the files ------------------------------------------------------------------------------------------

    def _named_twice(self) -> Problem | None:
        named = Counter(path for uid in self._node.given for path in self._nodes(uid) - _SHARED)
        if doubles := sorted(path for path, number in named.items() if number > 1):
            return ANOTHERS, f"the files of two claims name {doubles[0]}"
        return None

    def _named_long(self) -> Problem | None:
        now = trio.current_time()
        wrong = {uid: text for uid in self._node.given if (text := self.names_others(uid))}
        if self._is_hindered():
            self._wrong.clear()
        self._wrong = {uid: self._wrong.get(uid, now) for uid in wrong}
        late = [wrong[uid] for uid, since in self._wrong.items() if now - since > WRONG_S]
        return (ANOTHERS, f"for {WRONG_S:g} s {late[0]}") if late else None

    def _is_hindered(self) -> bool:
        world, jumps = self._world, self._world.counts["the clock jumps"]
        jumped, self._jumps = jumps != self._jumps, jumps
        return (
            jumped
            or world.missed
            or bool(world.late)
            or self._node.disk.full
            or bool(self._node.disk.keeps)
            or world.faults.left(*_BLINDING) > 0
            or world.faults.lasts(Fault.NO_DESCRIPTORS)
            or world.has_silent_removal()  # no daemon can know of it
            or not any(daemon.is_serving for daemon in world.serving)
        )

    def names_others(self, uid: str) -> str:
        """The nodes in the claim's CDI file that are none of its own cards'; empty if there are none."""
        world = self._world
        cards = [card for card in self._node.given[uid] if world.group_of(card) is not None]
        others = self._nodes(uid) - _SHARED - world.nodes_of(cards)
        return f"the files of {uid} name {sorted(others)}" if others else ""

    def _nodes(self, uid: str) -> set[str]:
        """The paths of the device nodes in the claim's CDI file; none if it is not one, as after somebody has edited
        it."""
        try:
            devices = json.loads(self._node.disk.files[f"{CDI_DIR}/k8s.{DRIVER}-claim_{uid}.json"])["devices"]
            return {
                str(node["path"])
                for device in devices
                for node in device["containerEdits"].get("deviceNodes", ())
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return set()
