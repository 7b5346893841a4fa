"""The functions whose `enable` is evidence of an open descriptor, and the value that it is compared with.

`enable` counts every enabling of a function (drivers/pci/pci.c, pci_enable_device): by vfio-pci while a process has it
open, but also by an operator, by any other driver, and by the kernel, which enables the bridges above a device and
never disables them again (pci_enable_bridge). So it is evidence only for functions on a vfio driver, and for those that
are leaving one: their unbind waits for the process that has them open, and their driver's link is gone meanwhile. It is
compared with its value while no process had the function open, the baseline. A baseline ends with the binding under
which it was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Final, TypeVar

from msgspec.structs import replace

from gpuactors.core.events.host import HostChanged
from gpuactors.core.state import NodeState, with_polls
from gpuactors.core.values.inventory import ids_of, is_selected
from gpuactors.core.values.model import (
    DeviceKey,
    GroupUse,
    PciAddress,
    PciFunction,
    Polls,
    device_key,
    function_address,
)

_K = TypeVar("_K", bound=str)

BRIDGE_CLASSES: Final = ("0604", "0607", "0609")
"""Functions with a bridge's header, which no vfio driver takes (drivers/vfio/pci/vfio_pci_core.c,
vfio_pci_core_register_device)."""

_RELEASED: Final = frozenset({"unbind pci", "remove pci"})
"""Uevents that come when the driver has released the function (drivers/base/dd.c, __device_release_driver)."""


def changed_functions(before: NodeState, state: NodeState) -> set[PciAddress]:
    """Return the functions that were added, removed or changed since."""
    return _changed(before.host.functions, state.host.functions)


def changed_mediated(before: NodeState, state: NodeState) -> set[DeviceKey]:
    """Return the mediated devices that were added, removed or changed since."""
    return _changed(before.host.mediated, state.host.mediated)


def _changed(before: Mapping[_K, object], now: Mapping[_K, object]) -> set[_K]:
    if before == now:
        return set()
    return {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}


def rebound(before: NodeState, state: NodeState, moved: Set[PciAddress]) -> NodeState:
    """Discard, for changed functions (`moved`), the observations of an earlier binding, or of another function at the
    address.

    A daemon that starts while an unbind waits does not know which functions were on a vfio driver. So a selected
    function that is first seen on no driver, with its group's node there, is treated as leaving until a poll has seen
    it closed. Its companions are not: a process that has them open has the GPU's group open as well, and any program
    may have raised their count. A function that no selector chooses is treated as leaving too, once kubelet's ledger
    shows it allocated to a pod.
    """
    new_names = state.kubelet.resolved.keys() - before.kubelet.resolved.keys()
    if not (moved or new_names):
        return state
    leaving, stale = set(state.host.polls.leaving), set()
    for name in new_names:
        function = state.host.functions.get(function_address(state.kubelet.resolved[name].key))
        if function is not None and function.has_node and _may_be_left(state, function):
            leaving.add(function.address)
    for address in moved:
        was, now = before.host.functions.get(address), state.host.functions.get(address)
        if was is None or now is None or _is_rebound(was, now):
            leaving.discard(address)
            stale.add(address)
        if now is not None and (_may_be_left(state, now) if was is None else _is_left(was, now)):
            leaving.add(address)
        if now is None or not now.has_node:
            leaving.discard(address)
    return _forgotten(state, frozenset(leaving), stale - leaving, stale)


def released(state: NodeState, event: HostChanged) -> NodeState:
    """Discard the observations of a function that a driver has released: it may be bound again before it is inspected.

    A function that was inspected on no driver and is still leaving stays so: the uevent may be a late one of the
    unbind before, from a host driver for a claim. A poll shows when the process has closed it.
    """
    if event.address is None or event.cause not in _RELEASED or event.address in state.host.polls.leaving:
        return state
    gone = {event.address}
    return _forgotten(state, state.host.polls.leaving, gone, gone)


def learned(polls: Polls, enabled: Mapping[PciAddress, int], active: frozenset[PciAddress]) -> Polls:
    """Learn from a poll: a suspended function has no open descriptor, so its count is the baseline, whatever raised it.
    A function that was leaving a vfio driver has left it when no process has it open any more.

    If the binding of a function has changed since the poll was requested, its count may be that of the old binding.
    """
    sure = {a: n for a, n in enabled.items() if a not in polls.doubtful}
    baselines = {**polls.baselines, **{a: n for a, n in sure.items() if a not in active}}
    closed = {a for a in polls.leaving & sure.keys() if sure[a] <= baselines.get(a, 0)}
    return replace(
        polls,
        baselines={a: n for a, n in baselines.items() if n and a not in closed},
        leaving=polls.leaving - closed,
        doubtful=frozenset(),
    )


def only(state: NodeState, uses: Iterable[GroupUse]) -> list[GroupUse]:
    """Reduce `uses` to the counts that are evidence."""
    functions, leaving = state.host.functions, state.host.polls.leaving

    def is_evidence(address: PciAddress) -> bool:
        function = functions.get(address)
        return (function is not None and function.vfio_bound) or address in leaving

    evident = []
    for use in uses:
        enabled = {a: n for a, n in use.enabled.items() if is_evidence(a)}
        evident.append(use if len(enabled) == len(use.enabled) else replace(use, enabled=enabled))
    return evident


def _is_rebound(was: PciFunction, now: PciFunction) -> bool:
    return was.driver != now.driver or _is_another(was, now)


def _is_another(was: PciFunction, now: PciFunction) -> bool:
    """Return whether another model is there. A function whose ids could not be read is treated as the same model."""
    ids = ids_of(was), ids_of(now)
    return "" not in ids and ids[0] != ids[1]


def _is_left(was: PciFunction, now: PciFunction) -> bool:
    """Return whether a vfio driver was asked to release it: the unbind may wait for the process that has it open."""
    return was.vfio_bound and now.driver is None and not _is_another(was, now)


def _may_be_left(state: NodeState, function: PciFunction) -> bool:
    """Return whether a function that is first seen may be leaving: it is on no driver, and is selected or allocated to
    a pod by a name of gpuactors."""
    if function.driver is not None or function.class_code.startswith(BRIDGE_CLASSES):
        return False
    return is_selected(state.daemon.settings.selectors, function) or any(
        resolved.key == device_key(function.address) and resource in state.published.served
        for (resource, _), resolved in state.kubelet.resolved.items()
    )


def _forgotten(
    state: NodeState,
    leaving: frozenset[PciAddress],
    baselines: set[PciAddress],
    doubtful: set[PciAddress],
) -> NodeState:
    polls = state.host.polls
    if not doubtful and leaving == polls.leaving:
        return state
    return with_polls(
        state,
        replace(
            polls,
            leaving=leaving,
            baselines={a: n for a, n in polls.baselines.items() if a not in baselines},
            doubtful=polls.doubtful | doubtful if polls.refresh.outstanding is not None else frozenset(),
        ),
    )
