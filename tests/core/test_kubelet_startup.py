"""Which entries of kubelet's ledger count: its list, its file, or what was known before."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.host import HostScanned
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.ledger.kubelet_startup import called, counted
from gpuactors.core.ledger.ledger import first_ledger
from gpuactors.core.values.model import (
    ClaimedDevice,
    DeviceId,
    KubeletStartup,
    LedgerEntry,
    LedgerFile,
    LedgerSource,
    Pod,
    RunningKubelet,
)
from tests.core.builders import H100, NO_FILE, Core, gpu, ledger_read, read_of_young

OLD_S, SETTLE_S = limits.LEDGER_SETTLE_S, limits.LEDGER_SETTLE_S
NODE = "-node1.example"
"""What the names of static pods end in."""
API = ""
"""What the names of any two pods of a DaemonSet end in."""


def listed(*devices: str) -> tuple[LedgerEntry, ...]:
    """List names its pods."""
    return tuple(LedgerEntry(H100, DeviceId(d), Pod("default", f"vm-{d}", "")) for d in devices)


def filed(*devices: str) -> tuple[LedgerEntry, ...]:
    """The file has their UIDs."""
    return tuple(LedgerEntry(H100, DeviceId(d), Pod("", "", f"uid-{d}")) for d in devices)


class Reads:
    """Reads of one node's ledger, one after the other: what counted at the last one is known at the next."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.kubelet = RunningKubelet("first", 0.0)
        self.ledger = first_ledger(1, lists=True)
        self.source = LedgerSource.LIST

    def restarts(self, socket: str = "second", age_s: float = 0.0) -> None:
        """From now on this kubelet answers."""
        self.kubelet = RunningKubelet(socket, age_s)

    def lists(
        self,
        *devices: str,
        file: Iterable[str] | None = (),
        names_end: str | None = None,
        after_s: float = 0.0,
    ) -> tuple[LedgerEntry, ...]:
        """What counts after List has named these devices and the file those, or could not be read."""
        beside = None if file is None else LedgerFile(filed(*(d for d in file if d not in devices)))
        if devices and names_end is None:
            names_end = f"vm-{devices[0]}" if len(devices) == 1 else ""
        return self.read(LedgerRead(1, self.kubelet, listed(*devices), (), names_end, file=beside), after_s)

    def called(self, at: float) -> None:
        """Kubelet asks for a claim."""
        self.ledger = replace(self.ledger, young=called(self.ledger.young, at))

    def read(self, event: LedgerRead, after_s: float = 0.0) -> tuple[LedgerEntry, ...]:
        """What counts after this."""
        self.at += after_s
        result = counted(self.ledger, (), event, self.at, device_plugin=True)
        self.source = result.source
        known = {(e.resource, e.device): e.pod for e in result.entries}
        self.ledger = replace(self.ledger, young=result.young, books=result.books, entries=known)
        return result.entries


@pytest.fixture
def reads() -> Reads:
    return Reads()


# --- list or file ---------------------------------------------------------------------------------------------


def test_the_list_counts_and_not_the_file_which_still_names_an_ended_pod(reads: Reads) -> None:
    reads.restarts(age_s=OLD_S)
    assert reads.lists("b", file="a", names_end=API) == listed("b")
    assert reads.source is LedgerSource.LIST
    assert not reads.source.is_settling


@pytest.mark.parametrize(
    ("file", "source"),
    [(LedgerFile(filed("a")), LedgerSource.FILE), (NO_FILE, LedgerSource.NO_FILE)],
    ids=["a file", "no file"],
)
def test_without_a_kubelet_the_file_counts(reads: Reads, file: LedgerFile, source: LedgerSource) -> None:
    assert reads.read(LedgerRead(1, None, (), (), file=file)) == file.entries
    assert reads.source is source
    assert source.is_whole


def test_without_a_kubelet_what_the_last_one_listed_does_not_speak_against_the_file(reads: Reads) -> None:
    assert reads.lists("a", file="a") == listed("a")
    assert reads.read(LedgerRead(1, None, (), (), file=LedgerFile(filed("a")))) == filed("a")


# --- a kubelet that has just started ----------------------------------------------------------------------------


def test_a_young_kubelet_that_does_not_know_its_pods_yet_takes_nothing_from_them(reads: Reads) -> None:
    both = LedgerSource.LIST_AND_FILE
    assert (reads.lists(file="ab"), reads.source) == (filed("a", "b"), both)
    assert (reads.lists("a", file="ab"), reads.source) == (listed("a") + filed("b"), both)
    # It has listed a before: that pod has ended now.
    assert (reads.lists(file="ab"), reads.source) == (filed("b"), both)
    assert (reads.lists(file="ab", after_s=SETTLE_S), reads.source) == ((), LedgerSource.LIST)
    reads.restarts()
    assert reads.lists(file="ab") == filed("a", "b"), "another kubelet has listed nothing yet"


def test_a_young_kubelet_whose_file_names_no_more_than_it_lists_is_believed(reads: Reads) -> None:
    assert reads.lists("a", file="a") == listed("a")
    assert not reads.source.is_settling


@pytest.mark.parametrize("names_end", [None, NODE, "nginx-proxy" + NODE], ids=["none", "static", "one"])
def test_while_list_has_never_named_a_pod_of_the_api_server_the_file_stands(
    reads: Reads, names_end: str | None
) -> None:
    """Kubelet was restarted while the API server is away (issue 10, item 11)."""
    for after_s in (0, 75, 3600, 100_000):
        assert reads.lists(file="ab", names_end=names_end, after_s=after_s) == filed("a", "b")
        assert reads.source.is_settling
    # The API server is back, and all pods at once.
    assert reads.lists("a", file="ab", names_end=API) == listed("a") + filed("b"), "nearly at once"
    assert reads.lists("a", file="ab", names_end=API, after_s=SETTLE_S) == listed("a")
    assert not reads.source.is_settling
    assert reads.lists(file="ab") == (), "this kubelet knows its pods"


def test_a_file_whose_pods_ended_while_kubelet_was_down_is_not_believed_for_ever(reads: Reads) -> None:
    for after_s in (0, 75):
        assert reads.lists(file="a", names_end=NODE, after_s=after_s) == filed("a")
    assert reads.lists(file="a", names_end=API, after_s=5) == filed("a")
    assert reads.lists(file="a", names_end=API, after_s=SETTLE_S - 1) == filed("a")
    assert reads.lists(file="a", names_end=API, after_s=1) == ()
    assert reads.source is LedgerSource.LIST


def test_a_kubelet_that_lists_any_device_knows_its_pods_though_all_names_end_alike(reads: Reads) -> None:
    """One virtual machine is the node's only pod."""
    assert reads.lists("a", file="ab", names_end="virt-launcher-vm-x7k2p") == listed("a") + filed("b")
    assert reads.lists("a", file="ab", names_end="virt-launcher-vm-x7k2p", after_s=SETTLE_S) == listed("a")


def test_a_kubelet_that_is_older_than_the_daemon_has_known_its_pods_for_as_long(reads: Reads) -> None:
    reads.restarts(age_s=OLD_S)
    assert reads.lists(file="a", names_end=API) == ()


def test_a_daemon_that_starts_while_the_api_server_is_away_believes_the_file_as_well(reads: Reads) -> None:
    reads.restarts(age_s=OLD_S)
    assert reads.lists(file="a", names_end=NODE) == filed("a")
    assert reads.lists(file="a", names_end=API) == filed("a"), "it has just come to know them"


def test_a_kubelet_that_asks_for_a_claim_knows_its_pods(reads: Reads) -> None:
    """On a node without other pods nothing else says that the file's pod has ended. With `--device-plugin off` nobody
    sends a list for which kubelet would write its file anew."""
    reads.restarts("first", OLD_S)
    assert reads.lists(file=["a"]) == filed("a")
    reads.called(reads.at + 100)
    assert reads.lists(file=["a"], names_end="vm-1", after_s=100) == filed("a"), (
        "it may be taking over its pods"
    )
    reads.called(reads.at + 1)
    assert reads.lists(file=["a"], names_end="vm-1", after_s=limits.LEDGER_CALLED_S) == ()
    assert reads.source is LedgerSource.LIST


def test_a_kubelet_that_has_just_started_and_asks_for_a_claim_is_believed_later(reads: Reads) -> None:
    assert reads.lists(file=["a"]) == filed("a")
    reads.called(reads.at)
    assert reads.lists(file=["a"], names_end="vm-1", after_s=limits.LEDGER_CALLED_S) == filed("a")
    assert reads.lists(file=["a"], names_end="vm-1", after_s=SETTLE_S) == ()


def test_what_one_kubelet_asked_for_says_nothing_of_the_next(reads: Reads) -> None:
    reads.restarts("first", OLD_S)
    reads.lists(file=["a"])
    reads.called(reads.at)
    reads.restarts("second", OLD_S)
    assert reads.lists(file=["a"], after_s=limits.LEDGER_CALLED_S) == filed("a")
    assert called(KubeletStartup(), reads.at) == KubeletStartup(), "none has answered yet"


def test_a_kubelet_that_lists_a_claim_for_a_pod_knows_its_pods(reads: Reads) -> None:
    claim = ClaimedDevice("gpu.example.com", "node1", "gpu-0", "default/one", Pod("default", "vm", ""))
    event = LedgerRead(1, reads.kubelet, (), (claim,), "vm-1", file=LedgerFile(filed("a")))
    assert reads.read(event) == filed("a")
    assert reads.read(event, after_s=SETTLE_S) == ()


def test_a_new_kubelet_is_not_taken_for_the_one_before_it(reads: Reads) -> None:
    """Else its first list, which names no pod yet, would count as that of one who knows them all."""
    reads.restarts("first", age_s=OLD_S)
    assert reads.lists("a", file="a", names_end=API) == listed("a")
    reads.restarts("second", age_s=0.0)
    assert reads.lists(file="a") == filed("a")


# --- a file that cannot be read ---------------------------------------------------------------------------------


def test_beside_a_young_kubelet_a_file_that_cannot_be_read_any_more_counts_as_it_was(reads: Reads) -> None:
    """Kubelet is started anew and lists nothing yet, and its file is damaged in that moment."""
    reads.read(LedgerRead(1, None, (), (), file=LedgerFile(filed("a", "b"))))
    assert reads.lists(file=None) == filed("a", "b")
    assert reads.source.is_settling
    assert reads.lists("a", file=None) == (*listed("a"), *filed("b"))
    assert reads.lists(file=None) == filed("b"), "it has listed a before: that pod has ended now"


def test_where_the_file_cannot_be_read_the_last_list_counts_beside_a_young_kubelet(reads: Reads) -> None:
    """The file was last read before three Allocates; the kubelet before this one has listed what they gave away."""
    reads.restarts("first", age_s=OLD_S)
    assert reads.lists("a", "b", "c", file="", names_end=API) == listed("a", "b", "c")
    reads.restarts("second")
    assert reads.lists(file=None) == listed("a", "b", "c")


def test_what_was_known_before_may_be_too_little_beside_a_file_that_cannot_be_read(reads: Reads) -> None:
    assert reads.lists(file="") == ()
    assert reads.source.is_whole
    assert reads.lists(file=None) == ()
    assert (reads.source, reads.source.is_whole) == (LedgerSource.LIST_AND_KNOWN, False)
    assert reads.source.is_settling


def test_a_young_kubelet_beside_a_file_that_was_never_read_may_not_name_every_pod(reads: Reads) -> None:
    for names_end, after_s, settling in ((NODE, 0.0, True), (API, 1.0, True), (API, SETTLE_S, False)):
        reads.lists(file=None, names_end=names_end, after_s=after_s)
        assert reads.source.is_settling == settling
        assert reads.source.is_whole != settling
    reads.restarts(age_s=OLD_S)
    reads.lists(file=None, names_end=API)
    assert not reads.source.is_settling, "that one has known its pods for long"


# --- what is remembered -----------------------------------------------------------------------------------------


class Name(str):
    """A string of which one can tell whether anybody has it still."""


def test_of_a_kubelet_that_knows_its_pods_nothing_is_kept() -> None:
    """A pod's device of some plugins is named anew each time: that would grow for ever."""
    ledger = first_ledger(1, lists=True)
    for age_s, at in ((OLD_S, 0.0), (0.0, SETTLE_S), (0.0, SETTLE_S * 2)):
        name = Name("an ID that comes once")
        kept = weakref.ref(name)
        kubelet = RunningKubelet("old" if age_s else "young", age_s)
        event = LedgerRead(1, kubelet, (LedgerEntry(H100, DeviceId(name), Pod("", "pod", "")),), (), API)
        ledger = replace(ledger, young=counted(ledger, (), event, at, device_plugin=True).young)
        assert bool(ledger.young.listed) == (at == SETTLE_S), "it is young at that time"
        later = counted(ledger, (), LedgerRead(1, kubelet, (), (), API), at + SETTLE_S, device_plugin=True)
        ledger = replace(ledger, young=later.young)
        del later
        del name, event
        assert kept() is None


def test_reads_of_a_kubelet_that_knows_its_pods_leave_what_is_remembered_as_it_is(reads: Reads) -> None:
    reads.restarts(age_s=OLD_S)
    reads.lists("a", names_end=API)
    before = reads.ledger.young
    assert before == KubeletStartup("second", frozenset(), -math.inf, since=reads.at)
    reads.lists("a", "b", names_end=API, after_s=5.0)
    assert reads.ledger.young is before


# --- in the state of the node -----------------------------------------------------------------------------------

A = "0000:01:00.0"


def test_a_gpu_stays_with_its_pod_while_a_young_kubelets_file_names_it_and_is_free_after_it_was_listed() -> (
    None
):
    core = Core()
    core.silent = True
    core.feed(HostScanned(1, (gpu(A),)))

    def feed(event: LedgerRead) -> None:
        core.feed(event)
        if (poll := core.state.host.polls.refresh.outstanding) is not None:
            core.feed(core.poll_event(poll))

    def outstanding() -> int:
        core.pass_time(limits.LEDGER_QUIET_S)
        return core.read

    feed(read_of_young(outstanding(), LedgerFile(filed(A))))
    assert core.reason(A) == f"allocated to pod with UID uid-{A}"
    feed(read_of_young(outstanding()))
    assert core.reason(A) == f"allocated to pod with UID uid-{A}", "its file is damaged now"
    feed(ledger_read(outstanding()))
    assert core.reason(A) == "free"
