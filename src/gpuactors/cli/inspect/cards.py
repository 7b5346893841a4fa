"""Cards that are given away in parts: each PCI function with its virtual functions and vGPUs, for `inspect` and
`explain`.

Must not decide anything: which device is a part of which one comes from the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from gpuactors.cli.inspect import claims_report
from gpuactors.cli.inspect.claims_report import wrapped
from gpuactors.control.view import CardView, DeviceView, NodeView
from gpuactors.core.values.quote import first_of

COLUMNS: Final = ("ADDRESS", "DRIVER", "GROUP", "NUMA", "HEALTH", "CAUSE", "OWNER")
"""The columns of a part. Its resource and profile are above it, and the reasons below: a part has one line."""

PARENT: Final = "PART OF"
"""The column of a part whose parent is not the card itself, but another part of it."""


class Card(Struct, frozen=True):
    """A PCI function with its parts."""

    address: str
    itself: DeviceView | CardView | None
    """None if the daemon does not know the function."""
    parts: tuple[DeviceView, ...]
    """All devices below it, also those that are parts of its parts; sorted by resource and address."""


def cards_of(view: NodeView, devices: Iterable[DeviceView]) -> tuple[Card, ...]:
    """Return the cards with a part among `devices`, sorted by address."""
    parents = {card.address: card.parent for card in view.cards} | {d.address: d.parent for d in view.devices}
    parts: dict[str, list[DeviceView]] = {}
    for device in devices:
        if device.parent is not None:
            parts.setdefault(_root(device.parent, parents), []).append(device)
    known = {function.address: function for function in _functions(view)}
    return tuple(
        Card(address, known.get(address), tuple(sorted(below, key=lambda d: (d.resource, d.address))))
        for address, below in sorted(parts.items())
    )


def _functions(view: NodeView) -> tuple[DeviceView | CardView, ...]:
    return (*view.cards, *view.devices)


def _root(address: str, parents: Mapping[str, str | None]) -> str:
    passed = {address}
    while (parent := parents.get(address)) is not None and parent not in passed:
        passed.add(parent)
        address = parent
    return address


def title(card: Card, view: NodeView) -> str:
    """Return the card with its driver, and why it is not offered itself."""
    itself = card.itself
    if itself is None:
        return f"Card {card.address}"
    name = f"Card {card.address}  {described(itself)}, on {itself.driver or 'no driver'}"
    if isinstance(itself, CardView):
        return f"{name}; no selector matches the card itself"
    return f"{name}; the card itself is {claims_report.listing(itself)}: {claims_report.reason(itself, view)}"


def described(function: DeviceView | CardView) -> str:
    """Return a function's model with its ids."""
    return f"{function.model or 'unknown model'} ({function.vendor}:{function.device})"


def counted(parts: Sequence[DeviceView]) -> str:
    """Return how many there are, how many of them are well, and how many have an owner."""
    owned = sum(part.owner is not None for part in parts)
    listings = [claims_report.listing(part) for part in parts]
    states = ", ".join(f"{listings.count(word)} {word}" for word in sorted(set(listings)))
    return f"{len(parts)} part{'s' * (len(parts) != 1)}: {states}" + (
        f"; {owned} with an owner" if owned else ""
    )


def by_resource(parts: Iterable[DeviceView]) -> dict[tuple[str, str], list[DeviceView]]:
    """Return the parts of each resource and profile, in their order."""
    groups: dict[tuple[str, str], list[DeviceView]] = {}
    for part in parts:
        groups.setdefault((part.resource, part.profile or ""), []).append(part)
    return groups


def names_of_columns(card: Card, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns with these names, and the one of the parents if a part has another one than the card."""
    has_others = any(part.parent != card.address for part in card.parts)
    return (names[0], PARENT, *names[1:]) if has_others else tuple(names)


def reasons(parts: Iterable[DeviceView], view: NodeView, columns: int) -> list[str]:
    """Return why parts are not well: each reason once, with the parts that have it."""
    having: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        if claims_report.listing(part) not in claims_report.WELL:
            having.setdefault((part.cause, claims_report.reason(part, view)), []).append(part.address)
    lines = []
    for (cause, reason), addresses in sorted(having.items()):
        lines += wrapped(f"{cause}: {reason} ({', '.join(first_of(addresses))})", columns, indent=4)
    return lines


def places(parts: Iterable[DeviceView], cards: Iterable[Card]) -> str:
    """Return how many of these parts each card has: `0000:3b:00.0 (4), 0000:5e:00.0 (2)`."""
    own = {part.address for part in parts}
    counts = {card.address: sum(part.address in own for part in card.parts) for card in cards}
    return ", ".join(f"{address} ({count})" for address, count in counts.items() if count)


def in_order(devices: Iterable[DeviceView]) -> list[tuple[DeviceView, int]]:
    """Return the devices by address, each part behind its parent, with the number of its parents among them."""
    by_address = {device.address: device for device in devices}

    def line_of(device: DeviceView) -> tuple[str, ...]:
        line = [device.address]
        while (parent := by_address.get(line[0])) is not None and parent.parent is not None:
            if parent.parent in line:
                break
            line.insert(0, parent.parent)
        return tuple(line)

    lines = {address: line_of(device) for address, device in by_address.items()}
    ordered = sorted(by_address.values(), key=lambda device: lines[device.address])
    return [(d, sum(address in by_address for address in lines[d.address][:-1])) for d in ordered]


# --- of one device ----------------------------------------------------------------------------------------


def parent_of(device: DeviceView, view: NodeView) -> str | None:
    """Return the function that a device is a part of, with its model and driver; None if it is a part of none."""
    if device.parent is None:
        return None
    function = next((f for f in _functions(view) if f.address == device.parent), None)
    if function is None:
        return device.parent
    return f"{device.parent}, {described(function)}, on {function.driver or 'no driver'}"


def parts_of(address: str, view: NodeView) -> tuple[DeviceView, ...]:
    """Return all devices below a function, sorted by resource and address."""
    parents = {device.address: device.parent for device in view.devices}
    below = {address}
    while more := {part for part, parent in parents.items() if parent in below} - below:
        below |= more
    parts = (d for d in view.devices if d.address in below and d.address != address)
    return tuple(sorted(parts, key=lambda d: (d.resource, d.address)))


def part_lines(address: str, view: NodeView) -> list[str]:
    """Return the lines of `explain` about the parts of a function: by resource and profile, then each part."""
    lines = []
    for (resource, profile), parts in by_resource(parts_of(address, view)).items():
        named = f"{resource} ({profile})" if profile else resource
        lines.append(f"{named}: {counted(parts)}")
        lines += [
            f"  {part.address}, {claims_report.listing(part)}: {claims_report.reason(part, view)}"
            for part in parts
        ]
    return lines


def card_dict(card: CardView) -> dict[str, str | None]:
    """Return a card for JSON."""
    return {
        "address": card.address,
        "vendor": card.vendor,
        "device": card.device,
        "model": card.model,
        "driver": card.driver,
        "parent": card.parent,
    }
