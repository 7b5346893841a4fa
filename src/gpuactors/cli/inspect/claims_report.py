"""Claims in the output of `gpuactors inspect` and `gpuactors explain`: as text, and as values for JSON.

Must not decide anything: what is said of a claim or a device comes from the daemon's view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from gpuactors.cli.output import folded
from gpuactors.control.view import (
    NOT_LISTED,
    BlockedView,
    ClaimsView,
    ClaimView,
    DeviceOfClaimsView,
    DeviceView,
    NodeView,
    SlicesView,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import Health
from gpuactors.core.values.quote import first_of
from gpuactors.core.values.reported import CLAIMED, OFFERED

MEANINGS: Final[Mapping[str, str]] = {
    ClaimState.FETCHING: "it is being read from the API server",
    ClaimState.WAITING: "another claim or pod, or a process, has one of its devices",
    ClaimState.RESERVED: "its devices are its own; that is being written to disk",
    ClaimState.BINDING: "its devices are being bound to a vfio driver",
    ClaimState.WRITING: "its CDI and metadata files are being written",
    ClaimState.COMMITTING: "all is done; that is being written to disk",
    ClaimState.PREPARED: "its containers may run",
    ClaimState.VERIFYING: "it was prepared, and kubelet asks again: its devices are being looked at",
    ClaimState.DRIFTED: "a device is not where its files said, so they were removed; they come back with the device",
    ClaimState.TAKEN_OVER: "NVIDIA's driver has prepared it: its devices stay its own until its pod has ended",
    ClaimState.STOPPED: "an act failed; its devices stay as they are, and its own, until kubelet asks again",
    ClaimState.RELEASING: "its files are being removed, and its devices returned",
    ClaimState.CLEARING: "it was unprepared; files that may be left of it are being removed",
    ClaimState.TOMBSTONE: "nothing of it is left",
}
"""The meaning of each state of a claim of GPUs."""


def lasted(seconds: float) -> str:
    """Return a duration in the largest unit that is not 0."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


OFFERS: Final[Mapping[str, str]] = {OFFERED: "offered to claims", CLAIMED: "claimed"}
"""The words for a device that nothing keeps from claims, by `DeviceOfClaimsView.offer`."""

WELL: Final = frozenset({str(Health.HEALTHY), *OFFERS.values()})
"""The words of `listing` for a device that nobody needs to look after."""


# --- of a device ------------------------------------------------------------------------------------------


def listing(device: DeviceView) -> str:
    """Return the device's health at kubelet, or what the device is to claims if it is not listed for the device
    plugin."""
    if device.listed:
        return device.health
    offer = device.for_claims.offer if device.for_claims is not None else ""
    return OFFERS.get(offer, NOT_LISTED)


def reason(device: DeviceView, view: NodeView) -> str:
    """Return the reason for what `listing` returns. What keeps a device from the device plugin's list does not keep it
    from claims."""
    dra = device.for_claims
    if device.listed or dra is None:
        return device.reason
    if dra.offer == OFFERED:
        return f"on {device.driver or 'no driver'}; a claim binds it to a vfio driver"
    claim = _claim_of(dra, view)
    if claim is not None:
        return f"claim {claim} has it ({claim.state})"
    return dra.blocked or device.reason


def device_facts(device: DeviceView, view: NodeView) -> list[tuple[str, str | None]]:
    """Return the lines of `explain` about a device and claims; none while DRA is off."""
    dra = device.for_claims
    if dra is None:
        return []
    claim = _claim_of(dra, view)
    return [
        ("Claim", _claim_text(claim, dra)),
        ("Claim", (claim.problem if claim is not None else dra.blocked) or None),
        ("At a claim's end", at_the_end(device, dra, claim)),
        *(
            ("Original driver", (o.driver or "none") + f" ({o.address})" * (o.address != device.address))
            for o in dra.first_drivers
        ),
    ]


def _claim_of(dra: DeviceOfClaimsView, view: NodeView) -> ClaimView | None:
    return view.claims.of(dra.claim_uid) if view.claims is not None else None


def _claim_text(claim: ClaimView | None, dra: DeviceOfClaimsView) -> str:
    if claim is not None:
        return f"{claim}, UID {claim.uid}: {claim.state} for {lasted(claim.age_s)}"
    offers = {
        OFFERED: "none; it is offered to claims",
        CLAIMED: "none any more; it is offered again when it has been seen on its driver",
        "": "none; it is not offered to claims",
    }
    return offers.get(dra.offer, "none; it is not to be given to a claim now, as it is " + dra.offer)


def at_the_end(device: DeviceView, dra: DeviceOfClaimsView, claim: ClaimView | None) -> str:
    """Return the fate of the device when its claim ends, and the reason."""
    if claim is not None and claim.state == ClaimState.TAKEN_OVER:
        return f"it stays on {device.driver or 'no driver'}: {dra.why}"
    if dra.stays:
        return f"it stays on its vfio driver: {dra.why}"
    driver = next((first.driver for first in dra.first_drivers if first.address == device.address), None)
    back = f"it is returned to {driver}" if driver is not None else "it is left without a driver"
    return f"{back}: {dra.why}"


def device_dict(device: DeviceView, view: NodeView) -> dict[str, Any] | None:
    """Return the values of `device_facts` for JSON; None while DRA is off."""
    dra = device.for_claims
    if dra is None:
        return None
    claim = _claim_of(dra, view)
    return {
        "claim": _brief(claim) if claim is not None else None,
        "offer": dra.offer or None,
        "blocked": dra.blocked or None,
        "stays_on_vfio": dra.stays,
        "rule": dra.rule or None,
        "why": dra.why,
        "first_drivers": {first.address: first.driver for first in dra.first_drivers},
    }


def _brief(claim: ClaimView) -> dict[str, Any]:
    return {
        "namespace": claim.namespace,
        "name": claim.name,
        "uid": claim.uid,
        "state": claim.state,
        "age_s": round(claim.age_s, 1),
        "problem": claim.problem or None,
    }


# --- of a node --------------------------------------------------------------------------------------------


About = tuple[str, str]
"""The UID of the claim or compute domain that a line is about, else ""; and the line."""


def about(uid: str, lines: Iterable[str]) -> list[About]:
    """Return the lines as lines about that claim or domain."""
    return [(uid, line) for line in lines]


def sections(claims: ClaimsView | None, columns: int) -> list[list[About]]:
    """Return the claims and the slices, each as the lines of one section of so many columns; nothing while DRA is
    off."""
    if claims is None:
        return []
    head = about("", [f"Claims of driver {claims.driver}" + ("" if claims.claims else ": none")])
    if claims.problem:
        head += about("", wrapped(claims.problem, columns, indent=2))
    for claim in claims.claims:
        head += about(claim.uid, claim_lines(claim, columns))
    return [head, about("", slices_lines(claims.slices, columns))]


def claim_lines(claim: ClaimView, columns: int, indent: int = 2, stated: str = "") -> list[str]:
    """Return a claim, and below it why it is not further, unless that is `stated` already."""
    devices = ", ".join(first_of(claim.devices)) or ("no device of its own" if claim.admin_devices else "")
    parts = [f"{claim}  {claim.state} for {lasted(claim.age_s)}", devices, *_remarks(claim)]
    lines = wrapped("  ".join(filter(None, parts)), columns, indent)
    return lines + (wrapped(claim.problem, columns, indent + 2) if claim.problem not in ("", stated) else [])


def _remarks(claim: ClaimView) -> list[str]:
    remarks = []
    if claim.admin_devices:
        remarks.append(f"(admin access to {', '.join(claim.admin_devices)})")
    if claim.waiting_calls:
        calls = "call of kubelet waits" if claim.waiting_calls == 1 else "calls of kubelet wait"
        remarks.append(f"({claim.waiting_calls} {calls})")
    return remarks


def slices_lines(slices: SlicesView | None, columns: int, title: str = "ResourceSlices") -> list[str]:
    """Describe the slices of a driver: the devices that the API server has stored."""
    if slices is None:
        return [f"{title}: nothing is known of them yet"]
    state = "as offered" if slices.settled else "being written"
    lines = [f"{title}: {slices.slices}, generation {slices.generation}, {state}"]
    if slices.problem:
        lines += wrapped(slices.problem, columns, indent=2)
    for word, blocked in (
        ("tainted", slices.tainted),
        ("withdrawn", slices.withdrawn),
        ("left out", slices.left_out),
    ):
        for device in blocked:
            named = device.reason if device.name in device.reason else f"{device.name}: {device.reason}"
            lines += wrapped(f"{word}: {named}".removesuffix(": "), columns, indent=2)
    return lines


def wrapped(text: str, columns: int, indent: int = 0) -> list[str]:
    """Fold a text into lines of at most so many columns; continued lines stand further in."""
    margin = " " * indent
    return folded(text, columns, margin, margin + "  ")


def claims_dict(claims: ClaimsView | None) -> dict[str, Any] | None:
    """Return the claims and the slices for JSON; None while DRA is off."""
    if claims is None:
        return None
    return {
        "driver": claims.driver,
        "problem": claims.problem or None,
        "claims": [claim_dict(claim) for claim in claims.claims],
        "slices": slices_dict(claims.slices),
    }


def slices_dict(slices: SlicesView | None) -> dict[str, Any] | None:
    """Return the slices of a driver for JSON; None while nothing is known of them."""
    if slices is None:
        return None
    return {
        "slices": slices.slices,
        "generation": slices.generation,
        "settled": slices.settled,
        "keeps_taints": slices.keeps_taints,
        "keeps_counters": slices.keeps_counters,
        "tainted": _blocked_dict(slices.tainted),
        "withdrawn": _blocked_dict(slices.withdrawn),
        "left_out": _blocked_dict(slices.left_out),
        "problem": slices.problem or None,
    }


def claim_dict(claim: ClaimView) -> dict[str, Any]:
    """Return a claim for JSON."""
    return _brief(claim) | {
        "devices": list(claim.devices),
        "admin_devices": list(claim.admin_devices),
        "waiting_calls": claim.waiting_calls,
    }


def _blocked_dict(devices: tuple[BlockedView, ...]) -> dict[str, str | None]:
    return {device.name: device.reason or None for device in devices}


# --- of a claim -------------------------------------------------------------------------------------------


def claim_named(claims: ClaimsView | None, text: str) -> ClaimView | None:
    """Return the claim of this NAMESPACE/NAME or UID. Of several of one name the last one: the others have ended."""
    candidates = claims.claims if claims is not None else ()
    return next((claim for claim in reversed(candidates) if text in (str(claim), claim.uid)), None)


def claim_explanation(
    claim: ClaimView, view: NodeView, time: Callable[[float], str]
) -> list[tuple[str, str]]:
    """Return the facts of a claim; `time` is the time of day of so many seconds ago."""
    by_address = {device.address: device for device in view.devices}
    facts = claim_facts(claim, time)
    for address in claim.devices:
        device = by_address.get(address)
        facts.append(("Device", _device_line(address, device)))
        if device is not None and device.for_claims is not None:
            facts.append(("Device", f"  {at_the_end(device, device.for_claims, claim)}"))
    facts += [("Admin access", address) for address in claim.admin_devices]
    return facts


def claim_facts(claim: ClaimView, time: Callable[[float], str]) -> list[tuple[str, str]]:
    """Return the facts that a claim of any driver has."""
    facts = [("UID", claim.uid), ("Since", f"{time(claim.age_s)}, {lasted(claim.age_s)} ago")]
    facts += [("Problem", claim.problem)] * bool(claim.problem)
    return [*facts, ("Waiting calls", str(claim.waiting_calls))] if claim.waiting_calls else facts


def _device_line(address: str, device: DeviceView | None) -> str:
    if device is None or not device.present:
        return f"{address}, gone from this node"
    return f"{address}, {device.model or 'unknown model'}, on {device.driver or 'no driver'}"


def claim_title(claim: ClaimView, meanings: Mapping[str, str] = MEANINGS) -> list[str]:
    """Return the claim's name, and its state with the meaning."""
    meaning = meanings.get(claim.state, "")
    return [f"Claim {claim}", f"{claim.state}" + (f": {meaning}" if meaning else "")]
