"""What is told as Kubernetes Events: what needs somebody, in the words of log and CLI, about the right object."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.acts.writes import UnderWay, blocked, hangs
from gpuactors.core.claims.view import with_claims
from gpuactors.core.deviceplugin.registration import KUBELET_LIST_TAKEN_S
from gpuactors.core.events.claims import ActFailed, PrepareAsked
from gpuactors.core.events.daemon import ShutdownRequested, Ticked
from gpuactors.core.events.deviceplugin import AllocateAsked
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.reports.kube_events import CONTESTED, KubeEvent, OurNode, PodsOf, kube_events
from gpuactors.core.reports.snapshot import report
from gpuactors.core.state.claims import ClaimRecord, with_entry
from gpuactors.core.step import initial_state
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted, Refused
from gpuactors.core.values.model import DeviceId, Health, Role, Token
from tests.core.builders import H100, SETTINGS, Core, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name

GPU, OTHER = "0000:01:00.0", "0000:02:00.0"


def held() -> Core:
    """The first of two GPUs is in the hands of a process that no pod has."""
    core = Core(gpu("01:00.0"), gpu("02:00.0"))
    core.enabled[GPU] = 1
    core.pass_time(limits.LEDGER_QUIET_S)
    return core


def test_a_node_where_all_is_well_has_nothing_to_tell() -> None:
    core = Core(gpu("01:00.0"))
    core.ledger = {GPU: "vm"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert kube_events(initial_state(SETTINGS)) == kube_events(core.state) == ()


def test_a_gpu_in_foreign_hands_is_told_on_the_node_in_the_words_of_explain() -> None:
    core = held()
    (shown,) = [d for d in report(core.state) if d.health is Health.UNHEALTHY]
    (told,) = kube_events(core.state)
    assert told == KubeEvent(OurNode(), str(Cause.HELD_BY_OTHER), f"{GPU}: {shown.reason}")
    core.enabled.clear()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert kube_events(core.state) == ()


def test_a_group_that_is_not_viable_names_what_is_to_be_bound() -> None:
    audio = gpu("01:00.1", 1, driver="snd_hda_intel", class_code="040300")
    (told,) = kube_events(Core(gpu("01:00.0", 1), audio).state)
    assert told.reason == "GroupNotViable"
    assert told.message.startswith(f"{GPU}: IOMMU group 1 is not viable: 0000:01:00.1 is bound to ")


def test_a_resource_that_another_plugin_has_taken() -> None:
    core = Core(gpu("01:00.0"))
    core.kubelets = [GPU]
    core.feed(KubeletAppeared("kubelet-1"))
    core.register(1)
    core.pass_time(limits.LEDGER_QUIET_S + KUBELET_LIST_TAKEN_S)
    core.kubelets = ["51", "52"]
    core.pass_time(limits.LEDGER_QUIET_S + 0.1)
    assert kube_events(core.state) == (), "one read may be of a list that kubelet was slow to take"
    core.pass_time(limits.KUBELET_LIST_AGAIN_S)
    (told,) = kube_events(core.state)
    assert (told.about, told.reason) == (OurNode(), CONTESTED)
    assert told.message == f"{H100}: {core.state.published.plugins[H100].problem}"


def test_a_refused_allocate_is_told_on_the_node_once_for_all_of_its_devices() -> None:
    core = ClaimCore(gpu("01:00.0"), gpu("02:00.0"))
    core.feed(Ticked())
    core.enabled = {GPU: 1, OTHER: 1}
    answer = core.allocation(core.allocate(GPU, OTHER))
    assert isinstance(answer, Refused)
    (told,) = [e for e in kube_events(core.state) if e.happened_at is not None]
    assert told == KubeEvent(OurNode(), "HeldByOther", f"Allocate refused: {answer.reason}")
    assert told.happened_at == core.at
    core.enabled.clear()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert isinstance(core.allocation(core.allocate(GPU, OTHER)), Granted)
    assert kube_events(core.state) == ()


def test_what_the_daemon_refuses_for_itself_is_not_told() -> None:
    core = Core(gpu("01:00.0"))
    twice = ((DeviceId(GPU), DeviceId(GPU)),)
    (answer,) = core.answers(AllocateAsked(Token(1), H100, twice))
    assert isinstance(answer, Refused)
    assert kube_events(core.state) == ()


def test_a_claim_that_waits_is_told_to_its_pods() -> None:
    core = ClaimCore(gpu("01:00.0"))
    core.feed(Ticked())
    core.enabled[GPU] = 1
    core.api["default/one"] = allocated(name(), GPU)
    core.feed(PrepareAsked(Token(1), name(), ClaimsOf.GPUS))
    entry = core.state.gpus.claims.entries[name().uid]
    assert (entry.state, bool(entry.problem)) == (ClaimState.WAITING, True)
    of_node, of_pods = kube_events(core.state)
    assert (of_node.about, of_node.reason) == (OurNode(), "HeldByOther")
    assert of_pods == KubeEvent(PodsOf(name()), "HeldByOther", f"claim default/one: {entry.problem}")
    core.enabled.clear()
    core.pass_time(limits.LEDGER_QUIET_S)
    assert kube_events(core.state) == ()


def test_a_claim_whose_bind_hangs_tells_its_pods_the_write_with_the_gpu() -> None:
    """The sentence is the act's, of the first try and of those that find the group blocked."""
    core = ClaimCore(gpu("01:00.0", driver="nvidia"))
    core.feed(Ticked())
    core.held_back = {"device"}
    core.api["default/one"] = allocated(name(), GPU)
    token = core.prepare(name())
    unbind = UnderWay("/sys/bus/pci/drivers/nvidia/unbind", f"{GPU}\n", 1_800_000_000.0)
    for error in (hangs(unbind, 4711, 5.0), blocked(1, "4711", unbind)):
        (act,) = core.wanted.devices.values()
        core.feed(ActFailed(act.number, str(error), error.fault, driver_kind=ClaimsOf.GPUS))
        (told,) = [e for e in kube_events(core.state) if e.about == PodsOf(name())]
        assert told.reason == "WriteHangs"
        assert (
            f"the write of {GPU} to /sys/bus/pci/drivers/nvidia/unbind has not returned since "
            in told.message
        )
        core.pass_time(limits.CLAIM_RETRY_S + 0.1)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert f"the write of {GPU} to /sys" in core.refusal(token)


def test_a_claim_that_is_set_aside_says_so() -> None:
    core = ClaimCore(gpu("01:00.0"))
    core.feed(Ticked())
    broken = ClaimRecord(name(), ClaimState.WAITING, 1, broken="the table lacks a row")
    (told,) = kube_events(with_claims(core.state, ClaimsOf.GPUS, with_entry(core.state.gpus.claims, broken)))
    assert (told.reason, told.message) == ("SetAside", "claim default/one: the table lacks a row")


@pytest.mark.parametrize("role", [Role.TAKING_OVER, Role.HANDED_OVER])
def test_who_does_not_serve_tells_nothing(role: Role) -> None:
    core = held()
    other = replace(core.state, daemon=replace(core.state.daemon, role=role))
    assert kube_events(other) == ()
    core.feed(ShutdownRequested())
    assert kube_events(core.state) == ()


@pytest.mark.parametrize("has_pod", [False, True])
def test_a_dead_gpu_is_told_on_the_node_also_while_a_pod_has_it(has_pod: bool) -> None:
    core = Core(replace(gpu("01:00.0"), has_fatal_errors=True))
    core.ledger = {GPU: "vm"} if has_pod else {}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert report(core.state)[0].health is (Health.HEALTHY if has_pod else Health.UNHEALTHY)
    (told,) = kube_events(core.state)
    assert (told.about, told.reason) == (OurNode(), "Dead")
    assert told.message.startswith(f"{GPU}: it has had a fatal PCIe error")
