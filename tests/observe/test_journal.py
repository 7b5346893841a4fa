"""The journal: what goes in comes out again, its size is bounded, and nothing that goes wrong stops the daemon."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import trio
import trio.testing
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core import events
from gpuactors.core.events import claims as claim_events
from gpuactors.core.events import domains as domain_events
from gpuactors.core.kinds.sets import DeviceSet, KnownSets, Partition, PartitionGpu, SetSource
from gpuactors.core.reports.snapshot import project
from gpuactors.core.state.claims import ClaimedGpu, GpuReservation, StoredEntry
from gpuactors.core.values import effects
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import (
    ActFault,
    AllocatedDevice,
    BoundFunction,
    Claim,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    FitnessFinding,
    OpaqueConfig,
    OriginalDriver,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, ImexFacts, NodeLabel
from gpuactors.core.values.model import (
    CachedAnswer,
    ClaimedDevice,
    DeviceId,
    GroupUse,
    Holder,
    LedgerEntry,
    LedgerFile,
    Pod,
    PodLife,
    ResourceName,
    RunningKubelet,
    SeenPods,
    Token,
    device_key,
    pci_address,
)
from gpuactors.core.values.partition import Goal, Intent, PartitionId
from gpuactors.core.values.selector import parse_selector
from gpuactors.core.values.slices import Publication, ServerKeeps
from gpuactors.core.values.vgpu import parse_own_type
from gpuactors.observe import journal as observe_journal
from gpuactors.observe import log
from gpuactors.observe.journal import (
    JOURNAL_DROPPED_LOG_S,
    JOURNAL_WAITING_STEPS,
    Anchor,
    Bounds,
    FileJournal,
    Missed,
    Origin,
)
from gpuactors.observe.journal_format import (
    AgainLine,
    Digests,
    Header,
    LineWriter,
    StateLine,
    StepLine,
    encoded_effects,
)
from gpuactors.ports.node import Step
from gpuactors.replay.journal_lines import EVENTS as EVENT_KINDS
from gpuactors.replay.journal_lines import EventReader, FormatError, read_line, read_state
from tests.core.builders import H100, gpu
from tests.observe.recording import WALL, Held, QuietNode, files, story, write
from tests.support.descriptors import open_files

GPU = pci_address("0000:23:00.0")
ID = DeviceId("0000:23:00.0")
POD = Pod("default", "vm-1", "6f1a")
USE = GroupUse(
    35, {GPU: 1}, frozenset({GPU}), (Holder(4711, 'qemu \N{RADIOACTIVE SIGN} \\ "x"', None),), None
)

CLAIM = Claim(
    ClaimName("default", "one", ClaimUid("8d0e")),
    "gpu",
    1,
    (AllocatedDevice("gpu/any", "node-1", "gpu-0000-23-00-0", share_id="s", admin_access=True),),
    (OpaqueConfig(True, ("gpu",), {"kind": "VfioDeviceConfig", "iommu": {"enableAPIDevice": False}}),),
)
NVIDIA = OriginalDriver(GPU, "nvidia")
ENTRY = StoredEntry(
    CLAIM.name,
    ClaimState.PREPARED,
    CLAIM,
    GpuReservation(
        (ClaimedGpu(device_key(GPU), (NVIDIA,), keep_on_vfio="it was found on vfio-pci"),),
        {GPU: BoundFunction(GPU, "vfio-pci", 35, None, vfio=True)},
    ),
)

EVENTS: tuple[events.Event, ...] = (
    events.host.HostChanged(GPU, None, "bind pci"),
    events.host.HostChanged(None, 35, "add vfio"),
    events.host.UeventsOpened(),
    events.host.UeventsLost("overflow"),
    events.host.UeventsUnavailable("no netlink"),
    events.host.HostScanned(
        1, (gpu("23:00.0", numa_node=1), gpu("24:00.0", driver=None, fault="class is unreadable"))
    ),
    events.host.ScanFailed(2, "no /sys"),
    events.host.FunctionInspected(3, GPU, ()),
    events.host.FunctionsInspected(
        (
            events.host.FunctionInspected(3, GPU, (gpu("23:00.0"),)),
            events.host.FunctionInspected(4, pci_address("0000:24:00.0"), ()),
        )
    ),
    events.host.InspectionFailed(4, GPU, "hangs"),
    events.host.SetsObserved(
        SetSource.OPERATOR,
        KnownSets(
            (DeviceSet((device_key(GPU),), SetSource.OPERATOR, "1", is_active=True),),
            {device_key(GPU): 1},
            ("sets.json: it is empty",),
            (Partition(1, True, (PartitionGpu(1, None, "00000000:23:00.0"),)),),
        ),
    ),
    events.host.SetsObserved(SetSource.FABRIC_MANAGER, "fmpm cannot be run"),
    events.host.GroupsObserved(5, (USE, replace(USE, group=36, holders=None, open_refused=True))),
    events.host.SomeGroupsObserved(6, (USE,)),
    events.kubelet.LedgerRead(
        6,
        RunningKubelet("1:2:3", 0.5),
        (LedgerEntry(H100, ID, POD),),
        (ClaimedDevice("d", "p", "gpu-1", "ns/c", POD),),
        "-gpu-17",
        {H100: (ID,)},
        LedgerFile(
            (LedgerEntry(H100, ID, POD),), (CachedAnswer(H100, ID, ("/dev/vfio/35",)),), "one is damaged"
        ),
    ),
    events.kubelet.LedgerRead(7, None, (), (), file=LedgerFile(exists=False)),
    events.kubelet.LedgerUnreadable(7, "refused"),
    events.kubelet.LedgerUnreadable(
        8, "refused", LedgerFile((LedgerEntry(H100, ID, POD),)), SeenPods({"uid": PodLife.ABSENT}, 1)
    ),
    events.kubelet.KubeletAppeared("1:2:3"),
    events.kubelet.KubeletGone("kubelet.sock does not exist"),
    events.kubelet.ForeignSocketsSeen(("kubevirt-gpu.sock",)),
    events.deviceplugin.SocketBound(H100, 1),
    events.deviceplugin.SocketFailed(H100, 2, "read-only"),
    events.deviceplugin.RegisterAnswered(H100, 1),
    events.deviceplugin.RegisterAnswered(H100, 2, "refused"),
    events.deviceplugin.StreamOpened(H100, 1),
    events.deviceplugin.StreamEnded(H100, 1),
    events.deviceplugin.AllocateAsked(Token(1), H100, ((ID,), (ID, DeviceId("36")))),
    events.deviceplugin.PreStartAsked(Token(2), H100, (ID,)),
    events.deviceplugin.PreferenceAsked(
        Token(3), H100, (events.deviceplugin.PreferenceRequest((ID,), (), 1),)
    ),
    events.deviceplugin.CallAbandoned(Token(3)),
    events.deviceplugin.SpecsWritten(
        {H100: {ID: ("/dev/vfio/vfio", "/dev/vfio/35")}}, {H100: "the disk is full"}
    ),
    claim_events.PrepareAsked(Token(4), CLAIM.name, ClaimsOf.GPUS),
    claim_events.UnprepareAsked(Token(5), CLAIM.name, ClaimsOf.GPUS),
    claim_events.ClaimRead(1, CLAIM, ClaimsOf.GPUS),
    claim_events.ClaimRead(2, "gone", ClaimsOf.GPUS, missing=True),
    claim_events.ClaimRead(3, "refused", ClaimsOf.GPUS),
    claim_events.CheckpointRead((ENTRY,), (NVIDIA,), "one part is damaged", driver_kind=ClaimsOf.GPUS),
    claim_events.CheckpointRefused("written by version 9", ClaimsOf.GPUS),
    claim_events.CheckpointWritten(4, ClaimsOf.GPUS),
    claim_events.CheckpointWritten(5, ClaimsOf.GPUS, "disk full"),
    claim_events.ActDone(
        6, (BoundFunction(GPU, "vfio-pci", 35, "vfio0", vfio=True),), driver_kind=ClaimsOf.GPUS
    ),
    claim_events.ActFailed(7, "hangs", ActFault.HANGS, driver_kind=ClaimsOf.GPUS),
    claim_events.FitnessChecked(
        7, (FitnessFinding(device_key(GPU)), FitnessFinding(device_key(GPU), ActFault.IN_USE, "open"))
    ),
    claim_events.FilesTouched(ClaimsOf.GPUS),
    claim_events.FilesTouched(ClaimsOf.GPUS, (CLAIM.name.uid,)),
    claim_events.SlicesPublished(
        Publication("gpu.example", ServerKeeps.YES, True, 1, 1, ("gpu-1",), (), {GPU: "VMD"}),
        ClaimsOf.GPUS,
    ),
    claim_events.PrepareAsked(Token(6), CLAIM.name, ClaimsOf.DOMAINS),
    domain_events.LabelRead(8, NodeLabel("1-2")),
    domain_events.LabelRead(9, "refused"),
    domain_events.LabelPatched(10),
    domain_events.LabelPatched(11, "422", conflict=True),
    domain_events.LabelPatched(12, "timed out"),
    domain_events.NodeTouched(),
    domain_events.DomainRead(
        13,
        DomainUid("1-2"),
        ComputeDomain(DomainUid("1-2"), "red", "default", frozenset({"node-1"})),
        Clique(frozenset({"node-1"})),
    ),
    domain_events.DomainRead(14, DomainUid("1-2"), "refused"),
    domain_events.DomainsTouched(),
    domain_events.ImexRead(15, ImexFacts("", 501, 238, 7, "cluster.1", "INITIALIZING")),
    domain_events.ImexRead(16, "/proc hangs"),
    events.partitions.PartitionIntentsRead(
        (Intent(PartitionId("7"), frozenset({device_key(GPU)}), Goal.ACTIVATE),)
    ),
    events.partitions.PartitionIntentsWritten(2),
    events.partitions.PartitionIntentsUnwritten("the disk is full"),
    events.partitions.PartitionsQueried(17, KnownSets(partitions=(Partition(1, True, (PartitionGpu(1),)),))),
    events.partitions.PartitionQueryFailed(18, "it ends with status 1"),
    events.partitions.PartitionActDone(3, "it has not ended"),
    events.daemon.Ticked(),
    events.daemon.ConfigUsed(
        ("select",), (parse_selector("vendor=10de"),), (parse_own_type("1147=NVIDIA L40S-1Q"),)
    ),
    events.daemon.ConfigUnused("it cannot be read"),
    events.daemon.ConfigUnused("", ("dra",)),
    events.daemon.PredecessorGone("none"),
    events.daemon.HandOverRequested(),
    events.daemon.SuccessorLost(),
    events.daemon.ShutdownRequested(),
)

# --- lines ------------------------------------------------------------------------------------------------


def test_every_event_comes_out_as_it_went_in() -> None:
    assert {type(event) for event in EVENTS} == set(EVENT_KINDS.values())
    state = story().state
    writer, reader = LineWriter(), EventReader()
    for at, event in enumerate(
        [*EVENTS, *EVENTS, *reversed(EVENTS)]
    ):  # what is left out the second time comes back
        news = (effects.Log(effects.Level.INFO, "what.happened", {}),)
        line = read_line(writer.step_line(Step(state, event, at + 0.1, news, project(state))))
        assert isinstance(line, StepLine)
        assert line.at == at + 0.1
        assert reader.event(line) == event


def test_a_failed_read_of_an_older_journal_says_nothing_of_the_file() -> None:
    line = read_line(
        b'{"at":1.0,"event":"LedgerUnreadable","fields":{"read":7,"reason":"refused"},"digest":"x"}'
    )
    assert isinstance(line, StepLine)
    assert EventReader().event(line) == events.kubelet.LedgerUnreadable(7, "refused")


@pytest.mark.parametrize("reason", [b"[" * 5000, b'"\xed\xa0\x80"'], ids=["nests", "is no UTF-8"])
def test_a_damaged_line_is_an_error_of_the_journal(reason: bytes) -> None:
    line = read_line(b'{"at":1.0,"event":"LedgerUnreadable","fields":{"read":7,"reason":"x"},"digest":"x"}')
    assert isinstance(line, StepLine)
    with pytest.raises(FormatError, match="LedgerUnreadable is not one of this version"):
        EventReader().event(msgspec.structs.replace(line, fields=msgspec.Raw(b'{"reason":%s}' % reason)))


def test_every_effect_is_in_the_line() -> None:
    written = (
        effects.Log(
            effects.Level.WARNING,
            "call.refused",
            {"devices": ("a", "b"), "n": 1, "x": None, "at": 0.5, "ok": True},
        ),
        effects.Reply(Token(1), effects.Granted((effects.Grant((("A", "1"),), ("/dev/vfio/35",)),))),
        effects.Reply(Token(2), effects.Preferred(((ID,),))),
        effects.Reply(Token(3), effects.Ready()),
        effects.Reply(
            Token(4), effects.Refused(effects.Refusal.NOT_FOUND, "no such device", (Cause.UNKNOWN_ID,))
        ),
        effects.Reply(Token(5), effects.Elsewhere()),
    )
    assert json.loads(encoded_effects(written)) == [
        {
            "say": "call.refused",
            "level": "warning",
            "fields": {"devices": ["a", "b"], "n": 1, "x": None, "at": 0.5, "ok": True},
        },
        {
            "reply": 1,
            "answer": "Granted",
            "fields": {
                "containers": [{"envs": [["A", "1"]], "nodes": ["/dev/vfio/35"], "cdi_ids": []}],
                "lists": [],
            },
        },
        {"reply": 2, "answer": "Preferred", "fields": {"containers": [["0000:23:00.0"]]}},
        {"reply": 3, "answer": "Ready", "fields": {}},
        {
            "reply": 4,
            "answer": "Refused",
            "fields": {
                "status": "NOT_FOUND",
                "reason": "no such device",
                "causes": ["UnknownId"],
                "owners": [],
            },
        },
        {"reply": 5, "answer": "Elsewhere", "fields": {}},
    ]


def test_every_state_comes_out_as_it_went_in() -> None:
    for step in story(events=200).steps:
        line = read_line(LineWriter().state_line(step.before, step.at, 3))
        assert isinstance(line, StateLine)
        assert (line.at, line.missed) == (step.at, 3)
        assert read_state(line) == step.before


def test_a_poll_that_says_what_the_last_one_said_is_its_number() -> None:
    steps = story().steps
    polls = [step for step in steps if isinstance(step.event, events.host.GroupsObserved)]
    writer = LineWriter()
    writer.step_line(replace(polls[0], event=events.host.GroupsObserved(1, (USE,))))
    again = json.loads(writer.step_line(replace(polls[0], event=events.host.GroupsObserved(2, (USE,)))))
    assert again["fields"] == {"poll": 2}, "no poll with this number was asked for"
    writer.state_line(polls[0].before, 1.0, 0)
    assert (
        "uses"
        in json.loads(writer.step_line(replace(polls[0], event=events.host.GroupsObserved(3, (USE,)))))[
            "fields"
        ]
    )


def test_steps_that_change_nothing_are_one_line_and_come_out_one_by_one() -> None:
    """Issue 10, 23: each poll, each tick and each read of the ledger was a line."""
    node = QuietNode("in use")
    writer, reader = LineWriter(), EventReader()
    for step in node.steps:
        writer.step_line(step)
    writer.rest()
    writer.state_line(node.state, node.at, 0)
    node.steps.clear()
    node.pass_time(60.0)
    written = b"".join([*map(writer.step_line, node.steps), writer.rest()]).splitlines()
    assert len(node.steps) > 60
    assert len(written) <= 2 * len({type(step.event) for step in node.steps})
    found: list[tuple[float, events.Event]] = []
    for line in map(read_line, written):
        if isinstance(line, StepLine):
            found.append((line.at, reader.event(line)))
        elif isinstance(line, AgainLine):
            for letter, at in zip(line.again, line.times(), strict=True):
                found.append((at, reader.again(letter, node.steps[len(found)].before)[0]))
    assert found == [(step.at, step.event) for step in node.steps]


def test_two_times_that_no_number_joins_are_two_lines() -> None:
    """Found by histories: the replay had the second one 1e-15 s earlier, and a deadline of then had not come."""
    node = QuietNode("in use")
    ticks = [step for step in node.steps if isinstance(step.event, events.daemon.Ticked)]
    writer = LineWriter()
    writer.step_line(ticks[-1])
    times = (2.2522926329452084, 6.3522926329452085, 6.4)
    folded = [replace(ticks[-1], at=at) for at in times]
    written = b"".join([*map(writer.step_line, folded), writer.rest()])
    lines = [read_line(line) for line in written.splitlines()]
    assert len(lines) == 2
    assert tuple(at for line in lines if isinstance(line, AgainLine) for at in line.times()) == times


@pytest.mark.parametrize("what", ["another use", "another answer to it", "another number", "a bug"])
def test_a_step_that_is_not_like_the_last_one_of_its_kind_has_a_line_of_its_own(what: str) -> None:
    node = QuietNode("one held externally")
    polls = [step for step in node.steps if isinstance(step.event, events.host.GroupsObserved)]
    poll = polls[-1]
    assert isinstance(poll.event, events.host.GroupsObserved)
    match what:
        case "another use":
            other = replace(poll, event=replace(poll.event, uses=poll.event.uses[1:]))
        case "another answer to it":
            other = replace(poll, effects=(effects.Log(effects.Level.DEBUG, "never.said", {}),))
        case "another number":
            other = replace(poll, event=replace(poll.event, poll=poll.event.poll + 1))
        case _:
            other = replace(poll, outputs=None, failure="AssertionError()")
    writer = LineWriter()
    writer.step_line(polls[-2])
    assert writer.step_line(poll) == b""
    again, own = map(read_line, writer.step_line(other).splitlines())
    assert isinstance(again, AgainLine)
    assert isinstance(own, StepLine)


@pytest.mark.parametrize("held", get_args(Held))
def test_two_weeks_of_a_quiet_node_find_room_whoever_holds_its_gpus(tmp_path: Path, held: Held) -> None:
    """Issue 10, 23: one GPU that an external process held made 60 MiB a day, so that 26 hours were kept."""
    node = QuietNode(held)
    hours, journal = 1, files(tmp_path)
    node.journal_of(hours * 3600.0, journal)
    journal.close()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 14 * 24 / hours * size < limits.JOURNAL_MAX_BYTES


def test_a_digest_is_of_what_is_to_be_seen_outside() -> None:
    state = story().state
    same, other = Digests(), Digests()
    assert same.of(project(state)) == same.of(project(state)) == other.of(project(state))
    outputs = project(state)
    assert same.of(replace(outputs, stopping=True)) != same.of(outputs)
    resource, view = next(iter(outputs.plugins.items()))
    told = replace(view.device_list[0], reason="another")
    changed = replace(outputs, plugins={resource: replace(view, device_list=(told, *view.device_list[1:]))})
    assert same.of(changed) != same.of(outputs)
    shorter = replace(outputs, plugins={resource: replace(view, device_list=view.device_list[1:])})
    assert same.of(shorter) != same.of(outputs)
    given = replace(outputs, inspections=replace(outputs.inspections, given=frozenset({told.key})))
    assert same.of(given) != same.of(outputs)
    assert same.of(replace(outputs, plugins={})) != same.of(outputs)
    assert same.of(outputs) == other.of(outputs), "whatever there was before"
    # In whatever order a mapping came about.
    more = {**outputs.plugins, ResourceName("nvidia.com/A"): view, ResourceName("nvidia.com/Z"): view}
    turned = dict(reversed(more.items()))
    assert same.of(replace(outputs, plugins=turned)) == other.of(replace(outputs, plugins=more))


def steps_in(lines: Sequence[object]) -> int:
    """How many steps these lines are."""
    assert all(isinstance(line, StepLine | AgainLine) for line in lines)
    return sum(len(line.again) if isinstance(line, AgainLine) else 1 for line in lines)


# --- files ------------------------------------------------------------------------------------------------


def test_a_file_ends_at_its_bound_and_each_can_be_replayed_alone(tmp_path: Path) -> None:
    steps = story(events=200).steps
    found = write(tmp_path, *steps, bounds=Bounds(file_bytes=8_000))
    assert len(found) > 3
    written = 0
    for part, path in enumerate(found, start=1):
        first, second, *rest = map(read_line, path.read_bytes().splitlines(keepends=True))
        assert isinstance(first, Header)
        assert (first.part, first.run, first.pid, first.boot) == (part, "a", 4711, "boot")
        assert first.at == steps[written].at
        assert first.wall.startswith("2026-11-21T06:")
        assert isinstance(second, StateLine)
        assert read_state(second) == steps[written].before
        written += steps_in(rest)
    assert written == len(steps)


def test_the_oldest_files_go_and_never_the_present_one(tmp_path: Path) -> None:
    steps = story(events=400).steps
    bounds = Bounds(file_bytes=8_000, all_bytes=30_000)
    found = write(tmp_path, *steps, bounds=bounds)
    assert 2 <= len(found) <= 4
    assert found[0].name != "00000001.jsonl"
    last = [read_line(line) for line in found[-1].read_bytes().splitlines()][-1]
    assert isinstance(last, StepLine | AgainLine)
    assert (list(last.times())[-1] if isinstance(last, AgainLine) else last.at) == steps[-1].at

    for run in range(20):  # a daemon that is started again and again
        write(tmp_path, *steps[:2], run=f"r{run}", bounds=Bounds(files=10))
    assert len(list(tmp_path.iterdir())) == 10


def test_two_daemons_that_hand_over_write_files_of_their_own(tmp_path: Path) -> None:
    steps = story().steps
    old, new = files(tmp_path, run="old"), files(tmp_path, run="new")
    now = Anchor(0.0, WALL)
    old.write(steps[:5], now)
    new.write(steps[:5], now)
    old.write(steps[5:10], now)
    new.write(steps[5:10], now)
    for path, run in zip(sorted(tmp_path.iterdir()), ("old", "new"), strict=True):
        first, *rest = map(read_line, path.read_bytes().splitlines())
        assert isinstance(first, Header)
        assert first.run == run
        assert steps_in(rest[1:]) == 10


def test_a_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "journal", *story().steps[:3])
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_after_a_failed_write_a_new_file_begins_with_the_state(tmp_path: Path) -> None:
    steps = story().steps
    directory = tmp_path / "journal"
    directory.touch()
    journal, now = files(directory), Anchor(0.0, WALL)
    with pytest.raises(OSError, match=str(directory)):
        journal.write([*steps[:4], Missed(2)], now)
    directory.unlink()
    journal.write(steps[6:9], now)
    journal.close()
    (path,) = directory.iterdir()
    _, state, *rest = map(read_line, path.read_bytes().splitlines())
    assert isinstance(state, StateLine)
    assert state.missed == 6
    assert read_state(state) == steps[6].before
    assert steps_in(rest) == 3


Said = Callable[[], list[dict[str, str]]]

# --- the recorder -----------------------------------------------------------------------------------------


def recorder(directory: Path, waiting_steps: int = JOURNAL_WAITING_STEPS) -> FileJournal:
    return FileJournal(str(directory), Origin("0.1.0", "a", "", 1), Bounds(waiting_steps=waiting_steps))


@pytest.fixture
def said() -> Iterator[Said]:
    """What was logged so far."""
    stream = io.StringIO()
    log.configure("json", "debug", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.configure("json", "error", stream=io.StringIO())


async def writes_the_last(journal: FileJournal) -> None:
    """Runs it and cancels it at once."""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


def lines(directory: Path) -> list[object]:
    return [
        read_line(line) for path in sorted(directory.iterdir()) for line in path.read_bytes().splitlines()
    ]


async def test_the_last_steps_are_written_when_the_daemon_ends(tmp_path: Path) -> None:
    steps = story().steps
    journal = recorder(tmp_path)
    for step in steps[:3]:
        journal.record(step)
    await writes_the_last(journal)
    assert [line.event for line in lines(tmp_path) if isinstance(line, StepLine)] == [
        type(step.event).__name__ for step in steps[:3]
    ]


async def test_no_file_is_left_open_when_the_daemon_ends(tmp_path: Path) -> None:
    journal = recorder(tmp_path)
    for step in story().steps[:2]:
        journal.record(step)
        await writes_the_last(journal)
        assert open_files(tmp_path) == []
    assert len(os.listdir(tmp_path)) == 2


def test_routine_waits_and_news_does_not(tmp_path: Path) -> None:
    """On the mock clock: the write happens at the time that the bounds name."""
    steps = story(events=100).steps
    journal, clock = recorder(tmp_path), trio.testing.MockClock()
    routine = next(s for s in steps if isinstance(s.event, events.daemon.Ticked) and not s.effects)
    news = next(s for s in steps if s.effects)
    written: list[float] = []

    async def write(*, last: bool = False) -> bool:
        if journal._waiting:
            journal._waiting.clear()
            written.append(trio.current_time())
        return True

    journal._write = write  # type: ignore[method-assign]

    async def passes(seconds: float) -> None:
        for _ in range(int(seconds * 20)):
            clock.jump(0.05)
            await trio.testing.wait_all_tasks_blocked()

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            journal.record(routine)
            await passes(observe_journal.JOURNAL_ROUTINE_S - 0.5)
            assert not written
            await passes(1.0)
            assert len(written) == 1
            journal.record(routine)
            journal.record(news)
            await passes(observe_journal.JOURNAL_BATCH_S + 0.1)
            assert len(written) == 2
            nursery.cancel_scope.cancel()

    trio.run(play, clock=clock)


async def test_what_finds_no_room_is_counted_and_the_state_follows(tmp_path: Path, said: Said) -> None:
    steps = story().steps
    journal = recorder(tmp_path, waiting_steps=2)
    for step in steps[:5]:
        journal.record(step)
    assert [line["event"] for line in said()] == ["journal.dropped"]
    await writes_the_last(journal)
    for step in steps[5:7]:
        journal.record(step)
    await writes_the_last(journal)
    found = lines(tmp_path)
    (gap,) = [line for line in found if isinstance(line, StateLine) and line.missed]
    assert gap.missed == 3
    assert read_state(gap) == steps[5].before
    at = found.index(gap)
    assert [line.at for line in found[at:] if isinstance(line, StepLine)][:1] == [steps[5].at]


async def test_in_a_flood_of_events_one_line_a_minute_says_that_there_are_gaps(
    tmp_path: Path, said: Said, autojump_clock: trio.testing.MockClock
) -> None:
    """There were 44 in 15 s: each time the disk had caught up and fell behind again."""
    steps = story().steps
    journal = recorder(tmp_path, waiting_steps=2)
    for _ in range(44):
        for step in steps[:3]:
            journal.record(step)
        journal._waiting.clear()
        await trio.sleep(0.34)
    assert [line["event"] for line in said()] == ["journal.dropped"]
    await trio.sleep(JOURNAL_DROPPED_LOG_S)
    for step in steps[:3]:
        journal.record(step)
    assert [line["event"] for line in said()] == ["journal.dropped"] * 2


async def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    journal = recorder(tmp_path)
    journal.record(story().steps[0])
    with journal._lock:  # as a thread does that hangs in a write
        await writes_the_last(journal)
        assert not os.listdir(tmp_path)


async def test_a_directory_that_cannot_be_had_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setattr(observe_journal, "JOURNAL_BATCH_S", 0.0)
    monkeypatch.setattr(observe_journal, "JOURNAL_ROUTINE_S", 0.01)
    monkeypatch.setattr(observe_journal, "JOURNAL_RETRY_S", 0.0)
    directory = tmp_path / "journal"
    directory.touch()
    steps = story().steps
    journal = recorder(directory)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            for step in steps[:3]:
                journal.record(step)
                while journal._waiting:  # until it was tried
                    await trio.lowlevel.checkpoint()
            directory.unlink()
            while not directory.is_dir() or not list(directory.iterdir()):
                journal.record(steps[4])
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    names = [line["event"] for line in said()]
    assert names.count("journal.failed") == 1
    assert "journal.resumed" in names
    reason = next(line["reason"] for line in said() if line["event"] == "journal.failed")
    assert str(directory) in reason
    assert "--state-dir" in reason
