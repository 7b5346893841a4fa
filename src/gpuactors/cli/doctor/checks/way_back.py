"""Checks before NVIDIA's DRA driver is started on this node (`--before-nvidia`): nothing of gpuactors may be in use.

That driver knows no claim of gpuactors. At its start it binds GPUs on vfio to `nvidia`, also one that a virtual machine
has, and it gives the GPU of such a claim to another pod at once. What cannot be read is a FAIL: it is not empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from msgspec.structs import replace

from gpuactors.cli.doctor.facts import Facts, NoDaemon, TheirFile, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, warned
from gpuactors.control.client import Running
from gpuactors.control.view import ClaimsView, ClaimView, DeviceView, DomainsView, NodeView, PodView
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import ENDED, OWNING, ClaimState
from gpuactors.core.values.domain import LABEL, DeviceKind, device_of
from gpuactors.core.values.model import NVIDIA, Role
from gpuactors.core.values.quote import first_of, quoted_name

_DISPLAY = "03"
_HELD = frozenset({Cause.ORPHANED, Cause.HELD_BY_OTHER, Cause.HOLDER_UNKNOWN})
"""The causes of a GPU that no pod or claim has, and that a process has open or may have."""
_UNUSED = frozenset({*ENDED, ClaimState.ABSENT})


def check(facts: Facts) -> Iterator[Finding]:
    """Check the way back to NVIDIA's driver; nothing without `--before-nvidia`."""
    if facts.before_nvidia is None:
        return
    match facts.daemon:
        case Running() as running:
            found = [*_unknown(running.view), *_in_use(running.view, facts.node)]
            yield from found or [passed(Check.NODE_DRAINED, "no claim, pod or compute domain uses this node")]
        case None | NoDaemon() | Unknown():
            reason = "it was not asked" if facts.daemon is None else facts.daemon.reason
            yield failed(
                Check.NODE_DRAINED,
                f"which claims and pods use this node is not known without the daemon: {reason}",
                "Run this in the pod of the running daemon, before you take gpuactors off the node.",
            )
    yield from _their_checkpoints(facts)
    yield from _left_on_vfio(facts)


def _unknown(view: NodeView) -> Iterator[Finding]:
    """Report why the daemon's view may lack a claim or a pod."""
    reasons = [view.ledger_problem, *(claims.problem for claims in view.drivers)]
    if view.role != Role.SERVING:
        reasons.append(f"the daemon does not serve, it is {view.role}")
    for reason in filter(None, reasons):
        yield failed(
            Check.NODE_DRAINED,
            f"which claims and pods use this node is not known: {reason}",
            "See the other findings and the daemon's log; then run this again.",
        )


# --- claims and pods --------------------------------------------------------------------------------------


def _in_use(view: NodeView, node: str) -> Iterator[Finding]:
    """Report each claim that has not ended, each pod with a GPU of the device plugin, and what else uses a GPU."""
    drain = f"Drain the node: kubectl drain {quote(node)} --ignore-daemonsets --delete-emptydir-data"
    by_claim = {claim: str(pod) for pod in view.pods for claim in pod.claims}
    said: set[str] = set()
    for claims in view.drivers:
        for claim in claims.claims:
            if claim.state not in _UNUSED and not _is_of_daemon(claim):
                said.update(claim.devices if claim.state in OWNING else ())
                yield _claim(claims, claim, by_claim.get(str(claim)), drain)
    if view.domains is not None:
        yield from _daemons(view.domains, node)
    for pod in view.pods:
        if devices := [d for d in (*pod.devices, *pod.left) if d not in said]:
            said.update(devices)
            yield _pod(pod, devices, drain)
    for device in view.devices:
        if device.address not in said and _is_used(device):
            yield _device(device, drain)


def _is_used(device: DeviceView) -> bool:
    return device.owner is not None or bool(device.holders) or device.cause in _HELD


def _claim(claims: ClaimsView, claim: ClaimView, pod: str | None, drain: str) -> Finding:
    devices = ", ".join(first_of((*claim.devices, *claim.admin_devices))) or "no device that is known"
    by = f", used by the pod {quoted_name(pod)}" if pod is not None else ""
    return failed(
        Check.NODE_DRAINED,
        f"the claim {quoted_name(str(claim))} of {claims.driver} is {claim.state}: {devices}{by}",
        f"{drain}. It ends with its pods.",
    )


def _is_of_daemon(claim: ClaimView) -> bool:
    devices = map(device_of, (*claim.devices, *claim.admin_devices))
    return any(device is not None and device.kind is DeviceKind.DAEMON for device in devices)


def _daemons(domains: DomainsView, node: str) -> Iterator[Finding]:
    """Report NVIDIA's daemon of a domain, and the Node's label, without which it ends: a drain leaves both, and
    NVIDIA's driver would never take the label away."""
    claims = [claim for claim in domains.claims.claims if claim.state not in _UNUSED]
    daemons = [f"the daemon of a compute domain ({quoted_name(str(c))})" for c in claims if _is_of_daemon(c)]
    label = [f"the label {LABEL} is {quoted_name(domains.label.value)}"] if domains.label.value else []
    if len(daemons) < len(claims):
        remedy = "Drain the node: it ends after its domain's last workload."
    else:
        remedy = (
            "gpuactors removes the label within two minutes after the domain's last workload, and the daemon ends. At "
            f"once, for a drained node: kubectl label node {quote(node)} {LABEL}-"
        )
    if found := [*daemons, *label]:
        yield failed(Check.NODE_DRAINED, f"still on this node: {' and '.join(found)}", remedy)


def _pod(pod: PodView, devices: list[str], drain: str) -> Finding:
    has = "has" if pod.devices else "has left kubelet's list, and its process may hold"
    return failed(
        Check.NODE_DRAINED,
        f"the pod {quoted_name(str(pod))} {has} {', '.join(first_of(devices))}",
        f"{drain}. Wait until the pod is gone.",
    )


def _device(device: DeviceView, drain: str) -> Finding:
    by = f"belongs to {quoted_name(device.owner)}" if device.owner is not None else device.reason
    return failed(
        Check.NODE_DRAINED,
        f"{device.address}: {by or 'a process has it open'}",
        f"{drain}. gpuactors explain {device.address} says who has it.",
    )


# --- files and drivers ------------------------------------------------------------------------------------


def _their_checkpoints(facts: Facts) -> Iterator[Finding]:
    """Report the claims that NVIDIA's checkpoint names: its driver would refuse their GPUs to every other claim."""
    match facts.before_nvidia:
        case None:
            return
        case Unknown(reason):
            yield failed(Check.NVIDIA_CHECKPOINT, reason, "See the reason; then run this again.")
        case files:
            found = [_stale(file, _of(facts.daemon, file.driver)) for file in files]
            wrong = [finding for finding in found if finding is not None]
            yield from wrong or [passed(Check.NVIDIA_CHECKPOINT, "no checkpoint of NVIDIA's names a claim")]


def _of(daemon: object, driver: str) -> frozenset[str]:
    """Return the UIDs of the driver's claims that have not ended, which `_in_use` has reported."""
    drivers = daemon.view.drivers if isinstance(daemon, Running) else ()
    return frozenset(
        c.uid
        for claims in drivers
        if claims.driver == driver
        for c in claims.claims
        if c.state not in _UNUSED
    )


def _stale(file: TheirFile, alive: frozenset[str]) -> Finding | None:
    ended = [uid for uid in file.claims if uid not in alive]
    if not ended:
        return None
    return failed(
        Check.NVIDIA_CHECKPOINT,
        f"{file.path} names claims that have ended: {', '.join(first_of(ended))}. NVIDIA's driver would refuse their "
        "devices to every other claim",
        f"On the drained node: rm {quote(file.path)}. A restart of the node has the same effect.",
    )


def _left_on_vfio(facts: Facts) -> Iterator[Finding]:
    """Warn of GPUs on vfio: no container gets them, or NVIDIA's driver binds them to `nvidia` (PassthroughSupport). One
    that is in use may be returned to its driver by gpuactors afterwards."""
    if isinstance(facts.devices, Unknown):
        yield failed(
            Check.LEFT_ON_VFIO,
            f"which GPUs are on vfio is not known: {facts.devices.reason}",
            "See the other findings; then run this again.",
        )
        return
    known = facts.daemon.view.devices if isinstance(facts.daemon, Running) else ()
    used = {device.address for device in known if _is_used(device)}
    ours = {device.address for device in facts.devices.view.devices} - used
    left = sorted(
        f.address
        for f in facts.devices.functions
        if f.vfio_bound and f.vendor == NVIDIA and f.class_code.startswith(_DISPLAY) and f.address in ours
    )
    if not left:
        yield passed(Check.LEFT_ON_VFIO, "no unused GPU of NVIDIA is on vfio")
        return
    commands = "; ".join(first_of([f"driverctl unset-override {address}" for address in left]))
    finding = warned(
        Check.LEFT_ON_VFIO,
        "on vfio: no container gets it, and NVIDIA's driver binds it to nvidia at its start if its gate "
        "PassthroughSupport is on",
        f"Where containers are to use it, run on the drained node: {commands}. Or restart the node.",
    )
    yield replace(finding, devices=tuple(left))
