"""The table: every kind of event by its name."""

from __future__ import annotations

from collections.abc import Iterable, Set
from difflib import get_close_matches
from enum import StrEnum
from itertools import chain
from typing import Final

from tests.histories import (
    administrator_events,
    dead_events,
    domain_events,
    egm_events,
    fabric_events,
    kata_events,
    part_events,
    set_events,
)
from tests.histories.administrator import ADMINISTERED
from tests.histories.administrator_events import ADMINISTRATOR_KINDS
from tests.histories.claim_events import BESIDE, CLAIM_KINDS, OF_ANY_DRIVER
from tests.histories.claims import CLAIMS
from tests.histories.config_events import CONFIG_KINDS
from tests.histories.daemon_events import DAEMON_KINDS
from tests.histories.dead import DEAD
from tests.histories.dead_events import DEAD_KINDS
from tests.histories.domain_events import DOMAIN_KINDS
from tests.histories.domains import DOMAINS
from tests.histories.egm import EGM
from tests.histories.egm_events import EGM_KINDS
from tests.histories.fabric import FABRIC
from tests.histories.fabric_events import FABRIC_KINDS, PAIR_CLAIMED
from tests.histories.group_events import GROUP_KINDS
from tests.histories.host_events import HOST_KINDS
from tests.histories.kata import KATA
from tests.histories.kata_events import KATA_KINDS
from tests.histories.kinds import Kind, can_follow, that_can_happen
from tests.histories.kubelet_events import KUBELET_KINDS
from tests.histories.ledger_events import LEDGER_KINDS
from tests.histories.move_events import MOVE_KINDS
from tests.histories.node_events import NODE_KINDS, REBOOTS_WITH_ANOTHER
from tests.histories.other_plugin_events import NEIGHBOUR_KINDS
from tests.histories.part_events import PART_KINDS
from tests.histories.script import Script, ScriptError
from tests.histories.set_events import SET_KINDS
from tests.histories.sets import SETS
from tests.histories.vgpu_events import MDEV_OPENED, OF_PARTS_CLAIMED, VGPU_KINDS, VGPU_OPENED
from tests.histories.world import PARTS, VGPUS

ALL: Final = (
    *HOST_KINDS,
    *GROUP_KINDS,
    *NODE_KINDS,
    *KUBELET_KINDS,
    *LEDGER_KINDS,
    *NEIGHBOUR_KINDS,
    *DAEMON_KINDS,
    *CLAIM_KINDS,
    *MOVE_KINDS,
    *DOMAIN_KINDS,
    *ADMINISTRATOR_KINDS,
    *PART_KINDS,
    *VGPU_KINDS,
    OF_PARTS_CLAIMED,
    *SET_KINDS,
    *CONFIG_KINDS,
    *FABRIC_KINDS,
    PAIR_CLAIMED,
    *DEAD_KINDS,
    *KATA_KINDS,
    *EGM_KINDS,
)
"""Every kind, in a fixed order."""

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in ALL}
"""By name, in that order."""

NOT_DRAWN: Final[frozenset[str]] = frozenset()
"""Kinds that find faults that are not repaired yet: scripts may name them, campaigns leave them out. Should be
empty."""

OF_CLAIMS: Final[frozenset[str]] = frozenset(kind.name for kind in (*CLAIM_KINDS, *MOVE_KINDS))
"""Only on a node with claims, as a part of a campaign's are (`--claims-every`)."""

OF_DOMAINS: Final[frozenset[str]] = frozenset(kind.name for kind in DOMAIN_KINDS)
"""Only on a node with compute domains (`--domains-every`)."""

OF_ADMINISTRATORS: Final[frozenset[str]] = frozenset(kind.name for kind in ADMINISTRATOR_KINDS)
"""Only on a node with claims and a second administrator (`--administrators-every`)."""

OF_PARTS: Final[frozenset[str]] = frozenset(kind.name for kind in PART_KINDS)
"""Only on a node with cards that can have virtual functions (`--parts-every`)."""

OF_VGPUS: Final[frozenset[str]] = frozenset(kind.name for kind in (*VGPU_KINDS, OF_PARTS_CLAIMED))
"""Only on a node that has vGPUs as well (`--vgpus-every`)."""

OF_SETS: Final[frozenset[str]] = frozenset(kind.name for kind in (*SET_KINDS, *CONFIG_KINDS))
"""Only on a node with sets of devices (`--sets-every`)."""

OF_FABRIC: Final[frozenset[str]] = frozenset(kind.name for kind in (*FABRIC_KINDS, PAIR_CLAIMED))
"""Only on a node that activates partitions of an NVLink fabric (`--fabrics-every`)."""

OF_DEAD: Final[frozenset[str]] = frozenset(kind.name for kind in DEAD_KINDS)
"""Only on a node whose cards can die (`--dead-every`)."""

OF_KATA: Final[frozenset[str]] = frozenset(kind.name for kind in KATA_KINDS)
"""Only on a node whose daemons answer by CDI names (`--kata-every`)."""

OF_EGMS: Final[frozenset[str]] = frozenset(kind.name for kind in EGM_KINDS)
"""Only on a node of Grace superchips (`--egms-every`)."""


def _drawn(*names: Iterable[str], but: Set[str] = frozenset()) -> dict[str, Kind]:
    """Return the kinds of these names that campaigns draw, in the order of KINDS."""
    wanted = {*chain(*names)} - but - NOT_DRAWN
    return {k.name: k for k in that_can_happen(k for k in KINDS.values() if k.name in wanted)}


DRAWN: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in that_can_happen(
        k
        for k in KINDS.values()
        if k.name
        not in NOT_DRAWN
        | OF_CLAIMS
        | OF_DOMAINS
        | OF_ADMINISTRATORS
        | OF_PARTS
        | OF_VGPUS
        | OF_SETS
        | OF_FABRIC
        | OF_DEAD
        | OF_KATA
        | OF_EGMS
    )
}
"""The events that campaigns draw from, on a node that has neither claims of GPUs nor compute domains."""

DRAWN_WITH_CLAIMS: Final[dict[str, Kind]] = _drawn(BESIDE, OF_CLAIMS)
"""The same on a node with claims of GPUs."""

DRAWN_WITH_DOMAINS: Final[dict[str, Kind]] = _drawn(domain_events.BESIDE, OF_ANY_DRIVER, OF_DOMAINS)
"""The same on a node with compute domains."""

DRAWN_WITH_ADMINISTRATORS: Final[dict[str, Kind]] = _drawn(administrator_events.BESIDE, OF_ADMINISTRATORS)
"""The same on a node with claims of GPUs and a second administrator."""

DRAWN_WITH_PARTS: Final[dict[str, Kind]] = _drawn(part_events.BESIDE, OF_PARTS)
"""The same on a node with cards that can have virtual functions."""

DRAWN_WITH_VGPUS: Final[dict[str, Kind]] = _drawn(
    part_events.BESIDE, OF_PARTS, OF_VGPUS, but={OF_PARTS_CLAIMED.name}
)
"""The same on a node that has vGPUs as well."""

DRAWN_WITH_CLAIMED_VGPUS: Final[dict[str, Kind]] = _drawn(
    BESIDE,
    (kind.name for kind in CLAIM_KINDS),
    OF_VGPUS,
    part_events.CLAIMED,
    but={MDEV_OPENED, VGPU_OPENED, REBOOTS_WITH_ANOTHER},
)
"""The same on a node that has vGPUs and serves claims."""

DRAWN_WITH_SETS: Final[dict[str, Kind]] = _drawn(set_events.BESIDE, OF_SETS)
"""The same on a node with sets of devices."""

DRAWN_WITH_FABRIC: Final[dict[str, Kind]] = _drawn(fabric_events.BESIDE, OF_FABRIC, but={PAIR_CLAIMED.name})
"""The same on a node that activates partitions."""

DRAWN_WITH_CLAIMED_FABRIC: Final[dict[str, Kind]] = _drawn(fabric_events.BESIDE_WITH_CLAIMS, OF_FABRIC)
"""The same where the daemons serve claims as well."""

DRAWN_WITH_DEAD: Final[dict[str, Kind]] = _drawn(dead_events.BESIDE, OF_DEAD)
"""The same on a node whose cards can die."""

DRAWN_WITH_CLAIMED_DEAD: Final[dict[str, Kind]] = _drawn(dead_events.BESIDE_WITH_CLAIMS, OF_DEAD)
"""The same where the daemons serve claims as well."""

DRAWN_WITH_KATA: Final[dict[str, Kind]] = _drawn(kata_events.BESIDE, OF_KATA)
"""The same on a node whose daemons answer by CDI names."""

DRAWN_WITH_EGMS: Final[dict[str, Kind]] = _drawn(egm_events.BESIDE, OF_EGMS)
"""The same on a node of Grace superchips."""

Pair = tuple[str, str]


def pairs_of(kinds: dict[str, Kind]) -> frozenset[Pair]:
    """Every ordered pair of these kinds of which the second can come right after the first."""
    return frozenset((a.name, b.name) for a in kinds.values() for b in kinds.values() if can_follow(a, b))


PAIRS: Final = pairs_of(DRAWN)
PAIRS_WITH_CLAIMS: Final = pairs_of(DRAWN_WITH_CLAIMS)
PAIRS_WITH_DOMAINS: Final = pairs_of(DRAWN_WITH_DOMAINS)
PAIRS_WITH_ADMINISTRATORS: Final = pairs_of(DRAWN_WITH_ADMINISTRATORS)
PAIRS_WITH_PARTS: Final = pairs_of(DRAWN_WITH_PARTS)
PAIRS_WITH_VGPUS: Final = pairs_of(DRAWN_WITH_VGPUS)
PAIRS_WITH_CLAIMED_VGPUS: Final = pairs_of(DRAWN_WITH_CLAIMED_VGPUS)
PAIRS_WITH_SETS: Final = pairs_of(DRAWN_WITH_SETS)
PAIRS_WITH_FABRIC: Final = pairs_of(DRAWN_WITH_FABRIC)
PAIRS_WITH_CLAIMED_FABRIC: Final = pairs_of(DRAWN_WITH_CLAIMED_FABRIC)
PAIRS_WITH_DEAD: Final = pairs_of(DRAWN_WITH_DEAD)
PAIRS_WITH_CLAIMED_DEAD: Final = pairs_of(DRAWN_WITH_CLAIMED_DEAD)
PAIRS_WITH_KATA: Final = pairs_of(DRAWN_WITH_KATA)
PAIRS_WITH_EGMS: Final = pairs_of(DRAWN_WITH_EGMS)


class Serves(StrEnum):
    """The services of the daemons of a history's node beside the device plugin."""

    PLUGIN = "without claims"
    CLAIMS = "with claims"
    DOMAINS = "with compute domains"
    ADMINISTRATORS = "with claims and a second administrator"
    PARTS = "with parts of cards"
    VGPUS = "with vGPUs"
    CLAIMED_VGPUS = "with claims and vGPUs"
    SETS = "with sets of devices"
    FABRIC = "with partitions of a fabric"
    CLAIMED_FABRIC = "with claims and partitions of a fabric"
    DEAD = "with cards that die"
    CLAIMED_DEAD = "with claims and cards that die"
    KATA = "with CDI names"
    EGMS = "with Grace superchips"

    @property
    def bit(self) -> int:
        """The bits of a seed that decide it."""
        return {
            Serves.PLUGIN: 0,
            Serves.CLAIMS: CLAIMS,
            Serves.DOMAINS: DOMAINS,
            Serves.ADMINISTRATORS: CLAIMS | ADMINISTERED,
            Serves.PARTS: PARTS,
            Serves.VGPUS: VGPUS,
            Serves.CLAIMED_VGPUS: CLAIMS | VGPUS,
            Serves.SETS: SETS,
            Serves.FABRIC: FABRIC,
            Serves.CLAIMED_FABRIC: CLAIMS | FABRIC,
            Serves.DEAD: DEAD,
            Serves.CLAIMED_DEAD: CLAIMS | DEAD,
            Serves.KATA: KATA,
            Serves.EGMS: EGM,
        }[self]

    @property
    def kinds(self) -> dict[str, Kind]:
        """The events to draw from."""
        return {
            Serves.PLUGIN: DRAWN,
            Serves.CLAIMS: DRAWN_WITH_CLAIMS,
            Serves.DOMAINS: DRAWN_WITH_DOMAINS,
            Serves.ADMINISTRATORS: DRAWN_WITH_ADMINISTRATORS,
            Serves.PARTS: DRAWN_WITH_PARTS,
            Serves.VGPUS: DRAWN_WITH_VGPUS,
            Serves.CLAIMED_VGPUS: DRAWN_WITH_CLAIMED_VGPUS,
            Serves.SETS: DRAWN_WITH_SETS,
            Serves.FABRIC: DRAWN_WITH_FABRIC,
            Serves.CLAIMED_FABRIC: DRAWN_WITH_CLAIMED_FABRIC,
            Serves.DEAD: DRAWN_WITH_DEAD,
            Serves.CLAIMED_DEAD: DRAWN_WITH_CLAIMED_DEAD,
            Serves.KATA: DRAWN_WITH_KATA,
            Serves.EGMS: DRAWN_WITH_EGMS,
        }[self]

    @property
    def pairs(self) -> frozenset[Pair]:
        """The pairs of these kinds that can follow each other."""
        return {
            Serves.PLUGIN: PAIRS,
            Serves.CLAIMS: PAIRS_WITH_CLAIMS,
            Serves.DOMAINS: PAIRS_WITH_DOMAINS,
            Serves.ADMINISTRATORS: PAIRS_WITH_ADMINISTRATORS,
            Serves.PARTS: PAIRS_WITH_PARTS,
            Serves.VGPUS: PAIRS_WITH_VGPUS,
            Serves.CLAIMED_VGPUS: PAIRS_WITH_CLAIMED_VGPUS,
            Serves.SETS: PAIRS_WITH_SETS,
            Serves.FABRIC: PAIRS_WITH_FABRIC,
            Serves.CLAIMED_FABRIC: PAIRS_WITH_CLAIMED_FABRIC,
            Serves.DEAD: PAIRS_WITH_DEAD,
            Serves.CLAIMED_DEAD: PAIRS_WITH_CLAIMED_DEAD,
            Serves.KATA: PAIRS_WITH_KATA,
            Serves.EGMS: PAIRS_WITH_EGMS,
        }[self]


def serves(seed: int) -> Serves:
    """By the seed of a history."""
    kinds = (
        Serves.CLAIMED_VGPUS,
        Serves.CLAIMED_FABRIC,
        Serves.CLAIMED_DEAD,
        Serves.ADMINISTRATORS,
        Serves.CLAIMS,
        Serves.DOMAINS,
        Serves.VGPUS,
        Serves.PARTS,
        Serves.SETS,
        Serves.FABRIC,
        Serves.DEAD,
        Serves.KATA,
        Serves.EGMS,
    )
    return next((kind for kind in kinds if seed & kind.bit == kind.bit), Serves.PLUGIN)


def check_names(script: Script) -> Script:
    """The script, if all its kinds are in the table. Raises `ScriptError`."""
    for step in script:
        if step.kind not in KINDS:
            raise ScriptError(f"there is no kind of event called {step.kind!r}; {_instead(step.kind)}")
    return script


def _instead(name: str) -> str:
    if close := get_close_matches(name, KINDS, cutoff=0.5):
        return f"is it {' or '.join(map(repr, close))}?"
    return f"there are {', '.join(KINDS)}"
