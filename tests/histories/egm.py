"""A node of Grace superchips: the EGMs that the kernel lists, and who gets their device nodes.

An EGM is memory of one superchip for the virtual machine that has every GPU of it. A daemon reads the lists again
before it answers an Allocate, so an answer must be right for lists that there were during the call; while they cannot
be read, those that were read last count as well. Must not know how the daemon decides. That the nodes are never opened
is the tests' of `host/egm.py`: here is no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

import trio

from gpuactors.core.events.deviceplugin import AllocateAsked
from gpuactors.core.kinds.set_sources import egm_sets
from gpuactors.core.kinds.sets import DeviceSet, KnownSets, SetSource
from gpuactors.core.values.effects import Granted, Reply
from gpuactors.core.values.model import Token
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import SetsReader, Step

EGM: Final = 1 << 42
"""The bit of a history's seed by which its node has EGMs."""

PLACES: Final[tuple[tuple[int, ...], ...]] = ((0, 1), (2,))
"""The places of the GPUs of each superchip."""

WRONG: Final = "a container got the wrong EGMs"

Lists = tuple[tuple[str, tuple[str, ...], bool], ...]
"""The name of each EGM, its GPUs, and whether its device node is there."""


@final
class Egms:
    """The EGMs of one node. Each wrong answer is in `problems`, as a check's name and a text."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: those of the cards, by place."""
        self._chips = [tuple(addresses[place] for place in places) for places in PLACES]
        self.names: list[str | None] = [f"egm{number}" for number in range(len(PLACES))]
        """The kernel's name of each superchip's EGM; None if it has none."""
        self.has_node = [True] * len(PLACES)
        self.lacks_last = [False] * len(PLACES)
        """The kernel does not list the last GPU of the superchip yet."""
        self.is_unreadable = False
        self.problems: list[tuple[str, str]] = []
        self._made = len(PLACES)
        self._read: dict[str, Lists] = {}
        """What each daemon has read last."""
        self._asked: dict[tuple[str, Token], tuple[AllocateAsked, set[Lists]]] = {}
        """The calls that wait, with all lists that count for them."""

    @property
    def lists(self) -> Lists:
        """What the kernel has."""
        return tuple(
            (name, gpus[:-1] if lacks else gpus, has_node)
            for name, gpus, has_node, lacks in zip(
                self.names, self._chips, self.has_node, self.lacks_last, strict=True
            )
            if name is not None
        )

    def reader_of(self, daemon: str) -> SetsReader:
        """The lists as a daemon reads them."""
        return _Reader(self, daemon)

    def read(self, daemon: str) -> KnownSets:
        """A daemon reads the lists. Raises `HostError`."""
        if self.is_unreadable:
            for (of, _), (_, lists) in self._asked.items():
                if of == daemon:
                    lists.add(self._read.get(daemon, ()))
            raise HostError("cannot read /sys/class/egm: no answer within 0.2 s")
        self._read[daemon] = self.lists
        found = egm_sets(
            {name: gpus for name, gpus, _ in self.lists}, [name for name, _, there in self.lists if there]
        )
        return KnownSets(found.sets, problems=found.problems)

    # --- what happens to them -------------------------------------------------------------------------------

    def add(self, chip: int) -> str:
        """The EGM of a superchip is made, under a name that none had."""
        name = self.names[chip] = f"egm{self._made}"
        self._made += 1
        self.changed()
        return name

    def remove(self, chip: int) -> str:
        """It goes."""
        name, self.names[chip] = self.names[chip], None
        assert name is not None
        self.changed()
        return name

    def changed(self) -> None:
        """The lists are others now: they count for the calls that wait."""
        for _, lists in self._asked.values():
            lists.add(self.lists)

    # --- the answers ----------------------------------------------------------------------------------------

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event."""
        if isinstance(step.event, AllocateAsked):
            self._asked[daemon, step.event.token] = (step.event, {self.lists})
        for reply in (effect for effect in step.effects if isinstance(effect, Reply)):
            asked = self._asked.pop((daemon, reply.token), None)
            if asked is not None and isinstance(reply.answer, Granted):
                self._granted(*asked, reply.answer)

    def _granted(self, call: AllocateAsked, lists: set[Lists], granted: Granted) -> None:
        for ids, grant in zip(call.requests, granted.containers, strict=True):
            got = [node for node in grant.nodes if node.startswith("/dev/egm")]
            right = [_nodes_with(some, ids) for some in lists]
            if got not in right:
                self.problems.append((WRONG, f"{sorted(ids)} got {got}; right is any of {right}"))

    def wrong(self, sets: Iterable[DeviceSet]) -> list[str]:
        """What a daemon has wrong at rest, which knows these sets."""
        known = {(s.name, tuple(s.devices), s.node) for s in sets if s.source is SetSource.EGM}
        there = {(name, gpus, f"/dev/{name}" if has else "") for name, gpus, has in self.lists if gpus}
        return (
            [] if known == there else [f"a daemon knows the EGMs {sorted(known)}, there are {sorted(there)}"]
        )


@final
class _Reader:
    """Implements `ports.node.SetsReader`."""

    def __init__(self, egms: Egms, daemon: str) -> None:
        self._egms = egms
        self._daemon = daemon

    async def read(self) -> KnownSets:
        await trio.lowlevel.checkpoint()
        return self._egms.read(self._daemon)


def _nodes_with(lists: Lists, ids: Sequence[str]) -> list[str]:
    """The nodes of the EGMs of which these devices are every GPU."""
    return sorted(f"/dev/{name}" for name, gpus, there in lists if gpus and there and {*gpus} <= {*ids})
