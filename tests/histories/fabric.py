"""A node whose daemons activate the partitions of an NVLink fabric, and what they do with its fabric manager.

The fabric manager knows which partitions are active, and the history knows who activated each. A command is a process
of its own: it goes on when its daemon is killed, and ends with the daemon otherwise, at its deadline at the latest.
Wrong answers are one at a time: two wrong witnesses at once are beyond what a daemon can find out (ADR 0025). Must not
know how the daemon decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import trio

from gpuactors.core.events.claims import PrepareAsked
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.kinds.set_sources import partitions
from gpuactors.core.kinds.sets import LISTED_BY, KnownSets
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.effects import Granted, Ready, Reply
from gpuactors.core.values.model import Token
from gpuactors.core.values.partition import Goal, Intent, PartitionId
from gpuactors.host.partition_command import PARTITION_ACT_S, PARTITIONS_QUERY_S
from gpuactors.ports.errors import HostError, StateFileError
from gpuactors.ports.node import Step

FABRIC: Final = 1 << 39
"""The bit of a history's seed by which its daemons activate partitions; with the sixth bit sets are required."""

_PLACES: Final[Mapping[str, tuple[int, ...]]] = {
    **{str(place + 1): (place,) for place in range(6)},
    "7": (0, 1),
    "8": (2, 3),
    "9": (0, 1, 2),
}
"""The places of the cards of each partition, as a board has them: one of each card, and larger ones."""

PAIRS: Final = ("7", "8")
"""The partitions of two."""

COMMAND_S: Final = 0.02
"""How long a command takes until its effect, and from there to its end."""

_LOCK_SHARE: Final = 0.5
"""The part of its deadline that a command may wait for the one before it."""

TRUTHS: Final = 3
"""So many right queries come between two wrong answers."""

US, THEM = "gpuactors", "another program"

QUERY: Final = "query"


@dataclass(eq=False, slots=True)
class _Process:
    """One run of the command."""

    word: str
    partition: str = ""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    problem: str = ""
    listed: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Asked:
    """A call before the start of a container, or of a claim."""

    containers: tuple[frozenset[str], ...]
    """The cards of each container."""
    active: set[str]
    """The partitions that were active at some moment since it came."""


@final
class Fabric:
    """The fabric manager of one node, and what its daemons have made of it. Each wrong act or answer is in `problems`,
    as a check's name and a text."""

    def __init__(
        self,
        addresses: Sequence[str],
        user_of: Callable[[str], str],
        nursery: trio.Nursery,
    ) -> None:
        """`addresses`: those of the cards, by place. `user_of`: the process of a virtual machine that has a card
        open; empty without."""
        self.partitions: Final = {
            key: frozenset(addresses[place] for place in places) for key, places in _PLACES.items()
        }
        self.active: dict[str, str] = {}
        """Who has activated each active partition."""
        self.intents = MemoryIntents()
        self.problems: list[tuple[str, str]] = []
        self.failing = ""
        """The next command fails: `before` or `after` it has had its effect."""
        self.hanging = ""
        """The next act hangs, likewise."""
        self.query_hangs = False
        """The next query hangs."""
        self.wrong_about = ""
        """The partition of which the next query says the opposite."""
        self.pretends = False
        """The next act has no effect, and ends with success."""
        self._truths = TRUTHS
        self._user_of = user_of
        self._nursery = nursery
        self._go_on = trio.Event()
        self._running: _Process | None = None
        self._killed: set[str] = set()
        self._asked: dict[tuple[str, Token], _Asked] = {}

    # --- what happens to it ---------------------------------------------------------------------------------

    @property
    def can_be_wrong(self) -> bool:
        """A wrong answer is the only one."""
        return self._truths >= TRUTHS and not self.wrong_about and not self.pretends

    @property
    def is_hanging(self) -> bool:
        """A command hangs, or is to."""
        return bool(self.hanging) or self.query_hangs or self._running is not None

    def go_on(self) -> None:
        """Commands that hang go on."""
        self.hanging, self.query_hangs = "", False
        self._go_on.set()
        self._go_on = trio.Event()

    def restart(self) -> None:
        """The fabric manager restarts: no partition is active, and a command that runs fails."""
        self.active.clear()
        if self._running is not None:
            self._running.problem = "lost the connection to the fabric manager"

    def reboot(self) -> None:
        """The node has started anew. No command runs, and an intent is of another boot."""
        if self._running is not None:
            self._running.scope.cancel()
            self._end(self._running)
        self.active.clear()
        self.intents.reboot()
        self._asked.clear()

    def kill(self, daemon: str) -> None:
        """A daemon's process is killed. Its command goes on."""
        self._killed.add(daemon)
        self._asked = {key: asked for key, asked in self._asked.items() if key[0] != daemon}

    def activate(self, key: str) -> None:
        """Another program activates a partition."""
        self.active[key] = THEM
        self._note()

    def deactivate(self, key: str) -> None:
        """Another program deactivates a partition."""
        self.active.pop(key, None)

    def is_free(self, key: str) -> bool:
        """No active partition has one of its cards, and nothing is known of it: there is no intent, and no command
        runs. Without that nobody could tell whose it is then."""
        cards = self.partitions[key]
        known = {str(intent.id) for intent in self.intents.stored}
        busy = (other for other in (*self.active, *known) if self.partitions[other] & cards)
        return self._running is None and next(busy, None) is None

    def end_faults(self) -> None:
        """Nothing hinders a daemon any more."""
        self.failing, self.wrong_about, self.pretends = "", "", False
        self.intents.is_full = False
        for key in [key for key, by in self.active.items() if by == THEM]:
            self.deactivate(key)
        self.go_on()

    # --- the command ----------------------------------------------------------------------------------------

    def manager_of(self, daemon: str) -> MemoryManager:
        """The command as a daemon runs it."""
        return MemoryManager(self, daemon)

    async def run(self, daemon: str, process: _Process, deadline_s: float) -> None:
        """Run the command for a daemon. Raises `HostError`."""
        called = f"command {process.word} {process.partition}".rstrip()
        with trio.move_on_after(deadline_s * _LOCK_SHARE):
            while self._running is not None:
                await self._running.ended.wait()
        if self._running is not None:
            raise HostError(f"{called} was not run: an earlier one has not ended")
        self._running = process
        self._nursery.start_soon(self._work, process)
        try:
            with trio.move_on_after(deadline_s):
                await process.ended.wait()
        finally:
            if not process.ended.is_set() and daemon not in self._killed:
                process.scope.cancel()
                self._end(process)
                process.problem = f"has not ended within {deadline_s:g} s"
        if process.problem:
            raise HostError(f"{called} {process.problem}")

    async def _work(self, process: _Process) -> None:
        failing, self.failing = self.failing, ""
        is_query = process.word == QUERY
        hanging = ("before" if self.query_hangs else "") if is_query else self.hanging
        if is_query:
            self.query_hangs = False
        else:
            self.hanging = ""
        with process.scope:
            await trio.sleep(COMMAND_S)
            if hanging == "before":
                await self._go_on.wait()
            if failing != "before" and not process.problem:
                self._effect(process)
            if hanging == "after":
                await self._go_on.wait()
            await trio.sleep(COMMAND_S)
            process.problem = process.problem or ("ends with status 1" if failing else "")
            self._end(process)

    def _end(self, process: _Process) -> None:
        process.ended.set()
        if self._running is process:
            self._running = None

    def _effect(self, process: _Process) -> None:
        key = process.partition
        if process.word == QUERY:
            process.listed = self._listed()
            return
        self._judge(process)
        if self.pretends:
            self.pretends, self._truths = False, 0
        elif process.word == Goal.ACTIVATE:
            if any(self.partitions[other] & self.partitions[key] for other in self.active):
                process.problem = "ends with status 244, and says -12"
            else:
                self.active[key] = US
                self._note()
        elif self.active.pop(key, None) is None:
            process.problem = "ends with status 245, and says -11"

    def _listed(self) -> dict[str, object]:
        """What NVIDIA's tool prints."""
        wrong, self.wrong_about = self.wrong_about, ""
        self._truths = 0 if wrong else self._truths + 1
        return {
            "numPartitions": len(self.partitions),
            "partitionInfo": [
                {
                    "partitionId": int(key),
                    "isActive": int((key in self.active) is not (key == wrong)),
                    "numGpus": len(cards),
                    "gpuInfo": [{"physicalId": 0, "uuid": "", "pciBusId": card} for card in sorted(cards)],
                }
                for key, cards in self.partitions.items()
            ],
        }

    # --- what must hold -------------------------------------------------------------------------------------

    def _judge(self, process: _Process) -> None:
        """An act has its effect."""
        key = process.partition
        users = {card: pod for card in self.partitions[key] if (pod := self._user_of(card))}
        if users:
            text = f"{process.word} {key} while {users} run"
            self.problems.append(("a partition was changed under a virtual machine", text))
        if process.word == Goal.DEACTIVATE and self.active.get(key) == THEM:
            self.problems.append(("another program's partition was deactivated", f"partition {key}"))
        if PartitionId(key) not in {intent.id for intent in self.intents.stored}:
            self.problems.append(("an act without an intent", f"{process.word} {key}"))

    def _note(self) -> None:
        for asked in self._asked.values():
            asked.active.update(self.active)

    def stepped(self, daemon: str, step: Step, cards_of: Callable[[str], Iterable[str]]) -> None:
        """A daemon's core took an event. `cards_of`: the cards of a claim, by its UID."""
        match step.event:
            case PreStartAsked(token, _, devices):
                self._came(daemon, token, devices)
            case AllocateAsked(token, _, requests):
                self._came(daemon, token, *requests)
            case PrepareAsked() as call:
                self._came(daemon, call.token, cards_of(str(call.claim.uid)))
            case _:
                pass
        is_gated = step.before.daemon.settings.pre_start_gate
        for reply in (effect for effect in step.effects if isinstance(effect, Reply)):
            if (asked := self._asked.pop((daemon, reply.token), None)) is None:
                continue
            starts = isinstance(reply.answer, Ready | Prepared)
            if starts or (isinstance(reply.answer, Granted) and not is_gated):
                self._answered(asked)

    def _came(self, daemon: str, token: Token, *containers: Iterable[str]) -> None:
        cards = tuple(frozenset(map(str, container)) for container in containers)
        self._asked[daemon, token] = _Asked(cards, set(self.active))

    def _answered(self, asked: _Asked) -> None:
        for cards in asked.containers:
            needed = next((key for key, of in self.partitions.items() if of == cards), None)
            if needed is not None and needed not in asked.active:
                text = f"partition {needed} of {sorted(cards)}; active are {self.active or 'none'}"
                self.problems.append(("a container starts without its partition", text))

    def left(self, owned: Iterable[Iterable[str]], held: Iterable[str]) -> list[str]:
        """The partitions of gpuactors and its intents that nobody needs, as sentences. `owned`: the cards of each
        owner. `held`: those that a process has open."""
        needed, in_use = [frozenset(cards) for cards in owned], set(held)
        active = [key for key in self.active if self._is_left(self.partitions[key], needed, in_use)]
        intents = [
            intent
            for intent in self.intents.stored
            if self._is_left(frozenset(map(str, intent.devices)), needed, in_use)
        ]
        return [f"partition {key} is active" for key in active] + [
            f"an intent to {intent.goal} partition {intent.id} is on disk" for intent in intents
        ]

    @staticmethod
    def _is_left(cards: frozenset[str], needed: Sequence[frozenset[str]], in_use: set[str]) -> bool:
        return cards not in needed and cards.isdisjoint(in_use)


@final
class MemoryManager:
    """The command as one daemon runs it. Implements `ports.partitions.FabricManager`."""

    def __init__(self, fabric: Fabric, daemon: str) -> None:
        self._fabric = fabric
        self._daemon = daemon

    async def act(self, goal: Goal, partition: PartitionId) -> None:
        """Implement `ports.partitions.FabricManager.act`."""
        await self._fabric.run(self._daemon, _Process(str(goal), str(partition)), PARTITION_ACT_S)

    async def read(self) -> KnownSets:
        """Implement `ports.node.SetsReader.read`, as `PartitionCommand` does."""
        process = _Process(QUERY)
        await self._fabric.run(self._daemon, process, PARTITIONS_QUERY_S)
        listed, problems = partitions(LISTED_BY, process.listed)
        return KnownSets(partitions=listed, problems=problems)


@final
class MemoryIntents:
    """The file of intents of every daemon of the node. Implements `ports.partitions.PartitionIntentsFile`."""

    def __init__(self) -> None:
        self.stored: tuple[Intent, ...] = ()
        """What is on disk, of this boot."""
        self.is_full = False
        """Nothing can be written."""

    def reboot(self) -> None:
        """The file is of another boot now."""
        self.stored = ()

    async def read(self) -> tuple[Intent, ...]:
        """Implement `PartitionIntentsFile.read`."""
        await trio.lowlevel.checkpoint()
        return self.stored

    async def write(self, intents: Sequence[Intent]) -> None:
        """Implement `PartitionIntentsFile.write`."""
        await trio.lowlevel.checkpoint()
        if self.is_full:
            raise StateFileError("cannot write partitions.json: no space is left; it is tried again")
        self.stored = tuple(intents)
