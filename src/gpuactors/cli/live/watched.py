"""The state of a command that watches: the daemon's last view, what changed in it and when, and whether the daemon is
there. Must not print, nor read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, final

from msgspec.structs import replace

from gpuactors.cli.inspect import claims_report
from gpuactors.cli.inspect.report import shown, totals
from gpuactors.cli.inspect.view import Inspected, by_running
from gpuactors.control.client import Running
from gpuactors.control.view import DeviceView, NodeView

_WELL: Final = "well again"

Row = tuple[str, ...]
"""The readable part of one thing: its name, its status, its cause, and the sentence; without ages."""


@final
class Watched:
    """The state of a command that watches. The command owns it; the screen reads it."""

    def __init__(self) -> None:
        self.running: Running | None = None
        """The daemon that was heard last; None before the first one."""
        self.heard_at = 0.0
        self.gone_since: float | None = None
        """The time since which no daemon is there; None while one is."""
        self.why_gone = ""
        self.last_change: tuple[float, str] | None = None
        """The time of the last change, and its words; None while none is known."""
        self._rows: Mapping[str, Row] = {}
        self._changed_at: dict[str, float] = {}

    def heard(self, running: Running, at: float) -> tuple[Row, ...]:
        """Take over what the daemon knows; return what changed since it, or its predecessor, was heard last."""
        rows, before = rows_of(running.view), self._rows
        changes = [row for key, row in rows.items() if before.get(key) != row]
        changes += [(row[0], "gone", "", "") for key, row in before.items() if key not in rows]
        if self.running is None:
            self._begin(running.view, at)
            changes = []
        elif (running.pid, running.version) != (self.running.pid, self.running.version):
            changes.insert(0, ("daemon", f"process {running.pid}, version {running.version}", "", ""))
        for key, row in rows.items():
            if self.running is not None and before.get(key) != row:
                self._changed_at[key] = at
        if changes:
            self.last_change = at, "  ".join(part for part in changes[0][:3] if part)
        self.running, self.heard_at, self._rows = running, at, rows
        self.gone_since, self.why_gone = None, ""
        return tuple(changes)

    def lost(self, since: float, why: str) -> bool:
        """Record that no daemon has been there since; return whether that is new."""
        is_new, self.gone_since, self.why_gone = self.gone_since is None, since, why
        return is_new

    def inspected(self, at: float, wall: float) -> Inspected:
        """Return the last view, with what this command saw of the age of each device's state. `wall`: the time of day
        now."""
        assert self.running is not None
        devices = tuple(replace(d, since_s=self.age(d.address, at)) for d in self.running.view.devices)
        view = replace(self.running.view, devices=devices)
        return by_running(replace(self.running, view=view), wall - (at - self.heard_at))

    def age(self, address: str, at: float) -> float | None:
        """Return the seconds since the device has been as it is; None if that is not known."""
        changed = self._changed_at.get(address, -math.inf)
        return at - changed if changed != -math.inf else None

    def _begin(self, view: NodeView, at: float) -> None:
        """Take over the daemon's own history of the time before it was watched."""
        dated = [(at - d.since_s, d) for d in view.devices if d.since_s is not None]
        self._changed_at = {device.address: then for then, device in dated}
        if dated:
            then, device = max(dated, key=lambda pair: pair[0])
            self.last_change = then, "  ".join(_device(device, view)[:3])


def rows_of(view: NodeView) -> dict[str, Row]:
    """Return each thing that can change, by a key of its own."""
    rows = {device.address: _device(device, view) for device in shown(view)}
    rows |= {f"resource {r.name}": (r.name, totals(r), "", "") for r in view.resources}
    for claims in view.drivers:
        for claim in claims.claims:
            rows[f"claim {claim.uid}"] = (f"claim {claim}", claim.state, "", claim.problem)
        if claims.problem:
            rows[f"driver {claims.driver}"] = (f"driver {claims.driver}", "not served", "", claims.problem)
    for domain in view.domains.domains if view.domains is not None else ():
        rows[f"domain {domain.uid}"] = (f"ComputeDomain {domain}", domain.status, "", domain.missing)
    for name, problem in view.problems[1:]:  # settings do not change
        rows[name] = (name, problem or _WELL, "", "")
    return rows


def _device(device: DeviceView, view: NodeView) -> Row:
    reason = claims_report.reason(device, view)
    return (device.address, claims_report.listing(device), device.cause, reason)
