"""Cards that die on one node (docs/dev/adr/0024), what each daemon must know of it,
and whether the daemons keep to that.

A function that has died is dead until the kernel enumerates it again, also where it answers before. Its own count of
fatal errors tells every daemon; its silence tells those that read it while it lasted, and it is not read while a
process has the function open; the count of the port above tells those that knew the function before. Whoever must know
gives it to nobody: a call in flight when it dies may end either way. A daemon that starts may know by its file what the
one before has read, or not, as that may have ended before it wrote. Must not know how the daemon decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, final

from gpuactors.core.events.claims import PrepareAsked, UnprepareAsked
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared, Unprepared
from gpuactors.core.values.effects import Granted, Ready, Refused, Reply
from gpuactors.core.values.model import PciAddress, Token
from gpuactors.ports.node import Step
from gpuactors_simulation.host.tree import HostTree
from gpuactors_simulation.host.uevents import Uevent

DEAD: Final = 1 << 40
"""The bit of a history's seed by which its cards can die."""

GIVEN: Final = "a dead GPU was given away"
NOT_DEAD: Final = "refused as dead, and is not"
NOT_NAMED: Final = "the refusal of a dead GPU does not name that"

_OWNED: Final = frozenset(
    {
        Cause.ALLOCATED,
        Cause.CLAIMED_ELSEWHERE,
        Cause.GROUP_IN_USE,
        Cause.CARD_IN_USE,
        Cause.STILL_ALLOCATED,
        Cause.HELD_BY_OTHER,
        Cause.HOLDER_UNKNOWN,
        Cause.GROUP_NOT_VIABLE,
        Cause.NODE_MISSING,
    }
)
"""What is no reason beside the death of the card: it comes before them."""


class Sign(StrEnum):
    """A way to die, by what shows it."""

    COUNTED = "it has counted a fatal error"
    BY_PORT = "only the port above has counted its fatal error"
    SILENT = "it does not answer"


@dataclass(slots=True)
class _Death:
    """Of one function, from its enumeration on."""

    presence: int
    """The number of its directory then."""
    known: set[str] = field(default_factory=set)
    """The daemons that have read the sign."""
    shown: set[str] = field(default_factory=set)
    """The daemons that read it at their next look, at the latest, where nothing shows it to others."""


@dataclass(slots=True)
class _Call:
    """A call that is not answered yet."""

    cards: tuple[str, ...]
    refused: set[str]
    """Those that were to be refused all the time."""
    doubtful: set[str]
    """Those that a daemon might take for dead at some time: a companion may be pulled out meanwhile."""


@final
class Deaths:
    """The dead functions of one node. Each wrong answer is in `problems`, as a check's name and a text."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._died: dict[tuple[str, Sign], _Death] = {}
        self._asked: dict[tuple[str, Token], _Call] = {}
        self._asking: dict[tuple[str, Token], str] = {}
        """The claim of each call about one."""
        self._refusable: dict[str, set[str]] = {}
        """The cards of each claim that were to be refused at every prepare, by UID."""
        self.problems: list[tuple[str, str]] = []

    # --- what happens ---------------------------------------------------------------------------------------

    def count(self, address: str) -> tuple[Uevent, ...]:
        """The function reports a fatal error."""
        self._die(address, Sign.COUNTED)
        return self._tree.fail_fatally(address)

    def count_at_port(self, address: str, states: Iterable[tuple[str, NodeState]]) -> tuple[Uevent, ...]:
        """The same, and only the port above counts it: of every function below. `states`: those of the daemons."""
        port, daemons = self._tree.functions[address].bridges, tuple(states)
        for below in [a for a, spec in self._tree.functions.items() if spec.bridges == port]:
            knew = {name for name, state in daemons if self._has_read(state, below)}
            self._die(below, Sign.BY_PORT).shown |= knew
        return self._tree.fail_fatally(address, by_port=True)

    def fall_silent(self, address: str) -> None:
        """The function does not answer any more."""
        self._die(address, Sign.SILENT)
        self._tree.fall_silent(address)

    def _die(self, address: str, sign: Sign) -> _Death:
        found = self._death(address, sign)
        if found is None:
            found = self._died[address, sign] = _Death(self._presence(address))
        return found

    def _has_read(self, state: NodeState, address: str) -> bool:
        function = state.host.functions.get(PciAddress(address))
        return (
            function is not None
            and function.presence == self._presence(address)
            and function.port_fatal_errors is not None
        )

    # --- what is so -----------------------------------------------------------------------------------------

    def _presence(self, address: str) -> int:
        try:
            return self._tree.device_dir(address).stat().st_ino
        except (KeyError, OSError):
            return 0

    def _death(self, address: str, sign: Sign) -> _Death | None:
        """None if it has not died so since it was enumerated."""
        found = self._died.get((address, sign))
        return found if found is not None and found.presence == self._presence(address) != 0 else None

    def is_silent(self, address: str) -> bool:
        """It does not answer now."""
        if self._death(address, Sign.SILENT) is None:
            return False
        return set((self._tree.device_dir(address) / "config").read_bytes()) == {0xFF}

    @property
    def any_silent(self) -> bool:
        """A function does not answer now, of which no uevent tells."""
        return any(self.is_silent(address) for address, _ in self._died)

    def _units(self, card: str, *, companions: bool = True) -> list[str]:
        """The card, and what a virtual machine gets with it: the functions of its slot that are in its group."""
        functions = self._tree.functions
        if card not in functions or functions[card].group is None:
            return [card] if card in functions else []
        group = self._tree.group_members(functions[card].group or 0)
        beside = (a for a in functions if a in group and a[:-1] == card[:-1] and a != card)
        return [card, *(beside if companions else ())]

    def may_be_dead(self, card: str) -> bool:
        """A daemon may take it for dead."""
        return any(self._death(a, sign) is not None for a in self._units(card) for sign in Sign)

    def is_dead(self, card: str, daemon: str) -> bool:
        """This daemon takes it for dead at its next look, at the latest."""
        return any(self._must_know(a, sign, daemon) for a in self._units(card) for sign in Sign)

    def is_doubtful(self, card: str, daemon: str) -> bool:
        """It may take it for dead, or may not."""
        return not self.is_dead(card, daemon) and any(
            self.is_silent(a) if sign is Sign.SILENT and not death.known else True
            for a in self._units(card)
            for sign in Sign
            if (death := self._death(a, sign)) is not None
        )

    def _must_know(self, address: str, sign: Sign, daemon: str) -> bool:
        death = self._death(address, sign)
        if death is None:
            return False
        is_shown = sign is Sign.COUNTED or (
            sign is Sign.SILENT and self.is_silent(address) and self._tree.enabled(address) == 0
        )
        return is_shown or daemon in death.known | death.shown

    def _is_refused(self, card: str, daemon: str) -> bool:
        """A call that comes now is refused. No inspection of a companion is made for it: that must be known before."""
        if any(
            self._must_know(a, sign, daemon) for a in self._units(card, companions=False) for sign in Sign
        ):
            return True
        deaths = (self._death(a, sign) for a in self._units(card) for sign in Sign)
        return any(death is not None and daemon in death.known for death in deaths)

    # --- what the daemons do --------------------------------------------------------------------------------

    def stepped(self, daemon: str, step: Step, given: Callable[[str], Iterable[str]]) -> None:
        """A daemon's core took an event. `given`: the cards of a claim, by its UID."""
        self._look(daemon, step.before)
        match step.event:
            case AllocateAsked(token, _, requests):
                self._ask(daemon, token, (i for ids in requests for i in ids))
            case PreStartAsked(token, _, devices):
                self._ask(daemon, token, devices)
            case PrepareAsked() as call:
                uid = str(call.claim.uid)
                self._ask(daemon, call.token, given(uid))
                refused = self._asked[daemon, call.token].refused
                self._refusable[uid] = self._refusable.get(uid, refused) & refused
                self._asking[daemon, call.token] = uid
            case UnprepareAsked() as call:
                self._asking[daemon, call.token] = str(call.claim.uid)
            case _:
                pass
        for effect in step.effects:
            if isinstance(effect, Reply):
                self._answered(daemon, effect)

    def _look(self, daemon: str, state: NodeState) -> None:
        for (address, _), death in self._died.items():
            function = state.host.functions.get(PciAddress(address))
            if function is not None and function.presence == death.presence and function.sign is not None:
                death.known.add(daemon)
        for (of, _), call in self._asked.items():
            call.refused -= {card for card in call.refused if not self._is_refused(card, of)}
            call.doubtful |= {card for card in call.cards if self.may_be_dead(card)}

    def _ask(self, daemon: str, token: Token, cards: Iterable[str]) -> None:
        cards = tuple(cards)
        refused = {card for card in cards if self._is_refused(card, daemon)}
        self._asked[daemon, token] = _Call(cards, refused, set(filter(self.may_be_dead, cards)))

    def _answered(self, daemon: str, reply: Reply) -> None:
        uid = self._asking.pop((daemon, reply.token), None)
        call = self._asked.pop((daemon, reply.token), None) or _Call((), set(), set())
        dead = call.refused
        match reply.answer:
            case Unprepared() if uid is not None:
                self._refusable.pop(uid, None)
            case Prepared() if uid is not None and (still := dead & self._refusable[uid]):
                self.problems.append((GIVEN, f"the claim {uid} was prepared with {sorted(still)}"))
            case Granted() if dead:
                self.problems.append((GIVEN, f"{sorted(dead)} was granted"))
            case Ready() if dead:
                self.problems.append((GIVEN, f"a container may start on {sorted(dead)}"))
            case Refused() as refused if Cause.DEAD in refused.causes:
                if not call.doubtful:
                    self.problems.append((NOT_DEAD, refused.reason))
            case Refused() as refused if dead and not _OWNED.isdisjoint(refused.causes):
                self.problems.append((NOT_NAMED, f"{sorted(dead)}: {refused.reason}"))
            case _:
                pass
