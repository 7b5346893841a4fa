"""Whether a claim could bind a GPU that is on its host's driver, checked before one is allocated.

A driver that is not loaded, a process of the host that has the GPU, or virtual functions are reasons not to offer it,
until a later check no longer finds them. A check does nothing to the GPU. It leaves out the GPUs of claims: their acts
report conflicts.

One check is outstanding at a time, of all GPUs that are due: each is a pass over all processes. If a GPU changes
meanwhile, its answer is discarded, and the next check includes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors.core.events.claims import FitnessChecked
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.gpus import Fitness, Gpus
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ActFault, FitnessCheck, FitnessFinding
from gpuactors.core.values.effects import Effect, Field, Level, Log
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.status import Reason

FITNESS_CHECK_S: Final = 60.0
"""60 s. The time between two checks whether a claim could bind a GPU on its host's driver."""

FITNESS_RETRY_S: Final = 15.0
"""15 s. The same time while it could not: the reason should go away soon after its cause. GPUs that are due within this
time are checked together, in one pass over all processes: at most five passes a minute, unless GPUs change."""

_REASONS: Final[Mapping[ActFault | None, Cause]] = {
    ActFault.IN_USE: Cause.IN_USE_ON_HOST,
    ActFault.NO_DRIVER: Cause.DRIVER_NOT_LOADED,
    ActFault.VIRTUAL_FUNCTIONS: Cause.VIRTUAL_FUNCTIONS,
}
"""The faults that a later claim would meet as well, as causes. Other faults concern one act only."""

_NEW: Final = Fitness()


def on_state_changed(before: NodeState, state: NodeState, gpus: Gpus) -> Gpus:
    """Follow the devices that are there now: check new and changed ones, forget those that are gone. Returns the same
    object if nothing changes."""
    devices, devices_before = state.index.devices, before.index.devices
    is_restarted = not before.gpus.claims.loaded  # the answer to an earlier check may never come
    if not gpus.claims.loaded or (
        devices_before == devices and not is_restarted and before.gpus.reserved == gpus.reserved
    ):
        return gpus
    unchanged = {a for a, device in devices.items() if not is_restarted and devices_before.get(a) == device}
    fitness = {
        address: earlier if address in unchanged else replace(earlier, due_at=0.0)
        for address, device in devices.items()
        if not device.has_backing or address in gpus.reserved
        if device.group is not None and Act.BIND in (kind := kind_of(device)).acts
        if kind.never_given(device) is None
        for earlier in (gpus.fitness.get(address, _NEW),)
    }
    check = gpus.fitness_check
    awaited = tuple(a for a in check.devices if a in fitness and a in unchanged) if check else ()
    check = replace(check, devices=awaited) if check and awaited else None
    return _planned(gpus, fitness, check)


def due(gpus: Gpus, at: float) -> Gpus:
    """Begin the next check if it is due. It includes GPUs that are due soon, so that GPUs that came at different times
    are soon checked together."""
    if gpus.check_at > at:
        return gpus
    by = at + FITNESS_RETRY_S
    devices = tuple(
        a for a, fitness in gpus.fitness.items() if fitness.due_at <= by and a not in gpus.reserved
    )
    number = gpus.claims.last + 1
    gpus = replace(gpus, claims=replace(gpus.claims, last=number))
    return _planned(gpus, gpus.fitness, FitnessCheck(number, devices))


def checked(gpus: Gpus, event: FitnessChecked, at: float) -> tuple[Gpus, list[Effect]]:
    """Record the answer to the outstanding check. Returns the log lines as well."""
    check = gpus.fitness_check
    if check is None or event.number != check.number:
        return gpus, []
    awaited = frozenset(check.devices)
    findings = [finding for finding in event.findings if finding.device in awaited]
    return with_findings(replace(gpus, fitness_check=None), findings, at)


def with_findings(gpus: Gpus, findings: Iterable[FitnessFinding], at: float) -> tuple[Gpus, list[Effect]]:
    """Record the findings of a check, or of an act of a claim. Returns the log lines as well."""
    fitness, lines = {**gpus.fitness}, list[Effect]()
    for finding in findings:
        if (before := fitness.get(finding.device)) is None:
            continue
        reason = before.bind_blocker
        if not finding.reason:
            reason = None
        elif (cause := _REASONS.get(finding.fault)) is not None:
            reason = Reason(cause, finding.reason)
        again_s = FITNESS_RETRY_S if reason is not None else FITNESS_CHECK_S
        fitness[finding.device] = Fitness(at + again_s, reason)
        lines += _logged(finding.device, before.bind_blocker, reason)
    return _planned(gpus, fitness, gpus.fitness_check), lines


def _planned(gpus: Gpus, fitness: Mapping[DeviceKey, Fitness], check: FitnessCheck | None) -> Gpus:
    waiting = (k.due_at for a, k in fitness.items() if a not in gpus.reserved) if check is None else ()
    return replace(gpus, fitness=fitness, fitness_check=check, check_at=min(waiting, default=math.inf))


def _logged(address: DeviceKey, before: Reason | None, reason: Reason | None) -> list[Effect]:
    if before == reason:
        return []
    if reason is None:
        return [Log(Level.INFO, "device.claimable", {"address": address})]
    level = Level.DEBUG if before is not None and before.cause is reason.cause else Level.WARNING
    fields: dict[str, Field] = {"address": address, "cause": str(reason.cause), "reason": reason.message}
    return [Log(level, "device.unclaimable", fields)]
