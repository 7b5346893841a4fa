"""Acts of other processes in kubelet's directory: a second plugin for the same resource, and a monitor that reads the
list."""

from __future__ import annotations

from typing import Final

from gpuactors.core.values.model import ResourceName
from gpuactors.kubelet.kubelet import socket_name
from gpuactors_simulation.other_plugins import Bystander, OtherPlugin
from tests.histories.kinds import Flag, Kind, detail_of
from tests.histories.world import MODEL, World

SECOND_PLUGIN: Final = (
    "a second plugin takes our resource",
    "the second plugin sends its list",
    "the second plugin goes",
)
"""While one is there, kubelet's list may be that plugin's, and kubelet calls that plugin."""


def _listed(world: World) -> list[str]:
    """Kubelet's devices of our resource: the second plugin knows the same cards, and lists all of them as Healthy."""
    resource = world.resource(MODEL)
    rows = (row for row in world.kubelet.view.devices if row.resource == resource)
    return [row.id for row in rows if world.meaning(resource, row.id) is not None]


def _comes(world: World, slot: int) -> None:
    second = OtherPlugin(
        world.transport, world.resource(MODEL), _listed(world), stubborn=detail_of(slot) % 4 == 0
    )
    world.second = second

    async def run() -> None:
        try:
            await second.run()
        except Exception:  # kubelet has refused it, or has stopped: it ends
            pass
        finally:
            if world.second is second:
                world.second = None

    world.in_background(run)


def _sends(world: World, _slot: int) -> None:
    assert world.second is not None
    world.second.list(_listed(world))


def _goes(world: World, _slot: int) -> None:
    assert world.second is not None
    world.second.leave()


def _watches(world: World, slot: int) -> None:
    names = list(world.options.names.values())
    resource = names[detail_of(slot) % 3 if detail_of(slot) % 2 else 0]
    world.monitors += 1
    world.in_background(Bystander(world.transport, socket_name(ResourceName(resource), "")).run)


_THERE: Final = {Flag.SECOND_PLUGIN: True}

NEIGHBOUR_KINDS: Final = (
    Kind(
        SECOND_PLUGIN[0],
        lambda w, _s: w.kubelet_runs and w.second is None and bool(_listed(w)),
        _comes,
        needs={Flag.SECOND_PLUGIN: False, Flag.KUBELET_RUNS: True},
        leaves=_THERE,
    ),
    Kind(SECOND_PLUGIN[1], lambda w, _s: w.second is not None, _sends, needs=_THERE, leaves=_THERE),
    Kind(
        SECOND_PLUGIN[2],
        lambda w, _s: w.second is not None,
        _goes,
        needs=_THERE,
        may_bring={Flag.SECOND_PLUGIN: False},
    ),
    Kind("a monitor watches, and dials again first", lambda w, _s: w.monitors < 2, _watches),
)
"""Every kind of event that another process in kubelet's directory causes."""
