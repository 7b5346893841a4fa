"""Which entries of kubelet's ledger count after a read that did not ask for List: those known before, those that the
file has besides, without those whose pod has ended.

Theory of operation. The file names the pods by their UIDs, and is written with each allocation and each device list,
but not when a pod ends. That is seen of the kernel, as the pod's cgroup is gone (`PodLife`), or heard of kubelet, which
does not list the pod any more (List), or does not know it (Get). A UID never comes back, so an entry that has ended
once is left out as long as the file has it.

The name of a pod is known from the last List, the UID from the file: an entry that both have has both.

A pod whose cgroup was never seen is about to be admitted, or has ended before it was looked for: it counts for as long
as a kubelet needs that has just started. A pod that kubelet has named counts until kubelet says otherwise, or its
cgroup goes.

Must not judge the status of a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.values.model import (
    Books,
    DeviceId,
    KubeletStartup,
    Ledger,
    LedgerEntry,
    LedgerFile,
    Pod,
    PodLife,
    ResourceName,
    SeenPods,
)

ADMISSION_S: Final = 1.0
"""How long after the last Allocate for a pod its cgroup is waited for, where one of its devices is asked for again: the
same pod does so where an init container had it; then no cgroup appears, as kubelet makes that after the last container.
Seen: 0.03 s after that Allocate."""

Name = tuple[ResourceName, DeviceId]


def seen(books: Books, event: LedgerRead, at: float, *, asked_at: float) -> Books:
    """Record what the file and the kernel show by this read, which was requested at `asked_at`. If the file cannot be
    read, keep what was read of it last."""
    confirmed = frozenset(name for answer in event.answers for name in answer.devices)
    granted = {n: since for n, since in books.granted.items() if at < since + limits.GRANT_FILE_S}
    books = replace(books, confirmed=confirmed, granted=granted, came=event.pods.came)
    if event.file is None:
        return books
    return replace(
        with_lives(books, event.file, event.pods, at, asked_at=asked_at),
        uids=_uids(books, event.file.entries),
        ended=books.ended & {*event.file.entries} if books.ended else books.ended,
    )


def with_lives(books: Books, file: LedgerFile, pods: SeenPods, at: float, *, asked_at: float) -> Books:
    """Record which pods of the file live, by a read that was requested at `asked_at`: the kernel shows that whatever
    kubelet answers."""
    named = {e.pod.uid for e in file.entries}
    alive = {uid for uid, life in pods.lives.items() if life is not PodLife.ABSENT}
    absent = named & {uid for uid, life in pods.lives.items() if life is PodLife.ABSENT}
    since = {uid: books.absent_since.get(uid, at) for uid in absent - books.seen}
    return replace(
        books,
        lives=dict(pods.lives),
        seen=(books.seen & named) | alive,
        absent_since=since,
        looked_at=asked_at,
    )


def has_ended(books: Books, entry: LedgerEntry, at: float, *, starts_pods: bool) -> bool:
    """Return whether the pod of an entry of the file has ended: kubelet has not written the entry away yet.
    `starts_pods`: a kubelet runs, which would have made the cgroup of a pod that lives."""
    if entry in books.ended:
        return True
    uid, name = entry.pod.uid, (entry.resource, entry.device)
    if books.lives.get(uid) is not PodLife.ABSENT or name in books.confirmed:
        return False
    if uid in books.seen:
        return True
    return starts_pods and at - books.absent_since.get(uid, at) >= limits.LEDGER_SETTLE_S


def has_kept(books: Books, name: Name) -> bool | None:
    """Return whether the pod that has a device by the file still has it, and all its containers have their devices;
    None if that cannot be seen, as while a pod that has just got it may have no cgroup yet."""
    if name in books.confirmed:
        return True
    match books.lives.get(books.uids.get(name, "")):
        case PodLife.STARTING | PodLife.RUNNING:
            return True
        case PodLife.ABSENT | PodLife.STOPPED if books.looked_at >= admitted_by(books, name):
            return False
        case _:
            return None


def admitted_by(books: Books, name: Name) -> float:
    """Return when a pod that got the device by the last Allocate has its cgroup: kubelet makes it when all its
    containers have their devices, so the last Allocate of any device of that pod counts."""
    uid = books.uids.get(name)
    of_pod = [
        at
        for other, at in books.granted.items()
        if other == name or (uid is not None and books.uids.get(other) == uid)
    ]
    return max(of_pod, default=-math.inf) + ADMISSION_S


def listed(
    books: Books, event: LedgerRead, young: KubeletStartup, pending: Collection[Name], at: float
) -> tuple[Books, tuple[LedgerEntry, ...]]:
    """Return the entries of List, each pod with its UID if the file, which was read before List, has one pod for that
    device; and the books with the entries of the file that List shows to have ended.

    A device that has just been granted may have changed hands in between.
    """
    if event.file is None:
        return books, event.listed
    now, is_settled = {(e.resource, e.device) for e in event.listed}, at >= young.settled_at
    missing = (e for e in event.file.entries if (e.resource, e.device) not in now)
    ended = {e for e in missing if is_settled or (e.resource, e.device) in young.listed}
    uids: dict[Name, set[str]] = {}
    for entry in event.file.entries:
        uids.setdefault((entry.resource, entry.device), set()).add(entry.pod.uid)
    named = tuple(_with_uid(e, uids, pending) for e in event.listed)
    still = {
        e for e in books.ended if (e.resource, e.device) not in now or len(uids[e.resource, e.device]) > 1
    }
    return replace(books, ended=frozenset(still | ended)), named


def passive(
    ledger: Ledger, books: Books, event: LedgerRead, at: float, *, starts_pods: bool
) -> tuple[Books, tuple[LedgerEntry, ...]]:
    """Return the entries that count after a read without List, and the books with the entries that have ended by it."""
    if event.file is None or not event.file.exists:
        entries = {name: LedgerEntry(*name, pod) for name, pod in ledger.entries.items()}
    else:
        entries = dict(_of_file(ledger, books, event.file.entries, at, starts_pods=starts_pods))
    lost = set(_released(entries, event))
    if at < ledger.young.settled_at:
        lost &= ledger.young.listed  # it may not know its pods yet, but those it has listed
    if not lost:
        return books, tuple(entries.values())
    ended = {e for e in (event.file.entries if event.file else ()) if (e.resource, e.device) in lost}
    remaining = tuple(entry for name, entry in entries.items() if name not in lost)
    return replace(books, ended=books.ended | ended), remaining


def _of_file(
    ledger: Ledger, books: Books, entries: Iterable[LedgerEntry], at: float, *, starts_pods: bool
) -> Iterator[tuple[Name, LedgerEntry]]:
    for entry in entries:
        name = entry.resource, entry.device
        if books.uids[name] != entry.pod.uid:
            continue
        pod = ledger.entries.get(name)
        is_same = pod is not None and _is_same(ledger.books, name, pod, entry.pod.uid)
        if is_same and pod is not None and pod.name and not _has_gone(books, entry):
            yield name, LedgerEntry(*name, pod)
        elif not has_ended(books, entry, at, starts_pods=starts_pods):
            yield name, LedgerEntry(*name, pod) if is_same and pod is not None else entry


def _has_gone(books: Books, entry: LedgerEntry) -> bool:
    """Return whether the pod of an entry has ended, although kubelet has named it."""
    uid = entry.pod.uid
    is_gone = uid in books.seen and books.lives.get(uid) is PodLife.ABSENT
    return entry in books.ended or (is_gone and (entry.resource, entry.device) not in books.confirmed)


def _is_same(before: Books, name: Name, pod: Pod, uid: str) -> bool:
    return pod.uid == uid if pod.uid else before.uids.get(name) == uid


def _released(entries: Mapping[Name, LedgerEntry], event: LedgerRead) -> Iterator[Name]:
    """Yield the devices that their pods no longer have by kubelet's answers to Get."""
    answers = {(a.pod.namespace, a.pod.name): a for a in event.answers}
    if not answers:
        return
    for name, entry in entries.items():
        answer = answers.get((entry.pod.namespace, entry.pod.name))
        if answer is not None and entry.pod.name and name not in answer.devices:
            yield name


def _uids(books: Books, entries: Iterable[LedgerEntry]) -> dict[Name, str]:
    """Return the UID of each device's pod by the file. Of several pods, prefer one that has not ended and was there
    before."""
    ordered = sorted(
        entries, key=lambda e: (e not in books.ended, books.uids.get((e.resource, e.device)) != e.pod.uid)
    )
    return {(e.resource, e.device): e.pod.uid for e in ordered}


def _with_uid(entry: LedgerEntry, uids: Mapping[Name, set[str]], pending: Collection[Name]) -> LedgerEntry:
    name = entry.resource, entry.device
    pod_uids = uids.get(name, ())
    if len(pod_uids) != 1 or name in pending or entry.pod.uid:
        return entry
    return replace(entry, pod=replace(entry.pod, uid=next(iter(pod_uids))))
