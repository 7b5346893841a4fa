"""The node's label: which patch is wanted, by the label as it was last read and the claims that live.

The claims of channels hold it: NVIDIA's controller runs the domain's daemon on this node as long as it is there, and a
claim of the daemon is there because of it. It is added when the intent of a claim is on disk, and goes when no claim of
its domain is left, one that waits for its channel or is being released included: so it stays where one claim follows
another (NVIDIA issue 641). It goes when that is on disk, LABEL_LINGERS_S later: the scheduler gives a channel away only
when it is free, so the next claim comes a moment later, or with kubelet's next try, and the daemon is to live until
then. A claim of another domain, and the end of this one, are reasons not to wait. After a restart the time begins anew.
A value that is not ours is never overwritten.

It is added only for a domain that was read after the label was seen to be absent: NVIDIA's controller takes the label
of a domain that is being deleted away, and it is not put back.

A patch is a JSON patch with `test`: it fails where the label is not as it was read. Then it is read and decided anew.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core import requests
from gpuactors.core.events.domains import LabelPatched
from gpuactors.core.requests import Failure
from gpuactors.core.state.claims import domain_of
from gpuactors.core.state.domains import Domains, Label
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.domain import (
    LABEL,
    DeviceKind,
    DomainMode,
    DomainUid,
    LabelChange,
    LabelPatch,
    NodeLabel,
    device_of,
)
from gpuactors.core.values.effects import Effect, Level, Log
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.status import Reason

LABEL_RETRY_S: Final = 1.0
"""The wait after a failed read or patch of the node's label, and after LABEL_CONFLICTS_MAX conflicts in a row, in
seconds."""

LABEL_READ_S: Final = 600.0
"""How often the node's label is read by itself while a claim holds it, in seconds. The watch of the Node shows a change
at once; 5,000 nodes that read more often would burden the API server for nothing."""

LABEL_LINGERS_S: Final = 100.0
"""How long the node's label stays after the last claim of a domain that lives, in seconds: at a hand-over of the
channel the next claim comes 50 to 500 ms later (as measured), or at most 90 s later by kubelet's own retry, where the
node authorizer has refused it the claim. NVIDIA's daemon ends where the label is away for 50 ms."""

LABEL_CONFLICTS_MAX: Final = 3
"""The number of patches in a row that meet another label than was read before each next one waits."""

LABELS_KEPT: Final = 64
"""The maximum number of values that are remembered as set by gpuactors, the last ones: one for each domain that had a
claim here."""

_NEEDS: Final = OWNING - {ClaimState.RESERVED, ClaimState.RELEASING}
"""The states in which a channel's claim needs the label: its intent is on disk, and it is not being released."""

_KEEPS: Final = OWNING | {ClaimState.WAITING}
"""The states in which it keeps one that is there."""


class Held(Struct, frozen=True, gc=False):
    """The domains whose label the claims hold."""

    needed: DomainUid | None = None
    """The value that the label is to have; None if no claim needs it."""
    kept: frozenset[str] = frozenset()
    """The values with which the label stays."""
    owning: frozenset[DomainUid] = frozenset()
    """The domains of the claims that have a channel, or are giving it back: gpuactors has set a label with one of
    these."""
    is_complete: bool = True
    """True if the purpose of each claim on this node is known. False if a claim was found by its files, as the
    checkpoint is lost; if kubelet lists one that is not here and that it has not asked for; or if kubelet has not been
    asked yet."""


def held(domains: Domains) -> Held:
    """Return the domains whose label the present claims hold. With a daemon that the host manages no claim holds the
    label."""
    if domains.settings is None or domains.settings.mode is not DomainMode.ON:
        return Held()
    needed: DomainUid | None = None
    kept: set[str] = set()
    owning: set[DomainUid] = set()
    is_complete = domains.strangers is not None
    for stranger in domains.strangers or ():
        device, uid = device_of(stranger.device), domains.stranger_domains.get(stranger)
        if device is None or device.kind is not DeviceKind.CHANNEL:
            continue
        if uid is None:
            is_complete = False
        elif uid == domains.label.value:
            kept.add(uid)
    for entry in domains.claims.entries.values():
        config, own = domain_of(entry).config, domain_of(entry).domain
        if entry.state in OWNING and (entry.claim is None or (own is None and entry.given)):
            is_complete = False
        if config is None or config.kind is not DeviceKind.CHANNEL:
            continue
        if entry.state in _KEEPS:
            kept.add(config.domain)
        if entry.state in OWNING:
            owning.add(config.domain)
        if entry.state in _NEEDS and needed is None:
            needed = config.domain
    if not is_complete and domains.label.value is not None:
        kept.add(domains.label.value)
    return Held(needed, frozenset(kept), frozenset(owning), is_complete)


def patch_wanted(label: Label, held_domains: Held) -> LabelPatch | None:
    """Return the patch that the label needs; None if it is right, or foreign."""
    if label.value is None:
        return LabelPatch(LabelChange.ADD, held_domains.needed) if held_domains.needed is not None else None
    if label.value in held_domains.kept or label.value not in label.removable:
        return None
    return LabelPatch(LabelChange.REMOVE, DomainUid(label.value))


def wanted_of(domains: Domains) -> DomainUid | None:
    """Return the domain whose label is to be added, if it is there and is not being deleted; None if there is nothing
    to add."""
    label = domains.label
    return held(domains).needed if label.is_idle and label.value is None else None


def lingering(domains: Domains) -> DomainUid | None:
    """Return the domain whose label stays although no claim holds it; None if there is none."""
    label = domains.label
    return DomainUid(label.value) if label.value is not None and label.lingers_until < math.inf else None


def is_gone(domains: Domains, domain: DomainUid) -> bool:
    """Return whether the domain was read, and is missing or being deleted: it does not come back."""
    view = domains.views.get(domain)
    return view is not None and view.is_gone


def _is_addable(domains: Domains, domain: DomainUid) -> bool:
    """Return whether the domain was read since the label was seen to be absent, and was there."""
    view = domains.views.get(domain)
    if view is None or view.number <= domains.label.absent:
        return False
    return view.domain is not None and not view.domain.is_deleted


def is_foreign(label: Label, held_domains: Held) -> bool:
    """Return whether the label has a value that no claim here has set, or wants."""
    return (
        label.value is not None
        and label.value not in label.removable
        and label.value not in held_domains.kept
    )


def conflict(domains: Domains, domain: DomainUid) -> Reason | None:
    """Return why the label cannot be given to this domain now, or does not name it; None if it names it."""
    label, settings = domains.label, domains.settings
    node = settings.node if settings is not None else ""
    problem = f": {label.problem}" if label.problem else ""
    if not label.is_read:
        unread = f"the label {LABEL} of the node {node} has not been read yet{problem}"
        return Reason(Cause.API_SERVER_FAILED, unread)
    if label.unsure:
        unread = f"the present value of the label {LABEL} of the node {node} has not been read yet{problem}"
        return Reason(Cause.API_SERVER_FAILED, unread)
    if label.value == domain and not label.is_going:
        return None
    if label.value is None:
        absent = f"the label {LABEL} of the node {node} is not there yet{problem}"
        return Reason(Cause.API_SERVER_FAILED if problem else Cause.DOMAIN_NOT_READY, absent)
    if label.value in label.removable or label.is_going:
        going = ", and is being removed" if label.is_going else ""
        other = f"the label {LABEL} of the node {node} still names {label.value}{going}{problem}"
        return Reason(Cause.API_SERVER_FAILED if problem else Cause.OTHER_DOMAIN, other)
    if label.initial == label.value:
        return Reason(
            Cause.API_SERVER_FAILED,
            f"the label {LABEL} of the node {node} is {quoted_id(label.value)}; its owner is unknown until all claims "
            "here have been read",
        )
    return Reason(
        Cause.FOREIGN_LABEL,
        f"the label {LABEL} of the node {node} is {quoted_id(label.value)}, which no claim here has set: its owner "
        "must remove it",
    )


# --- what is under way ------------------------------------------------------------------------------------------------


def touched(domains: Domains) -> Domains:
    """Read the label again, as the Node was touched. After a failure that is planned anyway."""
    return domains if domains.label.retry_at < math.inf else asked(domains)


def asked(domains: Domains) -> Domains:
    """Request a read of the label, now or after what is outstanding."""
    last, refresh = requests.asked(domains.last, domains.label.refresh)
    label = replace(domains.label, refresh=refresh, retry_at=math.inf)
    return replace(domains, last=last, label=label)


def decided(domains: Domains, at: float) -> tuple[Domains, list[Effect]]:
    """Decide after each event what is wanted of the label now. The claims' checkpoint has been read."""
    held_domains = held(domains)
    label, lines = _named(_judged(domains.label, held_domains), held_domains)
    if label.before and (remaining := label.before & _daemons(domains)) != label.before:
        label = replace(label, before=remaining)
    domains = replace(domains, label=label)
    if not label.is_read and label.refresh.outstanding is None and label.retry_at > at:
        return (asked(domains) if label.retry_at == math.inf else domains), lines
    if not label.is_idle:
        return domains, lines
    domains, patch = _lingering(domains, held_domains, patch_wanted(label, held_domains), at)
    label = domains.label
    if patch is not None and not _is_early(domains, patch):
        domains = asked(domains)
        return replace(domains, label=replace(domains.label, patch=patch)), lines
    if (held_domains.kept or label.value is not None) and label.refresh.due_at == math.inf:
        label = replace(label, refresh=label.refresh.due_by(at + LABEL_READ_S))
    return replace(domains, label=label), lines


def _lingering(
    domains: Domains, held_domains: Held, patch: LabelPatch | None, at: float
) -> tuple[Domains, LabelPatch | None]:
    """Return the patch, unless it is a removal that can wait. None can wait with a daemon that the host manages, while
    claims of another domain need the node, or once the domain is gone."""
    label, settings = domains.label, domains.settings
    is_on = settings is not None and settings.mode is DomainMode.ON
    cannot_wait = held_domains.kept or not is_on
    if patch is None or patch.change is LabelChange.ADD or cannot_wait or is_gone(domains, patch.value):
        return replace(domains, label=replace(label, lingers_until=math.inf)), patch
    if label.lingers_until == math.inf:
        label = replace(label, lingers_until=at + LABEL_LINGERS_S, lingers_from=domains.last)
    return replace(domains, label=label), patch if label.lingers_until <= at else None


def _judged(label: Label, held_domains: Held) -> Label:
    """Decide which values gpuactors has set. A value that the label had at the start, while no claim had a channel, was
    left by an earlier daemon; a claim that waits for a channel came later. A claim that was found by its files may have
    a channel: then this is decided when the claim has been read, or is gone."""
    for domain in sorted(held_domains.owning - {*label.removable}):
        label = replace(label, removable=_with_removable(label, domain))
    if label.initial is None or not held_domains.is_complete:
        return label
    removable = label.removable if held_domains.owning else _with_removable(label, label.initial)
    return replace(label, initial=None, removable=removable)


def _named(label: Label, held_domains: Held) -> tuple[Label, list[Effect]]:
    """Log a foreign value once."""
    foreign = label.value if is_foreign(label, held_domains) else None
    if foreign == label.foreign:
        return label, []
    lines: list[Effect] = []
    if foreign is not None:
        lines.append(Log(Level.WARNING, "label.foreign", {"label": LABEL, "value": foreign}))
    return replace(label, foreign=foreign), lines


def _is_early(domains: Domains, patch: LabelPatch) -> bool:
    """Return whether the patch must wait. A claim that has ended may still be on disk: after a restart it would live
    again, without the label. And the domain of an absent label may have been deleted."""
    if patch.change is LabelChange.ADD:
        return not _is_addable(domains, patch.value)
    return domains.claims.checkpoint > domains.claims.durable


def due(domains: Domains, at: float) -> Domains:
    """Request a read that is due."""
    return asked(domains) if _read_due(domains.label) <= at else domains


def _read_due(label: Label) -> float:
    """Return when the label is read again by itself; infinite if never."""
    return min(label.retry_at, label.refresh.deadline)


def deadline(domains: Domains) -> float:
    """Return when the label is read again, or removed, by itself; infinite if never."""
    label, claims = domains.label, domains.claims
    goes = label.lingers_until if label.is_idle and claims.checkpoint <= claims.durable else math.inf
    return min(_read_due(label), goes)


def read(
    domains: Domains, number: int, answer: NodeLabel | Failure, at: float
) -> tuple[Domains, list[Effect]]:
    """Handle the answer to a read. Nothing follows from a failure but another try."""
    label = domains.label
    if number != label.refresh.outstanding:
        return domains, []
    if isinstance(answer, Failure):
        return _failed(domains, label, answer, at)
    initial = label.initial if label.is_read else answer.value
    is_new = label.is_read and answer.value not in (
        None,
        label.value,
    )  # such as by a patch whose answer was lost
    after = replace(
        label,
        value=answer.value,
        is_read=True,
        initial=initial,
        added=domains.last if is_new else label.added,
        added_at=at if is_new else label.added_at,
        absent=domains.last if answer.value is None else label.absent,
        before=_daemons(domains) if answer.value is None else label.before,
        unsure=False,
        problem="",
    )
    return _answered(domains, after), []


def patched(domains: Domains, answer: LabelPatched, at: float) -> tuple[Domains, list[Effect]]:
    """Handle the answer to a patch. If it failed, read the label again."""
    label = domains.label
    if label.patch is None or answer.number != label.refresh.outstanding:
        return domains, []
    if answer.failure is not None:
        after = replace(label, patch=None, unsure=True)
        refused = _conflicted if answer.conflict else _failed
        return refused(domains, after, answer.failure, at)
    is_added, value = label.patch.change is LabelChange.ADD, label.patch.value
    after = replace(
        label,
        value=value if is_added else None,
        added=domains.last if is_added else label.added,
        added_at=at if is_added else label.added_at,
        absent=label.absent if is_added else domains.last,
        before=label.before if is_added else _daemons(domains),
        patch=None,
        conflicts=0,
        problem="",
    )
    line = Log(Level.INFO, "label.added" if is_added else "label.removed", {"label": LABEL, "value": value})
    return _answered(domains, after), [line]


def _conflicted(domains: Domains, label: Label, reason: str, at: float) -> tuple[Domains, list[Effect]]:
    """Read and decide again, at once the first times, as the label was not as it was read."""
    label = replace(label, conflicts=label.conflicts + 1, problem=reason)
    if label.conflicts >= LABEL_CONFLICTS_MAX:
        return _failed(domains, label, reason, at)
    line = Log(Level.INFO, "label.conflicted", {"label": LABEL, "reason": reason})
    return asked(replace(domains, label=replace(label, refresh=label.refresh.answered()))), [line]


def _failed(domains: Domains, label: Label, reason: str, at: float) -> tuple[Domains, list[Effect]]:
    level = Level.DEBUG if reason == domains.label.problem else Level.WARNING
    label = replace(label, refresh=label.refresh.answered(), problem=reason, retry_at=at + LABEL_RETRY_S)
    return replace(domains, label=label), [Log(level, "label.failed", {"label": LABEL, "reason": reason})]


def _daemons(domains: Domains) -> frozenset[ClaimUid]:
    """Return the claims of daemons that have the daemon device, or wait for it. One that was found by its files, and
    has not been read yet, may be one."""
    return frozenset(
        entry.name.uid
        for entry in domains.claims.entries.values()
        if entry.state in _KEEPS
        and ((config := domain_of(entry).config) is None or config.kind is DeviceKind.DAEMON)
    )


def _with_removable(label: Label, value: str) -> tuple[str, ...]:
    return (*(v for v in label.removable if v != value), value)[-LABELS_KEPT:]


def _answered(domains: Domains, label: Label) -> Domains:
    """Take the label whose outstanding read or patch is answered; read it again if that is wanted."""
    after = replace(domains, label=replace(label, refresh=label.refresh.answered()))
    return asked(after) if label.refresh.again else after
