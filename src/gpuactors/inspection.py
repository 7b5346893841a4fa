"""What `gpuactors inspect` and `gpuactors explain` show: the running daemon's view, or else one look of our own.

Our own look is judged by the same core that the daemon runs, from the same three sides: sysfs, kubelet's ledger, the
use of the groups. It opens no device and knows no history. Must not write anything anywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

import trio

from gpuactors.app import settings_of, sysfs_of
from gpuactors.config import Config
from gpuactors.control.client import read_status
from gpuactors.control.unix import socket_path
from gpuactors.control.view import Change, DeviceView, Member, NodeView, view_of
from gpuactors.core.events import Event, GroupsObserved, HostScanned, LedgerRead, LedgerUnreadable
from gpuactors.core.model import NodeState
from gpuactors.core.snapshot import project
from gpuactors.core.step import initial_state, step
from gpuactors.host.reader import ThreadedReader
from gpuactors.host.root import HostRoot
from gpuactors.host.use import SysfsUse
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.ports import ControlError, KubeletError, LedgerReader, UseReader

NO_DEVICES: Final = "No PCI function on this node is chosen by the selectors (see gpuactors config show)."

_ROUNDS: Final = 8
"""Reads and polls of our own look: the first of each, and what the core asks for because of what they found."""


class UnknownAddressError(Exception):
    """There is no such device; the text says which there are."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """A view of the node, and whose it is."""

    view: NodeView
    by_daemon: bool
    source: str
    """Whose view it is, in words."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One device of a view."""

    device: DeviceView
    inspected: Inspected


def inspect(config: Config) -> Inspected:
    """The running daemon's view of the node, or our own. Raises `ports.HostError` if the node cannot be looked at."""
    return trio.run(inspected, config)


def explain(config: Config, address: str) -> Explained:
    """What is known of one device; `address` may lack the PCI domain (`23:00.0`).

    Raises `UnknownAddressError`, and `ports.HostError` as `inspect`.
    """
    found = inspect(config)
    try:
        return Explained(find(found.view, address), found)
    except UnknownAddressError as exc:
        if found.by_daemon:
            raise
        # In a pod the daemon has its settings as arguments, which this command does not know.
        raise UnknownAddressError(f"{exc}\nlooked at by {found.source}") from None


async def inspected(config: Config) -> Inspected:
    """As `inspect`."""
    try:
        running = await read_status(socket_path(str(config.state_dir)))
    except ControlError as exc:
        return Inspected(
            await _look(config), False, f"this command itself, as no daemon could be asked: {exc}"
        )
    return Inspected(
        running.view, True, f"the running daemon (process {running.pid}, version {running.version})"
    )


async def _look(config: Config) -> NodeView:
    ledger = KubeletLedger(str(config.kubelet_dir))
    use = SysfsUse(HostRoot(str(config.host_root)), "proc" if config.holders == "proc" else "passive")
    functions = await ThreadedReader(sysfs_of(config)).scan()
    state = initial_state(settings_of(config))
    number = project(state).looks.scan
    assert number is not None
    event: Event | None = HostScanned(number, functions)
    for _ in range(_ROUNDS):
        if event is None:
            break
        state, _effects = step(state, event, trio.current_time())
        event = await _answer(state, ledger, use)
    # This command listens for no uevents, and misses none: it has just looked.
    return replace(view_of(state, trio.current_time()), uevents_problem="")


async def _answer(state: NodeState, ledger: LedgerReader, use: UseReader) -> Event | None:
    """What the core wants to know next."""
    wanted = project(state)
    if wanted.ledger.read is not None:
        try:
            contents = await ledger.read()
        except KubeletError as exc:
            return LedgerUnreadable(wanted.ledger.read, str(exc))
        return LedgerRead(
            wanted.ledger.read,
            contents.source,
            contents.entries,
            contents.claims,
            contents.settling,
            cached=contents.cached,
            damaged=contents.damaged,
        )
    if wanted.poll.poll is not None:
        return GroupsObserved(wanted.poll.poll, await use.observe(wanted.poll.targets))
    return None


def find(view: NodeView, address: str) -> DeviceView:
    """The device at `address`. Raises `UnknownAddressError`."""
    wanted = address.strip().lower()
    full = wanted if wanted.count(":") == 2 else f"0000:{wanted}"
    fitting = [d for d in view.devices if d.address == full] or [
        d for d in view.devices if d.address.partition(":")[2] == wanted
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UnknownAddressError(f"{address} is in several PCI domains: say which of {_addresses(fitting)}")
    for device in view.devices:
        if any(member.address in (wanted, full) for member in device.group):
            raise UnknownAddressError(
                f"{address} is no GPU that the selectors choose, but in the IOMMU group of {device.address}: "
                "explain that one"
            )
    if not view.devices:
        raise UnknownAddressError(f"there is no GPU at {address}. {NO_DEVICES}")
    raise UnknownAddressError(f"there is no GPU at {address}; there are {_addresses(view.devices)}")


def _addresses(devices: tuple[DeviceView, ...] | list[DeviceView]) -> str:
    return ", ".join(device.address for device in devices)


# --- inspect ----------------------------------------------------------------------------------------------


def as_json(found: Inspected) -> str:
    """`{"devices": [{"address", …}], "uevents_problem"}`, the same whoever looked."""
    known = {
        "devices": [_as_dict(device) for device in _present(found)],
        "uevents_problem": found.view.uevents_problem or None,
    }
    return json.dumps(known, indent=2)


def _present(found: Inspected) -> list[DeviceView]:
    return [device for device in found.view.devices if device.present]


def _as_dict(device: DeviceView) -> dict[str, object]:
    return {
        "address": device.address,
        "vendor": device.vendor,
        "device": device.device,
        "class": device.class_code,
        "driver": device.driver,
        "iommu_group": device.iommu_group,
        "group_members": [member.address for member in device.group],
        "numa_node": device.numa_node,
        "model": device.model,
        "resource": device.resource,
        "health": device.health,
        "reason": device.reason,
    }


_COLUMNS = ("ADDRESS", "ID", "DRIVER", "GROUP", "NUMA", "RESOURCE", "HEALTH", "REASON")


def as_table(found: Inspected) -> str:
    """One line per device, columns aligned; above them why changes are found late, if they are."""
    devices = _present(found)
    problem = found.view.uevents_problem
    header = [f"uevents: {problem}", ""] if problem else []
    if not devices:
        return "\n".join([*header, NO_DEVICES])
    rows = [_COLUMNS, *(_row(device) for device in devices)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*header, *lines])


def _row(device: DeviceView) -> tuple[str, ...]:
    return (
        device.address,
        f"{device.vendor}:{device.device}",
        device.driver or "-",
        "-" if device.iommu_group is None else str(device.iommu_group),
        "-" if device.numa_node is None else str(device.numa_node),
        device.resource,
        device.health,
        device.reason,
    )


# --- explain ----------------------------------------------------------------------------------------------


def explanation_json(explained: Explained) -> str:
    """Everything that is known of the device, as one object."""
    device, view = explained.device, explained.inspected.view
    resource = next((r for r in view.resources if r.name == device.resource), None)
    known: dict[str, Any] = {
        **_as_dict(device),
        "id": device.id,
        "present": device.present,
        "remedy": device.remedy,
        "owner": device.owner,
        "holders": [{"pid": h.pid, "command": h.command, "pod_uid": h.pod_uid} for h in device.holders],
        "group": [{"address": m.address, "driver": m.driver} for m in device.group],
        "registered": resource.registered if resource is not None else None,
        "registration_problem": (resource.problem or None) if resource is not None else None,
        "ledger_problem": view.ledger_problem or None,
        "kubelet_problem": view.kubelet_problem or None,
        "uevents_problem": view.uevents_problem or None,
        "history": [
            {"age_s": round(c.age_s, 1), "health": c.health, "reason": c.reason} for c in device.history
        ],
        "source": "daemon" if explained.inspected.by_daemon else "look",
    }
    del known["group_members"]
    return json.dumps(known, indent=2)


def explanation(explained: Explained) -> str:
    """The one reason in a sentence, then who has the device, where it stands, and what was said of it before."""
    device = explained.device
    facts = [
        ("To do", device.remedy),
        ("Owner", device.owner or "nobody: kubelet has given it to no pod"),
        *(("Held by", str(holder)) for holder in device.holders),
        ("IOMMU group", _group(device)),
        ("Resource", _resource(device, explained.inspected)),
        ("Kubelet's ID", device.id),
        ("NUMA node", "none" if device.numa_node is None else str(device.numa_node)),
        ("Kubelet", explained.inspected.view.kubelet_problem or None),
        ("Ledger", explained.inspected.view.ledger_problem or None),
        ("Uevents", explained.inspected.view.uevents_problem or None),
        *(("Before", line) for line in _history(device.history)),
        ("Seen by", explained.inspected.source),
    ]
    width = max(len(name) for name, _ in facts)
    lines, last = [_title(device), f"{device.health}: {device.reason}", ""], ""
    for name, fact in facts:
        if fact is not None:
            lines.append(f"{'' if name == last else name:{width}}  {fact}")
            last = name
    return "\n".join(lines)


def _title(device: DeviceView) -> str:
    if not device.present:
        return f"{device.address}  (not on this node any more)"
    return f"{device.address}  {device.model or 'unknown model'} ({device.vendor}:{device.device})"


def _group(device: DeviceView) -> str | None:
    if not device.present:
        return None
    if device.iommu_group is None:
        return "none"
    return f"{device.iommu_group}: " + ", ".join(_member(member) for member in device.group)


def _member(member: Member) -> str:
    return f"{member.address} ({member.driver or 'no driver'})"


def _resource(device: DeviceView, found: Inspected) -> str | None:
    if not device.resource:
        return None
    if not found.by_daemon:
        return device.resource
    resource = next((r for r in found.view.resources if r.name == device.resource), None)
    if resource is None:
        return f"{device.resource}, which kubelet is not told of"
    if resource.registered:
        return f"{device.resource}, registered with kubelet"
    return f"{device.resource}, not registered with kubelet: {resource.problem or 'it is being registered'}"


def _history(history: tuple[Change, ...]) -> list[str]:
    """The newest first, in columns."""
    rows = [(age(c.age_s), c.health or "not listed", c.reason) for c in reversed(history)]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return [f"{when:<{widths[0]}}  {health:<{widths[1]}}  {reason}" for when, health, reason in rows]


def age(seconds: float) -> str:
    """How long ago, in the largest unit that is not 0."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "just now"
