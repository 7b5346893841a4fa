"""What kubelet is asked with a read of its ledger: List as seldom as can be, and never in an Allocate. What is seen
without it decides an Allocate."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import PredecessorGone, Ticked
from gpuactors.core.events.host import FunctionInspected
from gpuactors.core.events.kubelet import KubeletAppeared, LedgerRead, LedgerUnreadable
from gpuactors.core.host.asking import LIST_NAMES_S, LIST_S, LIST_UNSEEN_S, may_list, question
from gpuactors.core.ledger.books import ADMISSION_S
from gpuactors.core.ledger.kubelet_startup import LEDGER_API_AWAY_S
from gpuactors.core.ledger.ledger import LIST_HELD_S
from gpuactors.core.reports.snapshot import LedgerWanted, project
from gpuactors.core.state import with_waiting
from gpuactors.core.step import TAKE_OVER_LEDGER_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Granted, Refused, Reply
from gpuactors.core.values.model import (
    NO_PODS,
    Call,
    CallKind,
    ClaimedDevice,
    DeviceId,
    LedgerEntry,
    LedgerFile,
    PciAddress,
    Pod,
    PodAnswer,
    PodLife,
    ResourceName,
    Role,
    RunningKubelet,
    SeenPods,
    Settings,
    Token,
    device_key,
)
from gpuactors.core.values.owner import Owner
from tests.core.builders import H100, SETTINGS, A, B, Core, allocate_call, gpu, only

ALONE = gpu("01:00.0"), gpu("02:00.0")
T, U = Token(1), Token(2)
HOUR_S = 3600.0
TAKES_OVER = Settings(SETTINGS.selectors, 60.0, pre_start_gate=True, hand_over=True)


class Kubelet(Core):
    """A node whose kubelet runs, and whose pods are seen as `PodCgroups` and `KubeletLedger` give them.

    `file`: the UID of the pod that has a device, by kubelet's file; `lives`: of pods by UID; `names`: the names of pods
    that kubelet knows, by UID: those that List and Get name.
    """

    def __init__(
        self, settings: Settings = SETTINGS, *, settled: bool = True, is_readable: bool = True
    ) -> None:
        self.file: dict[str, str] = {}
        self.lives: dict[str, PodLife] = {}
        self.names: dict[str, str] = {}
        self.asked: list[LedgerWanted] = []
        self.has_get = True
        self.socket = "kubelet"
        self.settled = settled
        self.is_readable = is_readable
        """Kubelet's file, and with it what is seen of its pods."""
        self.came = 1
        """Pods of any kind that have been seen to come; 0 where no cgroup is seen."""
        super().__init__(*ALONE, settings=settings)

    def _answer(self) -> Event | None:
        for address, number in self.state.host.inspections.functions.items():
            function = self.state.host.functions.get(PciAddress(address))
            return FunctionInspected(number, address, (function,) if function is not None else ())
        return super()._answer()

    @property
    def lists(self) -> int:
        """How often List was called."""
        return sum(wanted.lists for wanted in self.asked)

    def ledger_event(self, read: int) -> Event:
        """As `Core.ledger_event`, of what was asked."""
        wanted = project(self.state).ledger
        assert wanted.read == read
        self.asked.append(wanted)
        entries = tuple(LedgerEntry(H100, DeviceId(d), Pod("", "", uid)) for d, uid in self.file.items())
        lives = {uid: self.lives.get(uid, PodLife.ABSENT) for uid in self.file.values()} if self.lives else {}
        by_name = {
            d: Pod("default", self.names[uid], "") for d, uid in self.file.items() if uid in self.names
        }
        listed = tuple(LedgerEntry(H100, DeviceId(d), pod) for d, pod in by_name.items())
        answers = tuple(
            PodAnswer(
                Pod(pod.namespace, pod.name, ""),
                tuple((H100, DeviceId(d)) for d, had in by_name.items() if had.name == pod.name),
            )
            for pod in wanted.pods
        )
        file = LedgerFile(entries) if self.is_readable else None
        pods = SeenPods(lives, self.came) if self.is_readable else NO_PODS
        if self.ledger_problem is not None:
            return LedgerUnreadable(read, self.ledger_problem, file, pods)
        return LedgerRead(
            read,
            RunningKubelet(self.socket, limits.LEDGER_SETTLE_S),
            listed if wanted.lists else (),
            (),
            "" if wanted.lists and self.settled else None,
            file=file,
            passive=not wanted.lists,
            answers=answers if self.has_get else (),
            has_get=self.has_get or not wanted.pods,
            pods=pods,
        )

    def allocate(self, device: str = A, token: Token = T, after_s: float = 0.0) -> list[object]:
        """The answers to an Allocate of it, if there are any at once."""
        event = allocate_call(device, token=token)
        return list(self.answers(event, after_s=after_s))

    def runs(self, device: str = A, uid: str = "u1", name: str = "vm-1", after_s: float = 60.0) -> None:
        """A pod is given the device, runs, and has been listed since."""
        assert isinstance(self.allocate(device)[0], Granted)
        self.file[device], self.lives[uid], self.names[uid] = uid, PodLife.RUNNING, name
        self.came += 1
        self.pass_time(after_s)

    def owner(self, device: str = A) -> Owner | None:
        """Who has the device."""
        return self.state.index.owners.get(DeviceId(device))  # type: ignore[call-overload, no-any-return]


# --- how often ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("came", "times"), [(1, 1), (0, 12)], ids=["cgroups are seen", "none is"])
def test_an_idle_node_is_hardly_listed(came: int, times: int) -> None:
    core = Kubelet()
    core.came = came
    core.pass_time(60)
    before = core.lists
    core.pass_time(HOUR_S)
    assert core.lists - before <= times


def test_a_pod_that_comes_leads_to_one_list() -> None:
    """It may have a GPU by a claim of another driver."""
    core = Kubelet()
    core.pass_time(60)
    before = core.lists
    core.came += 1
    core.pass_time(limits.LEDGER_QUIET_S + 2 * LIST_HELD_S)
    assert core.lists == before + 1
    core.pass_time(600)
    assert core.lists == before + 1


def test_a_kubelet_that_knows_no_pod_yet_is_listed_again_and_again_ever_more_seldom() -> None:
    """A claim of another driver is not in its list before, for as long as the API server is away."""
    core = Kubelet(settled=False)
    times: list[float] = []
    for _ in range(600):
        before = core.lists
        core.pass_time(1.0)
        times += [core.at] * (core.lists - before)
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] <= LIST_NAMES_S + 1
    assert gaps == sorted(gaps)
    assert 5 <= len(times) <= 8
    core.settled = True
    core.pass_time(600.0)
    before = core.lists
    core.pass_time(HOUR_S)
    assert core.lists - before <= 1


def test_pods_that_come_while_the_file_cannot_be_read_are_listed() -> None:
    core = Kubelet()
    core.pass_time(60)
    core.is_readable = False
    before = core.lists
    core.pass_time(HOUR_S)
    assert core.lists - before >= HOUR_S / LIST_UNSEEN_S - 1
    core.is_readable = True
    core.pass_time(60)
    before = core.lists
    core.pass_time(HOUR_S)
    assert core.lists - before <= 1


def test_a_node_with_running_pods_is_listed_no_more_often() -> None:
    core = Kubelet()
    core.runs()
    assert str(core.owner() and core.owner().name) == "default/vm-1", "it is named by a List"  # type: ignore[union-attr]
    before = core.lists
    core.pass_time(HOUR_S)
    assert core.lists - before <= 1
    assert {pod.name for wanted in core.asked[-10:] for pod in wanted.pods} == {"vm-1"}, (
        "it is asked for by Get"
    )


def test_no_allocate_leads_to_a_list_while_it_is_in_flight() -> None:
    core = Kubelet()
    core.pass_time(2 * LIST_S)
    core.feed(KubeletAppeared("another"))
    before = core.lists
    core.silent = True
    core.allocate(after_s=LIST_S)
    core.feed(KubeletAppeared("a third"))
    assert not may_list(core.state, core.at)
    read = core.read
    assert not project(core.state).ledger.lists
    core.silent = False
    assert isinstance(core.answers(core.ledger_event(read))[0], Granted)
    core.pass_time(limits.GRANT_LEDGER_S / 2)
    assert core.lists == before, "kubelet may not have inserted it yet"
    core.pass_time(2 * LIST_HELD_S)
    assert core.lists == before + 1, "it inserts it before it asks for the container's next resource"


def test_pods_whose_next_resource_fails_again_and_again_do_not_keep_others_from_a_list() -> None:
    """Anyone may make such pods: a claim of another pod would wait for them."""
    core = Kubelet()
    core.pass_time(2 * LIST_S)
    for number in range(8):
        core.allocate(A if number % 2 else B, Token(10 + number), after_s=limits.GRANT_FILE_S / 4)
        core.feed(KubeletAppeared(f"kubelet {number}"))
        before = core.lists
        core.pass_time(2 * LIST_HELD_S)
        assert core.lists > before


def test_what_was_served_is_kept_while_nobody_has_said_which_pods_there_are() -> None:
    """The file is damaged, and a daemon that takes over may not ask for List yet."""
    old = ResourceName("nvidia.com/OLD")
    core = Kubelet(TAKES_OVER)
    core.silent = True
    core.feed(PredecessorGone("handed over", {old: frozenset({"10de:2330"})}))
    core.pass_time(2 * TAKE_OVER_LEDGER_S)
    read = core.read
    core.feed(LedgerRead(read, RunningKubelet("kubelet", 60.0), (), (), None, passive=True))
    assert core.state.kubelet.ledger.done == read
    assert old in core.state.published.served


@pytest.mark.parametrize("problem", [None, "kubelet does not answer"])
def test_a_daemon_that_could_not_read_kubelets_file_registers_when_kubelet_has_listed_its_pods(
    problem: str | None,
) -> None:
    """One of them may have a GPU by an ID of an older plugin: it would be listed as free, and refused when the file can
    be read. If kubelet does not list them either, the daemon does not wait for that."""
    core = Kubelet(TAKES_OVER, is_readable=False)
    core.silent = True
    core.feed(PredecessorGone("none", {}))
    assert core.state.published.plugins == {}
    core.ledger_problem = problem
    core.feed(core.ledger_event(core.read))
    assert core.lists == 1
    assert H100 in core.state.published.plugins


def test_a_daemon_that_could_read_kubelets_file_registers_at_once() -> None:
    core = Kubelet(TAKES_OVER)
    core.silent = True
    core.feed(PredecessorGone("none", {}))
    assert core.lists == 0
    assert H100 in core.state.published.plugins


def test_a_daemon_that_does_not_serve_lists_nothing() -> None:
    """It does not know of the Allocates of the one that does."""
    core = Kubelet(TAKES_OVER)
    core.pass_time(HOUR_S)
    assert core.asked
    assert core.lists == 0


def test_a_hundred_pods_in_a_row_are_named_by_a_list_every_30_s() -> None:
    core = Kubelet()
    core.pass_time(60)
    before, began = core.lists, core.at
    for n in range(100):
        assert isinstance(core.allocate(after_s=3.0)[0], Granted), n
        core.file[A], core.lives[f"u{n}"], core.names[f"u{n}"] = f"u{n}", PodLife.RUNNING, f"vm-{n}"
        core.pass_time(2.0)
        core.lives[f"u{n}"] = PodLife.STOPPED
        del core.names[f"u{n}"]
    assert core.lists - before <= (core.at - began) / LIST_NAMES_S + 1


def test_a_kubelet_without_get_is_listed_while_a_pod_has_a_device() -> None:
    core = Kubelet()
    core.has_get = False
    core.runs()
    before = core.lists
    core.pass_time(HOUR_S)
    assert core.lists - before <= HOUR_S / LIST_NAMES_S
    del core.names["u1"]  # it was deleted by force: its process lives
    core.pass_time(LIST_NAMES_S + limits.LEDGER_S)
    assert core.owner() is None


# --- an Allocate of a device that a pod has -------------------------------------------------------------------------


@pytest.mark.parametrize("life", [PodLife.STARTING, PodLife.RUNNING])
@pytest.mark.parametrize("named", [True, False])
def test_a_device_of_a_living_pod_is_refused(life: PodLife, named: bool) -> None:
    """Another program has called List, and kubelet has forgotten who has it."""
    core = Kubelet()
    assert isinstance(core.allocate()[0], Granted)
    core.file[A], core.lives["u1"], core.names["u1"] = "u1", life, "vm-1"
    core.pass_time(60.0 if named else 0.2)
    answer = only(Refused, core.allocate(token=U))
    assert answer.causes == (Cause.STILL_ALLOCATED,)
    assert "default/vm-1" in answer.reason
    assert core.owner() is not None


def test_a_pod_that_is_force_deleted_before_its_name_is_known_does_not_keep_the_device() -> None:
    """Its process runs on. Kubelet is asked for its list, once, as Get asks for a name. Seen on the real node: the
    successor was refused, and had failed for good. PreStartContainer waits for the old process."""
    core = Kubelet()
    assert isinstance(core.allocate()[0], Granted)
    core.file[A], core.lives["u1"] = "u1", PodLife.RUNNING
    core.pass_time(0.2)
    before = core.lists
    assert isinstance(only(Granted, core.allocate(token=U)), Granted)
    assert core.lists == before + 1


@pytest.mark.parametrize(
    ("kind", "role", "lists"),
    [
        (CallKind.ALLOCATE, Role.SERVING, True),
        (CallKind.PRE_START, Role.SERVING, False),
        (CallKind.ALLOCATE, Role.HANDED_OVER, False),
    ],
)
def test_kubelet_is_asked_for_its_list_only_for_an_allocate_of_the_daemon_that_serves(
    kind: CallKind, role: Role, lists: bool
) -> None:
    """A call of PreStartContainer waits for the old process. What a daemon that has handed over hears decides nothing,
    and it does not know the Allocates of its successor."""
    core = Kubelet()
    assert isinstance(core.allocate()[0], Granted)
    core.file[A], core.lives["u1"] = "u1", PodLife.RUNNING
    core.pass_time(1.0)
    last = core.state.host.inspections.last
    call = Call(kind, H100, ((DeviceId(A),),), {device_key(A): ()}, last, math.inf, doubted=last)
    state = replace(core.state, daemon=replace(core.state.daemon, role=role))
    assert question(with_waiting(state, {U: call}), core.at).lists is lists


def with_two_calls() -> Kubelet:
    """A pod has just got the device, and the next call for it waits."""
    core = Kubelet()
    core.lives["other"] = PodLife.RUNNING
    core.file[B] = "other"
    assert isinstance(core.allocate()[0], Granted)
    core.file[A], core.names["u1"] = "u1", "vm-1"  # it is admitted, and kubelet is about to make its cgroup
    assert core.allocate(token=U, after_s=0.005) == []
    return core


def test_the_next_pod_waits_for_the_cgroup_of_the_one_that_has_just_got_the_device() -> None:
    core = with_two_calls()
    core.lives["u1"] = PodLife.STARTING
    core.pass_time(0.0)
    refused = only(Refused, _answers(core, ADMISSION_S))
    assert refused.causes == (Cause.STILL_ALLOCATED,)


def test_the_next_pod_waits_for_a_read_that_could_show_the_cgroup() -> None:
    """Seen on a real node under load: the read that came back last was older than the cgroup, and the device of the
    pod that had just got it was given to the next one."""
    core = with_two_calls()
    core.silent = True
    core.pass_time(ADMISSION_S - 0.05)
    before_the_cgroup = core.ledger_event(core.read)
    core.lives["u1"] = PodLife.STARTING
    core.silent = False
    answers = core.answers(before_the_cgroup, after_s=0.2) + _answers(core, ADMISSION_S)
    assert only(Refused, answers).causes == (Cause.STILL_ALLOCATED,)


def test_the_cgroup_of_a_pod_is_waited_for_from_its_last_allocate_on() -> None:
    """Kubelet makes it when all containers of the pod have their devices, which takes longer than one Allocate does."""
    core = Kubelet()
    core.lives["other"] = PodLife.RUNNING
    assert isinstance(core.allocate(A)[0], Granted)
    core.file[A], core.names["u1"] = "u1", "vm-1"
    core.pass_time(0.8 * ADMISSION_S)
    assert isinstance(core.allocate(B, token=U)[0], Granted)
    core.file[B] = "u1"  # it is admitted, and kubelet is about to make its cgroup
    assert core.allocate(A, token=Token(U + 1), after_s=0.3 * ADMISSION_S) == []
    core.lives["u1"] = PodLife.STARTING
    assert only(Refused, _answers(core, ADMISSION_S)).causes == (Cause.STILL_ALLOCATED,)


def test_a_call_whose_last_read_hangs_says_so() -> None:
    core = with_two_calls()
    core.silent = True
    (refused,) = _answers(core, limits.CALL_DEADLINE_S + limits.LATE_CALL_S)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.LEDGER_LATE,)
    assert "whether that pod keeps it" in refused.reason


def test_a_call_that_has_waited_long_enough_is_answered_though_the_machine_slept() -> None:
    """Found by histories: it was refused without a reason, as its deadline was over as well."""
    core = with_two_calls()
    (granted,) = core.answers(Ticked(), after_s=2 * limits.CALL_DEADLINE_S)
    assert isinstance(granted, Granted)


def test_an_init_containers_device_is_given_to_the_next_container() -> None:
    core = with_two_calls()
    (granted,) = _answers(core, ADMISSION_S)
    assert isinstance(granted, Granted)
    core.lives["u1"], core.names["u1"] = PodLife.RUNNING, "vm-1"
    core.pass_time(60.0)
    assert core.owner() is not None, "the pod has it still"


def test_the_device_of_a_pod_that_has_stopped_is_given_at_once() -> None:
    """Its cgroup stays until its volumes are unmounted, and kubelet's file names it until it is written again."""
    core = Kubelet()
    core.runs()
    core.lives["u1"] = PodLife.STOPPED
    del core.names["u1"]
    assert isinstance(core.allocate(token=U)[0], Granted)
    core.file[A], core.lives["u2"], core.names["u2"] = "u2", PodLife.RUNNING, "vm-2"
    core.pass_time(60.0)
    assert str(core.owner().name) == "default/vm-2"  # type: ignore[union-attr]


def test_after_a_forced_deletion_kubelet_is_asked_before_it_is_refused() -> None:
    core = Kubelet()
    core.runs()
    del core.names["u1"]
    before = core.lists
    answer = core.allocate(token=U)[0]
    assert isinstance(answer, Granted), answer
    assert core.lists == before
    assert [pod.name for pod in core.asked[-1].pods] == ["vm-1"]


def test_where_no_cgroup_is_seen_the_device_of_a_pod_that_kubelet_does_not_know_is_given() -> None:
    core = Kubelet()
    assert isinstance(core.allocate()[0], Granted)
    core.file[A] = "u1"
    core.pass_time(LIST_NAMES_S)
    assert isinstance(core.allocate(token=U)[0], Granted)


def test_of_a_group_the_device_of_a_pod_that_has_stopped_does_not_stand_in_the_way() -> None:
    core = Kubelet()
    core.runs(B, "u2", "vm-2")
    core.lives["u2"] = PodLife.STOPPED
    del core.names["u2"]
    assert isinstance(core.allocate(A)[0], Granted)


# --- the end of a pod -----------------------------------------------------------------------------------------------


def test_a_pod_whose_cgroup_is_gone_has_its_device_no_more() -> None:
    core = Kubelet()
    core.runs()
    core.lives["u1"] = PodLife.ABSENT
    del core.names["u1"]
    before = core.lists
    core.pass_time(limits.LEDGER_S)
    assert core.owner() is None
    assert core.lists == before


def test_a_device_of_a_pod_that_has_ended_is_given_away_while_kubelets_ledger_cannot_be_asked() -> None:
    """The pod's end is seen of the kernel; to refuse the next one ends it for good."""
    core = Kubelet()
    core.runs()
    core.lives["u1"] = PodLife.ABSENT
    core.ledger_problem = "closed the connection at once"
    assert isinstance(core.allocate(after_s=limits.LEDGER_FRESH_S)[0], Granted)


def test_a_device_of_a_pod_that_lives_is_not_while_kubelets_ledger_cannot_be_asked() -> None:
    core = Kubelet()
    core.runs()
    core.ledger_problem = "closed the connection at once"
    assert isinstance(core.allocate(after_s=limits.LEDGER_FRESH_S)[0], Refused)


def test_a_forced_deletion_is_heard_of_kubelet_without_a_list() -> None:
    core = Kubelet()
    core.runs()
    del core.names["u1"]
    before = core.lists
    core.pass_time(2 * limits.LEDGER_S)
    assert core.owner() is None
    assert core.lists == before


def test_a_forced_deletion_of_a_pod_whose_id_is_no_devices_is_heard_of_kubelet() -> None:
    core = Kubelet()
    core.file["odd"], core.lives["u1"], core.names["u1"] = "u1", PodLife.RUNNING, "vm-1"
    core.came += 1
    core.pass_time(60)
    assert core.state.kubelet.ledger.entries[H100, DeviceId("odd")].name == "vm-1"
    del core.names["u1"]
    before = core.lists
    core.pass_time(2 * limits.LEDGER_S)
    assert core.state.kubelet.ledger.entries == {}
    assert core.lists == before


@pytest.mark.parametrize(
    ("device_plugin", "after_s"), [(False, limits.LEDGER_SETTLE_S), (True, LEDGER_API_AWAY_S)]
)
def test_an_entry_of_an_ended_pod_that_was_never_seen_ends_by_itself(
    device_plugin: bool, after_s: float
) -> None:
    """With `--device-plugin off`: the pod has ended, the daemon was restarted, and no list of a device ever comes. With
    it kubelet may have started anew, and start no pod before the API server answers."""
    core = Kubelet(replace(SETTINGS, device_plugin=device_plugin), settled=False)
    core.lives["daemon"] = PodLife.RUNNING
    core.feed(KubeletAppeared("young"))
    core.file[A] = "gone"
    core.pass_time(1.0)
    core.feed(KubeletAppeared("younger"))
    assert core.owner() is not None
    core.pass_time(after_s - limits.LEDGER_S)
    assert core.owner() is not None
    core.pass_time(2 * limits.LEDGER_S)
    assert core.owner() is None


def test_the_first_list_of_a_kubelet_after_a_reboot_ends_no_pod_of_its_file() -> None:
    """The kubelet before had known its pods for long. The API server is away, and the machine sleeps before the first
    List."""
    core = Kubelet()
    core.lives["daemon"] = PodLife.RUNNING
    core.pass_time(60)
    core.file[A], core.socket, core.settled = "u1", "young", False
    core.silent = True
    core.feed(KubeletAppeared("young"))
    asked = core.state.kubelet.ledger.refresh.outstanding or 0
    first = core.ledger_event(asked)
    assert isinstance(first, LedgerRead)
    core.feed(replace(first, passive=True))
    assert core.owner() is not None
    core.pass_time(limits.LEDGER_SETTLE_S + limits.LEDGER_S)
    core.feed(replace(first, read=core.state.kubelet.ledger.refresh.outstanding or 0, passive=False))
    assert core.owner() is not None
    core.silent = False
    core.pass_time(limits.LEDGER_S)
    assert core.owner() is not None


def test_a_claim_of_another_driver_goes_with_its_pod() -> None:
    core = Kubelet()
    core.pass_time(60)
    claim = ClaimedDevice("gpu.other.com", "node", "gpu-0000-01-00-0", "default/c", Pod("default", "c", ""))
    core.feed(KubeletAppeared("again"))
    number = core.state.kubelet.ledger.read
    assert number
    listed = core.ledger_event
    core.ledger_event = lambda read: LedgerRead(  # type: ignore[method-assign]
        read, RunningKubelet("kubelet", limits.LEDGER_SETTLE_S), (), (claim,), "", file=LedgerFile()
    )
    core.feed(KubeletAppeared("and again"))
    core.ledger_event = listed  # type: ignore[method-assign]
    assert core.owner() is not None
    core.pass_time(2 * limits.LEDGER_S)
    assert core.owner() is None, "kubelet does not know that pod"


def _answers(core: Kubelet, within_s: float) -> list[object]:
    return [e.answer for e in core.pass_time(within_s + 0.001) if isinstance(e, Reply)]
