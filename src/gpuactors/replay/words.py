"""Events and effects in words. Must not decide anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import assert_never

from gpuactors.core import events
from gpuactors.core.domains.report import DomainReport
from gpuactors.core.events import claims as claim_events
from gpuactors.core.events import domains as domain_events
from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.values import effects
from gpuactors.core.values.claim import Claim, Prepared, Unprepared
from gpuactors.core.values.domain import ComputeDomain, ImexFacts, NodeLabel
from gpuactors.core.values.model import GroupUse, LedgerSource, PciFunction
from gpuactors.observe.journal_format import Header


def process(header: Header) -> str:
    """Return which process wrote a file of a journal, and on which node."""
    node = f" on node {header.node}" if header.node else ""
    return f"process {header.pid} of gpuactors {header.version}{node}"


def clock(wall: float) -> str:
    """Return a time of day, UTC: `06:15:57.123`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%H:%M:%S.%f")[:-3]


def day(wall: float) -> str:
    """Return a date and time, UTC: `2026-11-21 06:15:57`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S")


def count(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: `1 function`, `8 functions`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def event_words(event: events.Event) -> str:
    """Return the event in words."""
    match event:
        case events.host.HostChanged(address, group, cause):
            return f"uevent {cause}: {address or f'IOMMU group {group}'}"
        case events.host.UeventsOpened():
            return "uevents are received"
        case events.host.UeventsLost(reason):
            return f"uevents were lost: {reason}"
        case events.host.UeventsUnavailable(reason):
            return f"uevents are unavailable: {reason}"
        case events.host.HostScanned(inspection, functions):
            return f"scan {inspection} found {count(len(functions), 'function')}"
        case events.host.ScanFailed(inspection, reason):
            return f"scan {inspection} failed: {reason}"
        case events.host.FunctionInspected(inspection, address, functions):
            return f"inspection {inspection} at {address}: {_inspected(address, functions)}"
        case events.host.FunctionsInspected(inspected):
            return "; ".join(map(event_words, inspected))
        case events.host.InspectionFailed(inspection, address, reason):
            return f"inspection {inspection} at {address} failed: {reason}"
        case events.host.SetsObserved(source, KnownSets()):
            return f"sets of devices were read from {source}"
        case events.host.SetsObserved(source, reason):
            return f"sets of devices cannot be read from {source}: {reason}"
        case events.host.GroupsObserved(poll, uses) | events.host.SomeGroupsObserved(poll, uses):
            return f"poll {poll}: {_used(uses)}"
        case events.kubelet.LedgerRead(read):
            return f"read {read} of kubelet's ledger: {_ledger(event)}"
        case events.kubelet.LedgerUnreadable(read, reason):
            return f"read {read} of kubelet's ledger failed: {reason}"
        case events.kubelet.KubeletAppeared():
            return "kubelet.sock appeared"
        case events.kubelet.KubeletGone(reason):
            return f"kubelet.sock is gone: {reason}"
        case events.kubelet.ForeignSocketsSeen(sockets):
            return f"sockets of others beside kubelet's: {', '.join(map(repr, sockets)) or 'none'}"
        case events.deviceplugin.SocketBound(resource, bind):
            return f"{resource}: endpoint {bind} serves"
        case events.deviceplugin.SocketFailed(resource, bind, reason):
            return f"{resource}: endpoint {bind} failed: {reason}"
        case events.deviceplugin.RegisterAnswered(resource, register, None):
            return f"{resource}: kubelet accepted registration {register}"
        case events.deviceplugin.RegisterAnswered(resource, register, failure):
            return f"{resource}: registration {register} failed: {failure}"
        case events.deviceplugin.StreamOpened(resource, stream):
            return f"{resource}: ListAndWatch stream {stream} opened"
        case events.deviceplugin.StreamEnded(resource, stream):
            return f"{resource}: ListAndWatch stream {stream} ended"
        case events.deviceplugin.AllocateAsked(token, resource, requests):
            return f"call {token}: Allocate {resource}: {_ids(requests)}"
        case events.deviceplugin.PreStartAsked(token, resource, devices):
            return f"call {token}: PreStartContainer {resource}: {', '.join(devices)}"
        case events.deviceplugin.PreferenceAsked(token, resource, requests):
            wanted = ", ".join(f"{r.size} of {len(r.available)}" for r in requests)
            return f"call {token}: GetPreferredAllocation {resource}: {wanted}"
        case events.deviceplugin.SpecsWritten(specs, unwritten):
            failed = "".join(f"; {resource}: {why}" for resource, why in sorted(unwritten.items()))
            return f"CDI files on disk: {', '.join(sorted(specs)) or 'none'}{failed}"
        case events.deviceplugin.CallAbandoned(token):
            return f"call {token} was abandoned by its caller"
        case claim_events.PrepareAsked(token, claim):
            return f"call {token}: NodePrepareResources of claim {claim}, UID {claim.uid}"
        case claim_events.UnprepareAsked(token, claim):
            return f"call {token}: NodeUnprepareResources of claim {claim}, UID {claim.uid}"
        case claim_events.ClaimRead(number, Claim() as claim):
            allocated = ", ".join(r.device for r in claim.results or ()) or "nothing"
            return f"read {number}: claim {claim.name} is allocated {allocated}"
        case claim_events.ClaimRead(number, reason, missing=missing):
            return f"read {number}{'' if missing else ' failed'}: {reason}"
        case claim_events.CheckpointRead(entries):
            return f"checkpoint read: {count(len(entries), 'claim')}"
        case claim_events.CheckpointRefused(reason):
            return f"checkpoint refused: {reason}"
        case claim_events.CheckpointWritten(number, failure=None):
            return f"checkpoint {number} is on disk"
        case claim_events.CheckpointWritten(number, failure=failure):
            return f"checkpoint {number} could not be written: {failure}"
        case claim_events.ActDone(number, bound):
            drivers = ", ".join(f"{b.address} on {b.driver or 'no driver'}" for b in bound)
            return f"act {number} done" + (f": {drivers}" if drivers else "")
        case claim_events.ActFailed(number, reason):
            return f"act {number} failed: {reason}"
        case claim_events.FitnessChecked(number, findings):
            reasons = (
                ", ".join(f"{f.device}: {f.reason}" for f in findings if f.reason)
                or "a claim could bind each"
            )
            return f"fitness check {number} of {count(len(findings), 'GPU')}: {reasons}"
        case claim_events.FilesTouched(_, touched):
            return f"the CDI files of {'claims' if touched is None else count(len(touched), 'claim')} were touched"
        case claim_events.SlicesPublished(publication):
            done = "as offered" if publication.settled else publication.problem or "being written"
            return f"slices of {publication.driver}: {publication.slices}, {done}"
        case domain_events.LabelRead(number, NodeLabel(value)):
            return f"read {number}: the node's label of compute domains is {value or 'absent'}"
        case domain_events.LabelRead(number, reason):
            return f"read {number} of the node's label failed: {reason}"
        case domain_events.LabelPatched(number, None):
            return f"patch {number} of the node's label is made"
        case domain_events.LabelPatched(number, failure, conflict):
            return (
                f"patch {number} of the node's label {'met another one' if conflict else 'failed'}: {failure}"
            )
        case domain_events.NodeTouched():
            return "our Node has changed"
        case domain_events.DomainRead(number, uid, ComputeDomain() | None as domain, clique):
            presence = f"is {domain}" if domain is not None else "is not there"
            ready = {*(domain.ready_nodes if domain else ()), *(clique.ready_nodes if clique else ())}
            return f"read {number}: ComputeDomain {uid} {presence}, ready on {', '.join(sorted(ready)) or 'no node'}"
        case domain_events.DomainRead(number, uid, reason):
            return f"read {number} of ComputeDomain {uid} failed: {reason}"
        case domain_events.DomainsTouched():
            return "a ComputeDomain or a clique has changed"
        case domain_events.ImexRead(number, ImexFacts() as facts):
            imex = facts.absent or facts.host_problem or f"clique {facts.clique_id or 'none'}"
            return f"read {number}: IMEX on the host: {imex}"
        case domain_events.ImexRead(number, reason):
            return f"read {number} of IMEX on the host failed: {reason}"
        case (
            events.partitions.PartitionIntentsRead()
            | events.partitions.PartitionIntentsWritten()
            | events.partitions.PartitionIntentsUnwritten()
            | events.partitions.PartitionsQueried()
            | events.partitions.PartitionQueryFailed()
            | events.partitions.PartitionActDone()
        ):
            return _partition_words(event)
        case events.daemon.Ticked():
            return "tick"
        case events.daemon.ConfigUsed(keys):
            return f"the configuration file has changed, and is used: {', '.join(keys) or 'as before'}"
        case events.daemon.ConfigUnused("", keys):
            return f"the configuration file has changed, and needs a restart: {', '.join(keys)}"
        case events.daemon.ConfigUnused(reason):
            return f"the configuration file has changed, and is refused: {reason}"
        case events.daemon.PredecessorGone(how, _):
            return f"begins to serve (the daemon before: {how})"
        case events.daemon.HandOverRequested():
            return "a successor asks for the hand-over"
        case events.daemon.SuccessorLost():
            return "the successor is gone"
        case events.daemon.ShutdownRequested():
            return "asked to stop"
        case _:
            assert_never(event)


def _partition_words(event: events.partitions.PartitionEvent) -> str:
    match event:
        case events.partitions.PartitionIntentsRead(intents):
            named = ", ".join(f"{intent.goal} {intent.id}" for intent in intents)
            return f"intents of partitions read: {named or 'none'}"
        case events.partitions.PartitionIntentsWritten(number):
            return f"intents {number} of partitions are on disk"
        case events.partitions.PartitionIntentsUnwritten(reason):
            return f"the intents of partitions are not on disk: {reason}"
        case events.partitions.PartitionsQueried(query, known):
            active = ", ".join(str(p.partition_id) for p in known.partitions if p.is_active)
            return f"query {query}: {count(len(known.partitions), 'partition')}, active {active or 'none'}"
        case events.partitions.PartitionQueryFailed(query, reason):
            return f"query {query} of the partitions failed: {reason}"
        case events.partitions.PartitionActDone(act, problem):
            return f"act {act} on a partition {f'failed: {problem}' if problem else 'is done'}"


def _ledger(event: events.kubelet.LedgerRead) -> str:
    """Return the entries of List and of the file; the core decides which of them count."""
    allocated = f"{count(len(event.listed), 'device')} given to pods"
    if event.claims:
        allocated += f", {len(event.claims)} claimed"
    if event.passive:
        entries = (
            "its file could not be read" if event.file is None else f"{len(event.file.entries)} in its file"
        )
        answers = f"; asked for {count(len(event.answers), 'pod')}" if event.answers else ""
        return f"without {LedgerSource.LIST}: {entries}{answers}"
    if event.file is None:
        return f"{LedgerSource.LIST}: {allocated}; its file could not be read"
    in_file = len(event.file.entries)
    if event.kubelet is None:
        return f"{LedgerSource.FILE}: {count(in_file, 'device')} given to pods"
    return f"{LedgerSource.LIST}: {allocated}; {in_file} in its file"


def effect_words(effect: effects.Effect) -> str:
    """Return the daemon's reaction in words: an answer, or a log line."""
    match effect:
        case effects.Log(level, name, fields):
            return f"{level.upper():<7} {name}{_fields(fields)}"
        case effects.Reply(token, answer):
            match answer:
                case effects.Granted(containers):
                    nodes = ", ".join(sorted({node for c in containers for node in (*c.nodes, *c.cdi_ids)}))
                    return f"answer  call {token}: granted {nodes}"
                case effects.Preferred(containers):
                    return f"answer  call {token}: preferred {_ids(containers)}"
                case effects.Ready():
                    return f"answer  call {token}: ready"
                case Prepared(prepared):
                    return f"answer  call {token}: prepared {', '.join(d.device for d in prepared)}"
                case Unprepared():
                    return f"answer  call {token}: unprepared"
                case effects.Refused(status, reason):
                    return f"answer  call {token}: refused, {status}: {reason}"
                case effects.Elsewhere():
                    return f"answer  call {token}: the successor's"
                case _:
                    assert_never(answer)
        case _:
            assert_never(effect)


def domain_words(report: DomainReport) -> str:
    """Return the status of a compute domain, with what is missing."""
    return f"{report.status}: {report.missing}" if report.missing else str(report.status)


def is_worth_reading(effect: effects.Effect) -> bool:
    """Return whether an effect is an answer, or a log line above debug."""
    return isinstance(effect, effects.Reply) or effect.level is not effects.Level.DEBUG


def _inspected(address: str, functions: Iterable[PciFunction]) -> str:
    function = next((f for f in functions if f.address == address), None)
    if function is None:
        return "nothing of interest is there"
    return function.fault or f"bound to {function.driver or 'no driver'}"


def _used(uses: Iterable[GroupUse]) -> str:
    uses = tuple(uses)
    held = sorted(u.group for u in uses if u.holders or u.open_refused or any(u.enabled.values()))
    groups = count(len(uses), "IOMMU group")
    return f"{groups}, none in use" if not held else f"{groups}, in use: {', '.join(map(str, held))}"


def _ids(requests: Iterable[Iterable[str]]) -> str:
    return "; ".join(", ".join(ids) for ids in requests)


def _fields(fields: Mapping[str, effects.Field]) -> str:
    shown = (
        f" {key}={','.join(value) if isinstance(value, tuple) else value!r}" for key, value in fields.items()
    )
    return "".join(shown)
