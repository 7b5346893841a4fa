"""The pod resources actor: each number once, one after another, and an answer to each that was begun."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from gpuactors.actors import pod_resources
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events import Event
from gpuactors.core.events.kubelet import LedgerRead, LedgerUnreadable
from gpuactors.core.reports.snapshot import LedgerWanted
from gpuactors.core.values.model import (
    CachedAnswer,
    DeviceId,
    LedgerEntry,
    LedgerFile,
    Pod,
    PodLife,
    ResourceName,
    RunningKubelet,
    SeenPods,
)
from gpuactors.ports.errors import HostShortError
from gpuactors.ports.node import LedgerContents, LedgerError, LedgerQuestion
from tests.support.patience import patient

WITHIN_S = patient(10.0)
RESOURCE = ResourceName("nvidia.com/X")
ENTRY = LedgerEntry(RESOURCE, DeviceId("gpu0"), Pod("default", "vm", ""))
ANSWER = CachedAnswer(RESOURCE, DeviceId("gpu0"), ("/dev/vfio/81",))
KUBELET = RunningKubelet("1:2:3", 7.5)
FILE = LedgerFile(cached=(ANSWER,))
PODS = SeenPods({"uid": PodLife.ABSENT}, 1)
CONTENTS = LedgerContents(KUBELET, (ENTRY,), (), "-xyz", file=FILE)
LIST = {RESOURCE: (DeviceId("gpu0"),)}


@dataclass
class Ledger:
    """A ledger whose reads wait for `go`."""

    answers: list[LedgerContents | LedgerError | RecursionError] = field(default_factory=list)
    go: trio.Event = field(default_factory=trio.Event)
    reads: int = 0
    asked: list[tuple[ResourceName, ...]] = field(default_factory=list)

    async def read(self, question: LedgerQuestion) -> LedgerContents:
        self.reads += 1
        self.asked.append(tuple(question.resources))
        await self.go.wait()
        answer = self.answers.pop(0) if self.answers else CONTENTS
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.trio
async def test_each_number_is_read_once(nursery: trio.Nursery) -> None:
    wanted: Latest[LedgerWanted] = Latest(LedgerWanted(None))
    send, receive = trio.open_memory_channel[Event](8)
    ledger = Ledger(
        answers=[
            CONTENTS,
            LedgerError("not today"),
            replace(CONTENTS, healthy=LIST),
            LedgerError("not today", FILE, PODS),
        ]
    )
    ledger.go.set()
    nursery.start_soon(pod_resources.run, wanted.subscribe(), ledger, send)
    with trio.fail_after(WITHIN_S):
        await wait_all_tasks_blocked()
        assert ledger.reads == 0
        for number, answer in (
            (1, LedgerRead(1, KUBELET, (ENTRY,), (), "-xyz", None, FILE)),
            (4, LedgerUnreadable(4, "not today")),
            (5, LedgerRead(5, KUBELET, (ENTRY,), (), "-xyz", LIST, FILE)),
            (6, LedgerUnreadable(6, "not today", FILE, PODS)),
        ):
            wanted.set(LedgerWanted(number, (RESOURCE,)))
            assert await receive.receive() == answer
            # The same number again, as when the core's other outputs change.
            wanted.set(LedgerWanted(number, ()))
            await wait_all_tasks_blocked()
        assert ledger.reads == 4
        assert ledger.asked == [(RESOURCE,)] * 4
    assert receive.statistics().current_buffer_used == 0


@pytest.mark.trio
async def test_what_is_asked_for_during_a_read_is_read_after_it_and_conflates(nursery: trio.Nursery) -> None:
    wanted = Latest(LedgerWanted(1))
    send, receive = trio.open_memory_channel[Event](8)
    ledger = Ledger()
    nursery.start_soon(pod_resources.run, wanted.subscribe(), ledger, send)
    with trio.fail_after(WITHIN_S):
        for number in (2, 3):
            await wait_all_tasks_blocked()
            wanted.set(LedgerWanted(number, (RESOURCE,)))
        assert ledger.reads == 1, "one at a time"
        ledger.go.set()
        events = [await receive.receive(), await receive.receive()]
    assert [event.read for event in events if isinstance(event, LedgerRead)] == [1, 3]


@pytest.mark.trio
async def test_a_bug_costs_one_read(nursery: trio.Nursery) -> None:
    wanted = Latest(LedgerWanted(7))
    send, receive = trio.open_memory_channel[Event](8)
    ledger = Ledger(answers=[RecursionError("too deep")])
    ledger.go.set()
    nursery.start_soon(pod_resources.run, wanted.subscribe(), ledger, send)
    with trio.fail_after(WITHIN_S):
        failed = await receive.receive()
        assert isinstance(failed, LedgerUnreadable)
        assert failed.read == 7
        assert failed.reason.startswith("internal error: RecursionError('too deep'); please report it")
        wanted.set(LedgerWanted(8))
        assert await receive.receive() == LedgerRead(8, KUBELET, (ENTRY,), (), "-xyz", None, FILE)


class UnreadableCdi:
    """A CDI directory for which there are no descriptors, or whose reader has a bug."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def read(self) -> None:
        raise self._error


@pytest.mark.trio
@pytest.mark.parametrize("error", [HostShortError("no descriptors"), RecursionError("a bug")])
async def test_where_the_cdi_directory_cannot_be_read_the_ledger_counts(error: Exception) -> None:
    ledger = Ledger()
    ledger.go.set()
    event = await pod_resources.read(1, LedgerWanted(1, (RESOURCE,)), ledger, UnreadableCdi(error))
    assert isinstance(event, LedgerRead)
    assert (event.listed, event.cdi) == (CONTENTS.listed, None)
