"""A node whose operator has written down sets of devices (`--sets-file`), and whether the daemons keep to them.

Every card is a set by itself, and a layout says which cards are pairs. What a daemon has read of the file last is what
it knows, and what it reads during a call may count as well. With `--sets require` a container gets exactly one set, and
is refused for no other reason than that its devices are none; with `--sets prefer` nobody is refused, and a free pair
is preferred. Must not know how the daemon decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, final

import trio

from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked
from gpuactors.core.kinds.set_sources import operator_sets
from gpuactors.core.kinds.sets import KnownSets, SetSource
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Granted, Preferred, Refused, Reply
from gpuactors.core.values.model import DeviceKey, Token
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import SetsReader, Step

SETS: Final = 1 << 38
"""The bit of a history's seed by which its node has sets of devices; with the sixth bit these are required."""

REQUIRED: Final = 32

FILE: Final = "/etc/gpuactors/sets.json"

LAYOUTS: Final[tuple[tuple[tuple[int, int], ...], ...]] = (((0, 1),), ((1, 2),), ((0, 2), (1, 3)), ())
"""The pairs of each layout, by the cards' places."""

LET_GO: Final = (
    "a pod ends",
    "a pod ends slowly",
    "a pod is force-deleted",
    "a pod is force-deleted and dies late",
    "a virtual machine ends by itself",
    "an external process is killed",
    "the node reboots",
)
"""After these a card is free before a daemon knows it."""

Layout = frozenset[frozenset[str]]
"""The sets of a layout, each by the addresses of its cards."""


@final
class Sets:
    """The file of one node, and what its daemons have made of it. Each wrong answer is in `problems`, as a check's name
    and a text."""

    def __init__(
        self, addresses: Iterable[str], is_plugged: Callable[[str], bool], *, required: bool
    ) -> None:
        """`addresses`: those of the cards, by place."""
        self._addresses = tuple(addresses)
        self._is_plugged = is_plugged
        self.required: Final = required
        self.layout = 0
        """The number of the layout that the file has."""
        self.is_unreadable = False
        self.problems: list[tuple[str, str]] = []
        self._read: dict[str, list[Layout]] = {}
        """What each daemon has read: what it knew when its oldest waiting call came, and all since."""
        self._asked: dict[tuple[str, Token], tuple[AllocateAsked, int]] = {}
        """The calls of each daemon that wait, with the number of reads before them that count no more."""

    @property
    def drawn(self) -> Layout:
        """What the file has."""
        single = ((address,) for address in self._addresses)
        pairs = ((self._addresses[a], self._addresses[b]) for a, b in LAYOUTS[self.layout])
        return frozenset(frozenset(s) for s in (*single, *pairs))

    def sources_of(self, daemon: str) -> dict[SetSource, SetsReader]:
        """The sources that a daemon reads."""
        self._read[daemon] = []
        return {SetSource.OPERATOR: _File(self, self._read[daemon].append)}

    def stepped(self, daemon: str, step: Step, is_free: Callable[[str], bool]) -> None:
        """A daemon's core took an event. `is_free`: every daemon knows that nobody has the card, and that a virtual
        machine could open it."""
        if isinstance(step.event, AllocateAsked):
            before = max(0, len(self._read[daemon]) - 1)
            self._asked[daemon, step.event.token] = (step.event, before)
        for reply in (effect for effect in step.effects if isinstance(effect, Reply)):
            if isinstance(step.event, PreferenceAsked):
                self._preferred(daemon, step, step.event, reply, is_free)
            elif (asked := self._asked.pop((daemon, reply.token), None)) is not None:
                self._answered(asked[0], reply, self._read[daemon][asked[1] :])

    def _answered(self, call: AllocateAsked, reply: Reply, known: Collection[Layout]) -> None:
        """`known`: every layout that counted during the call."""
        is_set = [[frozenset(ids) in layout for layout in known] for ids in call.requests]
        match reply.answer:
            case Granted() if self.required and not all(any(row) for row in is_set):
                text = f"{_named(call)} were granted; the daemon has read {len(known)} layouts meanwhile"
                self.problems.append(("what is no set was granted", text))
            case Refused() as refused if Cause.NOT_A_SET in refused.causes:
                if not self.required:
                    self.problems.append(
                        ("refused as no set, though sets are only preferred", refused.reason)
                    )
                elif known and all(all(row) for row in is_set):
                    self.problems.append(("a set was refused as none", refused.reason))
            case _:
                pass

    def _preferred(
        self,
        daemon: str,
        step: Step,
        call: PreferenceAsked,
        reply: Reply,
        is_free: Callable[[str], bool],
    ) -> None:
        """A pair is preferred to any two others; where pairs are not required, only if both cards are free. Kubelet may
        still offer a card that the daemon has no more under this name."""
        if not isinstance(reply.answer, Preferred) or len(call.requests) != 1 or not self._read[daemon]:
            return
        request, chosen = call.requests[0], frozenset(reply.answer.containers[0])
        layout = self._read[daemon][-1]
        names = step.before.index.names
        named = {card for card in request.available if names.get(DeviceKey(card)) == call.resource}
        there = set(filter(self._is_plugged, named))
        whole = [s for s in layout if len(s) == request.size and s <= there]
        better = whole if self.required else [s for s in whole if all(map(is_free, s))]
        if request.size > 1 and better and not request.must_include and chosen not in layout:
            text = f"{sorted(chosen)} were chosen, which are none, though {sorted(better[0])} are one"
            self.problems.append(("a set was not preferred", text))


@final
class _File:
    """Implements `ports.node.SetsReader`."""

    def __init__(self, sets: Sets, on_read: Callable[[Layout], None]) -> None:
        self._sets = sets
        self._on_read = on_read

    async def read(self) -> KnownSets:
        await trio.lowlevel.checkpoint()
        if self._sets.is_unreadable:
            raise HostError(f"cannot read {FILE} (--sets-file): Input/output error; correct the file")
        drawn = self._sets.drawn
        by_size = {size: [sorted(s) for s in sorted(drawn, key=sorted) if len(s) == size] for size in (1, 2)}
        found = operator_sets(FILE, by_size)
        self._on_read(drawn)
        return KnownSets(found.sets, problems=found.problems)


def _named(call: AllocateAsked) -> str:
    return ", ".join(sorted(i for request in call.requests for i in request))
