"""What a daemon can know of the groups of its cards when it lets a container start.

It inspects the cards after PreStartContainer has come, and again after a uevent of one of them, or after uevents were
missed. If a card has moved since, and no uevent of that was heard before the answer, the daemon cannot know. Must not
judge: `world.py` compares with the nodes that the container was started with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from gpuactors.core.events.deviceplugin import CallAbandoned, PreStartAsked
from gpuactors.core.events.host import HostChanged, UeventsLost, UeventsOpened
from gpuactors.core.values.effects import Reply
from gpuactors.core.values.model import Token
from gpuactors.ports.node import Step
from gpuactors_simulation.host.tree import HostTree
from tests.histories import vgpus


@final
class Starts:
    """Watches the steps of the daemons of one node."""

    def __init__(self, tree: HostTree) -> None:
        self._tree: Final = tree
        self._waiting: dict[tuple[str, Token], frozenset[str]] = {}
        """The devices of each PreStartContainer that is not answered yet."""
        self._groups: dict[str, tuple[int | None, str | None]] = {}
        """The group and vGPU type of each of these devices when the daemon last had a reason to inspect it before it
        answered."""

    def stepped(self, daemon: str, step: Step) -> None:
        """A daemon's core took an event."""
        match step.event:
            case PreStartAsked(token, _, devices):
                self._waiting[daemon, token] = frozenset(devices)
                self._note(devices)
            case HostChanged() as changed:
                self._note(self._waited_for(daemon) & {changed.address, changed.mediated})
            case UeventsOpened() | UeventsLost():
                self._note(self._waited_for(daemon))
            case CallAbandoned(token):
                self._waiting.pop((daemon, token), None)
            case _:
                pass
        for effect in step.effects:
            if isinstance(effect, Reply):
                self._waiting.pop((daemon, effect.token), None)

    def is_knowable(self, card: str) -> bool:
        """The daemon that let a container with this card start could know the group that the card is in now, and its
        vGPU type."""
        return card not in self._groups or self._groups[card] == self._group(card)

    def _waited_for(self, daemon: str) -> set[str]:
        return {device for (of, _), devices in self._waiting.items() if of == daemon for device in devices}

    def _note(self, cards: Iterable[str]) -> None:
        self._groups |= {card: self._group(card) for card in cards}

    def _group(self, card: str) -> tuple[int | None, str | None]:
        return vgpus.group_of(self._tree, card), vgpus.type_of(self._tree, card)
