"""The entries of kubelet's ledger that are valid: those that List names, those of its ledger file, or those known
before.

Theory of operation. PodResources notices that a pod has ended; the ledger file is rewritten only by a device list or an
allocation, and names ended pods until then. So the list is used where kubelet runs, and the file where it does not.

But kubelet serves PodResources before its pods are known to it again: List is empty or partial then, for a moment or
for as long as the API server is away (seen: 75 s and on, while their virtual machines run). The entries of its ledger
file are used as well, except those that this kubelet has listed before: they have ended since, and only the file still
names them. Where the file cannot be read, the entries that were known before are used in its place, and some may be
missing.

That is over when this kubelet has known the API server's pods for LEDGER_SETTLE_S. It knows them if it lists any device
of a pod, as it learns of all pods at once, or any pod that is not static. Static pods it has without the API server;
their names all end in the node's, after a hyphen (pkg/kubelet/config/common.go, generatePodName), those of others do
not. Nor has a static pod a claim: a kubelet that lists one for a pod, or asks for one to be prepared, knows the API
server's pods. One that is old by then, on a node without other pods for instance, needs LEDGER_CALLED_S only. So the
file's pods that ended while kubelet was down are used no longer than that either, for example on a node with any two
pods of a DaemonSet.

Must not judge the status of a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.ledger import books as file_books
from gpuactors.core.values.model import (
    Books,
    DeviceId,
    KubeletStartup,
    Ledger,
    LedgerEntry,
    LedgerSource,
    ResourceName,
    RunningKubelet,
)

LEDGER_API_AWAY_S: Final = 600.0
"""How long a pod of kubelet's ledger file that has no cgroup counts while this kubelet does not show that it knows the
API server's pods: after a reboot it starts none of them before the API server answers, and has their devices for them.
Longer costs a GPU whose pod ended while kubelet was down on a node with no other pod."""


class Counted(Struct, frozen=True, gc=False):
    """The valid entries of the ledger after a read."""

    entries: tuple[LedgerEntry, ...]
    source: LedgerSource
    young: KubeletStartup
    """The state of this kubelet's start, for the next read."""
    books: Books
    """The books of the file, for the next read."""


def counted(
    ledger: Ledger,
    pending: Collection[tuple[ResourceName, DeviceId]],
    event: LedgerRead,
    at: float,
    *,
    device_plugin: bool,
) -> Counted:
    """Return the valid entries after `event`, which came at `at`. `ledger` is as before the event; `pending` are
    devices that may be changing hands; `device_plugin`: kubelet has our device lists."""
    young, books = ledger.young, file_books.seen(ledger.books, event, at, asked_at=ledger.asked_at)
    starts_pods = event.kubelet is not None and (
        not device_plugin or at >= _has_pods_at(young, event.kubelet)
    )
    if event.passive:
        books, entries = file_books.passive(ledger, books, event, at, starts_pods=starts_pods)
        return Counted(entries, ledger.source, young, books)
    listed_before: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
    listed = event.listed
    if event.kubelet is not None:
        if event.kubelet.socket != young.socket:
            books = replace(books, ended=frozenset())  # this one may not know its pods yet
        young = _after_answer(young, event.kubelet, event, at)
        books, listed = file_books.listed(books, event, young, pending, at)
        if at >= young.settled_at:
            return Counted(listed, LedgerSource.LIST, young, books)
        listed_before = young.listed
    named = (
        [e for e in event.file.entries if not file_books.has_ended(books, e, at, starts_pods=starts_pods)]
        if event.file is not None
        else [LedgerEntry(*name, pod) for name, pod in ledger.entries.items()]
    )
    more = tuple(e for e in named if (e.resource, e.device) not in listed_before)
    return Counted(listed + more, _source(event, more), young, books)


def _has_pods_at(young: KubeletStartup, kubelet: RunningKubelet) -> float:
    """Return when this kubelet has started the pods of its file, in seconds; infinite if it has not answered yet. Until
    the API server answers, it starts none of them, has their devices for them by its file, and gives none of these
    away."""
    if kubelet.socket != young.socket:
        return math.inf
    return min(young.settled_at, young.since + LEDGER_API_AWAY_S)


def called(young: KubeletStartup, at: float) -> KubeletStartup:
    """Record that a kubelet asked for a claim; return the same object if that says nothing new."""
    is_news = young.socket is not None and young.settled_at == young.called_at == math.inf
    return replace(young, called_at=at) if is_news else young


def _source(event: LedgerRead, more: tuple[LedgerEntry, ...]) -> LedgerSource:
    if event.file is None:
        return LedgerSource.LIST_AND_KNOWN
    if event.kubelet is None:
        return LedgerSource.FILE if event.file.exists else LedgerSource.NO_FILE
    return LedgerSource.LIST_AND_FILE if more else LedgerSource.LIST


def _after_answer(
    young: KubeletStartup, kubelet: RunningKubelet, event: LedgerRead, at: float
) -> KubeletStartup:
    """Return the state of `kubelet` after its list came."""
    is_new = kubelet.socket != young.socket
    if is_new:
        young = KubeletStartup(kubelet.socket, since=at)
    elif at >= young.settled_at:
        # It is not needed any more, and would grow with every ID that was ever listed.
        return replace(young, listed=frozenset()) if young.listed else young
    young = replace(young, listed=young.listed.union((e.resource, e.device) for e in event.listed))
    knows = young.listed or event.claims or young.called_at < math.inf or _are_from_api(event.names_end)
    if young.settled_at < math.inf or not knows:
        return young
    if young.called_at < math.inf and kubelet.age_s >= limits.LEDGER_SETTLE_S:
        return replace(young, settled_at=young.called_at + limits.LEDGER_CALLED_S)
    if is_new and kubelet.age_s >= limits.LEDGER_SETTLE_S:
        # One that is older than this daemon has known them for as long.
        return KubeletStartup(kubelet.socket, settled_at=-math.inf, since=at)
    return replace(young, settled_at=at + limits.LEDGER_SETTLE_S)


def _are_from_api(names_end: str | None) -> bool:
    """Return whether a pod of List is not static."""
    return names_end is not None and "-" not in names_end
