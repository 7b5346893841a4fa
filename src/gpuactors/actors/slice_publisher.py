"""The slice publisher: keeps the ResourceSlices of one driver on this node as the node's offer wants them.

Theory of operation. One task follows the slices that the server has, the other compares and writes. What to write
follows from the wanted pool and from what the watch has shown (`core/claims/slice_writes.py`), never from what was
written before: so a deletion by kubelet, an edit by somebody, a lost answer and a restart of ours are all the same. A
write of ours counts when the watch shows it, and until then nothing else is compared; so no write follows from an older
view.

Whether a blocked device gets a taint or is withdrawn depends on whether the server keeps taints, and whether the parts
of a card consume counters on whether it keeps those: one dry run asks for both. Must not decide what is offered: that
is the registry's, which gets a `Publication` of what was learnt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, assert_never, final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.actors.api_retry import backoff_s, for_ever
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.jitter import about, shorter
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.pool import Pool, has_counters, has_taints, probe_spec, wanted_pool
from gpuactors.core.claims.slice_writes import Answered, Create, Delete, Update, Write, writes
from gpuactors.core.values.slices import Offer, Publication, ServerKeeps, SliceSpec, StoredSlice
from gpuactors.ports.kube import (
    ApiError,
    ApiRefused,
    NodeApi,
    SliceApi,
    SliceDeleted,
    SliceEvent,
    SlicesListed,
    SliceStored,
)

TAINTS_ASKED_S: Final = 3600.0
"""The interval, in seconds, give or take API_HOUR_JITTER, between two questions to the API server whether it keeps
taints and counters. It is also asked at the start, after each connection that was lost and after a write with any: its
gates may be switched while it restarts one replica after the other."""

TAINTS_ASKED_LOST_S: Final = 60.0
"""The time within which it is asked after a lost connection, in seconds, at a random moment: every node has lost its
own, and a server that has just come back has enough to do."""

TAINTS_ASKED_WRITTEN_S: Final = 60.0
"""The least time between a question and the next one that follows a write, in seconds: every pod with a device causes
writes."""

SLICE_SETTLE_S: Final = 0.1
"""The time without a change after which a new offer is written, in seconds: a process is seen before kubelet's ledger
says whose it is. The scheduler learns of it this much later; where it was too quick, prepare refuses."""

SLICE_SETTLE_MAX_S: Final = 0.5
"""The time after which a new offer is written, in seconds, whatever changes."""

assert SLICE_SETTLE_S < SLICE_SETTLE_MAX_S

WRITE_SEEN_S: Final = 30.0
"""The time within which the watch must show a write of gpuactors, in seconds: after it all is listed anew."""

RESTORE_BACKOFF_S: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The waits before slices that others have deleted or edited are restored, in seconds, by the number of restorations
within RESTORE_CALM_S; the last one repeats. Kubelet deletes them at its start, and perhaps once more in the background:
a kubelet that restarts again and again leaves a node without slices for the last wait, which is Kubernetes' own
(`resourceslice.Controller`). Somebody who answers each restoration with an edit must not cost the API server a write
per second for ever."""

RESTORE_CALM_S: Final = 600.0
"""The time for which a restoration counts, in seconds: kubelet repeats a deletion after at most five minutes."""


class PublisherPorts(Struct, frozen=True):
    slices: SliceApi
    node: NodeApi
    tell: Callable[[Publication], Awaitable[None]]
    """Called with what was learnt, each time it changes."""


async def run(offers: LatestReader[Offer | None], ports: PublisherPorts) -> None:
    """Run for ever. While there is no offer (another daemon serves, or the host has not been read yet) nothing is asked
    and nothing is written."""
    async for offer in offers:
        if offer is None:
            continue
        publisher = _Publisher(offer, ports)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.follow)
            nursery.start_soon(publisher.publish)
            async for newer in offers:
                if newer is None:
                    break
                publisher.offer(newer)
            nursery.cancel_scope.cancel()


@final
class _View:
    """The slices that the server has, as the watch has shown them."""

    def __init__(self) -> None:
        self.slices: dict[str, StoredSlice] | None = None
        """The slices by name; None before they are listed, and while they cannot be followed."""
        self.generation_seen = 0
        """The highest generation that any of them had."""
        self._awaited: dict[str, str | None] = {}
        """The version that a write of gpuactors has given a slice, by the slice's name; None: the write has deleted
        it."""
        self._awaited_since = 0.0
        self._shown: set[tuple[str, str | None]] | None = None
        """The slices shown since an unanswered write began; None if there is no such write."""

    def take(self, event: SliceEvent) -> None:
        """Take an event of the server."""
        match event:
            case SlicesListed(slices):
                self.slices = {s.name: s for s in slices}
                self._awaited.clear()  # whatever was written is in it
                self._see(slices)
            case SliceStored(stored):
                if self.slices is not None:  # else all are about to be listed anew
                    self.slices[stored.name] = stored
                self._show(stored.name, stored.version)
                self._see((stored,))
            case SliceDeleted(name):
                if self.slices is not None:
                    self.slices.pop(name, None)
                self._awaited.pop(name, None)
                self._show(name, None)
            case other:
                assert_never(other)

    def write_begins(self) -> None:
        """Note that a write begins: the watch may show it before it is answered."""
        self._shown = set()

    def expect(self, name: str, version: str | None) -> None:
        """Note the answer to a write: the slice has this version now, or is deleted."""
        before = self.slices.get(name) if self.slices is not None else None
        shown, self._shown = self._shown or set(), None
        if (name, version) in shown or (before.version if before is not None else None) == version:
            return
        if not self._awaited:
            self._awaited_since = trio.current_time()
        self._awaited[name] = version

    @property
    def waits_s(self) -> float | None:
        """How long the watch may still take to show the writes, in seconds; None if it has shown all."""
        if not self._awaited:
            return None
        return max(0.0, self._awaited_since + WRITE_SEEN_S - trio.current_time())

    def _show(self, name: str, version: str | None) -> None:
        if self._shown is not None:
            self._shown.add((name, version))
        if self._awaited.get(name) == version:
            self._awaited.pop(name, None)

    def _see(self, slices: tuple[StoredSlice, ...]) -> None:
        self.generation_seen = max([self.generation_seen, *(s.spec.generation for s in slices)])


@final
class _Publisher:
    """One publisher, while there is an offer."""

    def __init__(self, offer: Offer, ports: PublisherPorts) -> None:
        self._offer = offer
        self._ports = ports
        self._view = _View()
        self._changed = trio.Event()
        self._watching = trio.CancelScope()
        self._owner: str | None = None
        """The UID of our Node object."""
        self._keeps_taints = ServerKeeps.UNKNOWN
        self._keeps_counters = ServerKeeps.UNKNOWN
        self._ask_at = self._asked_at = -inf
        self._answers: dict[str, Answered] = {}
        self._written: Pool | None = None
        """The last written pool."""
        self._changed_at = 0.0
        """The time of the offer's last change of the pool."""
        self._unwritten_since = inf
        """The time of its first change since the last write began."""
        self._restored_at: deque[float] = deque()
        self._unfollowed = ""
        """Why the slices cannot be followed; the next two: why they cannot be written, why it cannot be asked what
        the server keeps."""
        self._unwritten = ""
        self._unasked = ""
        self._told: Publication | None = None

    def offer(self, offer: Offer) -> None:
        """Take a new offer. Taking a device rarely changes a slice."""
        before = self._pool()
        self._offer = offer
        if self._pool() == before:
            return
        self._changed_at = trio.current_time()
        self._unwritten_since = min(self._unwritten_since, self._changed_at)
        self._wake()

    def _pool(self) -> Pool:
        """Return the pool that the server is to have."""
        return wanted_pool(self._offer, self._keeps_taints, self._keeps_counters)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- following ----------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Follow the slices, for ever."""
        await for_ever("slice_publisher", self._follow_once, self._lost)

    async def _lost(self, error: ApiError) -> None:
        self._view.slices = None
        # A server that was away may have another setting now. Counted from the last failure, as after a long
        # outage all nodes would else ask at once.
        if self._keeps_taints is not ServerKeeps.UNKNOWN:
            self._ask_at = trio.current_time() + shorter(TAINTS_ASKED_LOST_S, 1.0)
        self._unfollowed = str(error)
        await self._tell()

    async def _follow_once(self) -> None:
        with trio.CancelScope() as self._watching:
            async with self._ports.slices.follow() as events:
                async for event in events:
                    self._view.take(event)
                    self._unfollowed = ""
                    self._wake()

    # --- writing ------------------------------------------------------------------------------------------

    async def publish(self) -> None:
        """Write what is to be written, for ever."""
        failures = 0
        while True:
            changed = self._changed
            try:
                with raises_only(ApiError, "slice_publisher"):
                    wait_s = await self._round()
                failures = 0
            except ApiError as exc:
                failures += 1
                self._unwritten = str(exc)
                await self._tell()
                await trio.sleep(backoff_s(failures, exc))
                continue
            await self._tell()
            with trio.move_on_after(wait_s):
                await changed.wait()

    async def _round(self) -> float:
        """Compare once, and write; return after how many seconds to do it again if nothing changes. Raises
        `ApiError`."""
        if self._view.slices is None:
            return inf
        if (waits_s := self._view.waits_s) is not None:
            if waits_s == 0.0:
                self._list_anew()
            return waits_s or inf
        owner_is_new = self._owner is None
        if self._owner is None:
            self._owner = (await self._ports.node.read()).uid
        if trio.current_time() >= self._ask_at:
            await self._ask(self._owner)
        if not (todo := self._to_write(self._owner)):
            self._unwritten, self._unwritten_since = "", inf
            return max(0.0, self._ask_at - trio.current_time())
        if (pause_s := self._pause_s()) > 0.0:
            return pause_s
        if not owner_is_new and any(isinstance(write, Create) for write in todo):
            # All may be gone because our node is another object now; then the old one's slices are deleted again.
            self._owner = (await self._ports.node.read()).uid
            todo = self._to_write(self._owner)
        pool, self._unwritten_since = self._pool(), inf
        for write in todo:
            await self._write(write, self._owner)
        # A write that has failed is made again after its own pause: nobody has undone it.
        if pool == self._written:
            self._restored_at.append(trio.current_time())
        self._written = pool
        return 0.0

    def _to_write(self, owner: str) -> tuple[Write, ...]:
        view = self._view
        if view.slices is None:
            return ()
        return writes(self._pool(), owner, view.slices.values(), self._answers, view.generation_seen)

    def _pause_s(self) -> float:
        """Return how long to wait before others' changes are undone. Changes of the offer are written as soon as
        nothing else follows from it: one reason for a taint comes within milliseconds of another."""
        now, pool = trio.current_time(), self._pool()
        if pool != self._written:
            settled_at = min(self._changed_at + SLICE_SETTLE_S, self._unwritten_since + SLICE_SETTLE_MAX_S)
            return 0.0 if self._written is None else max(0.0, settled_at - now)
        restored = self._restored_at
        while restored and restored[0] < now - RESTORE_CALM_S:
            restored.popleft()
        if restored:
            last = len(RESTORE_BACKOFF_S) - 1
            return max(0.0, restored[-1] + RESTORE_BACKOFF_S[min(len(restored), last)] - now)
        return 0.0

    async def _write(self, write: Write, owner: str) -> None:
        self._view.write_begins()
        match write:
            case Create(index, spec):
                self._answered(spec, await self._ports.slices.create(spec, index, owner))
            case Update(stored, spec):
                self._answered(spec, await self._ports.slices.update(stored, spec, owner))
            case Delete(stored):
                await self._ports.slices.delete(stored)
                self._view.expect(stored.name, None)
            case other:
                assert_never(other)

    def _answered(self, spec: SliceSpec, stored: StoredSlice) -> None:
        slices = self._view.slices or {}
        self._answers = {name: answer for name, answer in self._answers.items() if name in slices}
        self._answers[stored.name] = Answered(spec, stored.spec)
        self._view.expect(stored.name, stored.version)
        drops_taints = has_taints(spec) and not has_taints(stored.spec)
        drops_counters = has_counters(spec) and not has_counters(stored.spec)
        if drops_taints:
            self._keeps_taints = ServerKeeps.NO
        if drops_counters:
            self._keeps_counters = ServerKeeps.NO
        if drops_taints or drops_counters:
            # Not at once: of two replicas of the server one may drop what the other keeps.
            self._ask_at = trio.current_time() + about(TAINTS_ASKED_S, limits.API_HOUR_JITTER)
        elif has_taints(spec) or has_counters(spec):
            # A slice that had some keeps them also where the gate is off now, and only a new one shows it.
            self._ask_at = min(self._ask_at, self._asked_at + TAINTS_ASKED_WRITTEN_S)

    async def _ask(self, owner: str) -> None:
        """Find out whether the server keeps taints and counters. A refusal leaves the answer as it was."""
        try:
            stored = await self._probed(owner)
        except ApiRefused as exc:
            if exc.code == 429 or exc.code >= 500:
                raise
            self._unasked = str(exc)
        else:
            self._unasked = ""
            self._keeps_taints = ServerKeeps.YES if has_taints(stored) else ServerKeeps.NO
            self._keeps_counters = ServerKeeps.YES if has_counters(stored) else ServerKeeps.NO
        self._asked_at = trio.current_time()
        self._ask_at = trio.current_time() + about(TAINTS_ASKED_S, limits.API_HOUR_JITTER)

    async def _probed(self, owner: str) -> SliceSpec:
        """Return what the server makes of a probe. Raises `ApiError`."""
        driver, node, create = self._offer.driver, self._offer.node, self._ports.slices.create
        try:
            return (await create(probe_spec(driver, node, counters=True), 0, owner, dry_run=True)).spec
        except ApiRefused as exc:
            if exc.code != 422:
                raise
        return (await create(probe_spec(driver, node, counters=False), 0, owner, dry_run=True)).spec

    def _list_anew(self) -> None:
        """List everything anew: the watch has not shown a write."""
        self._view.slices = None
        self._watching.cancel()

    # --- telling ------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        pool, slices = self._pool(), self._view.slices or {}
        problem = self._unfollowed or self._unwritten or self._unasked
        settled = (
            self._view.slices is not None
            and self._view.waits_s is None
            and self._owner is not None
            and not self._to_write(self._owner)
        )
        publication = Publication(
            driver=self._offer.driver,
            keeps_taints=self._keeps_taints,
            settled=settled,
            generation=max((s.spec.generation for s in slices.values()), default=0),
            slices=len(slices),
            tainted=tuple(device.name for device in pool.devices if device.taints),
            withdrawn=pool.withdrawn,
            left_out=pool.left_out,
            problem=problem,
            keeps_counters=self._keeps_counters,
        )
        if publication != self._told:
            self._told = publication
            await self._ports.tell(publication)
