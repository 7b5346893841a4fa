"""Events of the configuration file, which running daemons read again: other devices are chosen, or models have names of
the operator's.

Only on a node with sets, and the first one on a node with claims (`World.config`): a daemon follows at its watcher's
next look, and one that starts has the file as it is then.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from tests.histories.kinds import Kind, KindsOn
from tests.histories.node_events import NARROWED
from tests.histories.world import SELECTORS, ChangingConfig, World

_kind: Final[KindsOn[ChangingConfig]] = KindsOn(lambda world: world.config)


def _choose(world: World, config: ChangingConfig, _slot: int) -> None:
    whole = world.next_options.selectors is SELECTORS
    world.next_options = replace(world.next_options, selectors=NARROWED if whole else SELECTORS)
    config.change()


def _name(world: World, config: ChangingConfig, _slot: int) -> None:
    world.has_other_names = True
    world.next_options = replace(world.next_options, own_names=not world.next_options.own_names)
    config.change()


CHOOSES: Final = "the configuration file chooses other cards"
NAMES: Final = "the configuration file gives models other names"

CONFIG_KINDS: Final[tuple[Kind, ...]] = (_kind(CHOOSES, _choose), _kind(NAMES, _name))
"""Every kind of event of the file."""
