"""Claims whose checkpoint and files are both lost: kubelet's list names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.claims import CheckpointRead
from gpuactors.core.events.daemon import PredecessorGone
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.step import TAKE_OVER_LEDGER_S
from gpuactors.core.values.claim import ClaimName, ClaimsOf, Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted, Refused
from gpuactors.core.values.model import ClaimedDevice, DeviceKey, PciAddress, Pod, device_key
from tests.core.builders import NO_FILE, SETTINGS, A, B, audio, gpu, read_of_young
from tests.core.gpus.claim_core import DRIVER, POOL, ClaimCore, allocated, core_with, name

LOST = CheckpointRead(is_lost=True, driver_kind=ClaimsOf.GPUS)


def listed(
    claim: ClaimName, *addresses: str, pool: str = POOL, uid: str | None = None
) -> tuple[ClaimedDevice, ...]:
    """What kubelet lists of a claim."""
    pod, uid = Pod("default", claim.name, ""), claim.uid if uid is None else uid
    names = [slice_name(DeviceKey(a)) for a in addresses]
    return tuple(ClaimedDevice(DRIVER, pool, device, str(claim), pod, uid) for device in names)


def lost(*held_back: str, claims: tuple[ClaimedDevice, ...] | None = None) -> ClaimCore:
    """A node whose checkpoint and files are lost. Kubelet has had the claim `one` prepared with A, and is asked."""
    core = core_with(gpu(A, 1), gpu(B, 2), one=(A,), two=(A,))
    core.strangers = listed(name("one"), A) if claims is None else claims
    core.held_back = {*held_back}
    core.feed(LOST)
    core.pass_time(limits.LEDGER_QUIET_S)
    return core


def test_nothing_is_offered_before_kubelet_was_asked_for_the_claims_whose_checkpoint_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by histories: the first read of a daemon asks for no List, and its lists offered the claim's GPU."""

    def without_list(core: ClaimCore, read: int) -> LedgerRead:
        return replace(original(core, read), claims=(), listed=(), names_end=None, passive=True)

    original = cast(Callable[[ClaimCore, int], LedgerRead], ClaimCore.ledger_event)
    core = ClaimCore(settings=replace(SETTINGS, hand_over=True))
    core.functions, core.api = {PciAddress(A): gpu(A, 1)}, {"default/one": allocated(name("one"), A)}
    core.strangers, core.held_back = listed(name("one"), A), {"load"}
    with monkeypatch.context() as patch:
        patch.setattr(ClaimCore, "ledger_event", without_list)
        core.scanned()
        core.feed(replace(LOST, load=1), PredecessorGone("none was there"), replace(LOST, load=2))
        core.pass_time(TAKE_OVER_LEDGER_S)
        assert core.state.kubelet.ledger.done > 0
        assert not core.state.published.plugins
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    assert core.state.published.plugins
    assert isinstance(core.allocation(core.allocate(A)), Refused)


def test_a_list_that_was_asked_for_before_the_checkpoint_was_read_leads_to_another_one_at_once() -> None:
    """Found by the virtual machine: nothing was offered for the next hour."""
    core = ClaimCore(settings=replace(SETTINGS, hand_over=True))
    core.functions, core.api = {PciAddress(A): gpu(A, 1)}, {"default/one": allocated(name("one"), A)}
    core.strangers, core.held_back = listed(name("one"), A), {"load"}
    core.scanned()
    core.feed(replace(LOST, load=1), PredecessorGone("none was there"))
    core.held_back = {"load", "ledger"}
    core.pass_time(TAKE_OVER_LEDGER_S)
    core.feed(replace(LOST, load=2))
    core.release("ledger")
    core.pass_time(0.1)
    assert core.state.published.plugins
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_claim_of_two_pods_has_its_device_once() -> None:
    other = tuple(replace(of, pod=Pod("default", "other", "")) for of in listed(name("one"), A))
    core = lost(claims=(*listed(name("one"), A), *other))
    assert [line.fields["devices"] for line in core.logged("claim.recovered")] == [(A,)]


def forced_away(core: ClaimCore, claim: str = "one") -> None:
    """Its pod is deleted by force: it leaves kubelet's list at once, its claim goes, and its unprepare comes later."""
    core.strangers = ()
    del core.api[f"default/{claim}"]


def test_a_claim_that_kubelet_lists_is_prepared_again_with_its_files() -> None:
    core = lost()
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    assert [(line.fields["uid"], line.fields["devices"]) for line in core.logged("claim.recovered")] == [
        (name("one").uid, (A,))
    ]
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert core.driver(A) == "vfio-pci", "its original driver is not known any more"


@pytest.mark.parametrize("held_back", ["", "read", "checkpoint"])
def test_its_gpu_is_its_own_until_its_unprepare_though_its_pod_has_left_the_list(held_back: str) -> None:
    """Found by histories: its virtual machine may run on, or be about to open the GPU."""
    core = lost(held_back)
    forced_away(core)
    waits = core.prepare(name("two"))
    core.pass_time(1.0)
    assert core.answer(waits) is None
    assert isinstance(core.allocation(core.allocate(A)), Refused)
    core.unprepare(name("one"))
    core.release(held_back)
    assert isinstance(core.answer(waits), Prepared)


def test_it_is_collected_where_its_unprepare_never_comes() -> None:
    core = lost()
    forced_away(core)
    core.pass_time(limits.LEDGER_QUIET_S + 2 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


def test_no_act_and_no_read_before_it_is_on_disk() -> None:
    core = lost("checkpoint")
    core.prepare(name("one"))
    assert core.wanted.reads == ()
    assert core.wanted.devices == {}
    core.release("checkpoint")
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_the_next_daemon_finds_it_in_the_checkpoint_before_it_has_been_read() -> None:
    core = lost("read")
    assert core.claim_state(name("one")) is ClaimState.STOPPED
    core.strangers = ()
    after = core.restarted()
    assert after.claim_state(name("one")) is ClaimState.PREPARED


def test_a_list_from_before_the_loss_is_not_used() -> None:
    """A predecessor may have unprepared it since."""
    core = core_with(gpu(A, 1), one=(A,))
    core.pass_time(limits.LEDGER_QUIET_S)
    core.held_back = {"ledger"}
    core.pass_time(limits.LEDGER_QUIET_S)
    old = core.read
    core.feed(LOST)
    core.strangers = listed(name("one"), A)
    core.feed(core.ledger_event(old))
    assert core.claim_state(name("one")) is ClaimState.ABSENT
    core.release("ledger")
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_claim_that_is_listed_later_has_ended_here() -> None:
    """Of a pod with two claims kubelet lists both until both are unprepared."""
    core = lost(claims=())
    core.strangers = listed(name("one"), A)
    core.pass_time(10 * limits.LEDGER_QUIET_S)
    assert core.claim_state(name("one")) is ClaimState.ABSENT


def test_where_the_checkpoint_is_there_kubelets_list_makes_no_claim() -> None:
    core = core_with(gpu(A, 1), one=(A,))
    core.strangers = listed(name("one"), A)
    core.feed(CheckpointRead(driver_kind=ClaimsOf.GPUS))
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.claim_state(name("one")) is ClaimState.ABSENT


@pytest.mark.parametrize("young", [False, True], ids=["no kubelet runs", "it knows no pods yet"])
def test_a_list_without_all_pods_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch, young: bool) -> None:
    def without_pods(_core: ClaimCore, read: int) -> LedgerRead:
        return read_of_young(read, NO_FILE) if young else LedgerRead(read, None, (), (), file=NO_FILE)

    core = core_with(gpu(A, 1), one=(A,))
    core.strangers = listed(name("one"), A)
    with monkeypatch.context() as patch:
        patch.setattr(ClaimCore, "ledger_event", without_pods)
        core.feed(LOST)
        core.pass_time(3 * limits.LEDGER_QUIET_S)
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


@pytest.mark.parametrize(
    "claims",
    [
        listed(name("one"), A, uid=""),
        listed(name("one"), A, pool="node-2"),
        listed(ClaimName("default", "../one", name("one").uid), A),
    ],
    ids=["no CDI id of ours", "another pool", "no name"],
)
def test_what_does_not_name_a_claim_of_ours_makes_none(claims: tuple[ClaimedDevice, ...]) -> None:
    core = lost(claims=claims)
    assert core.state.gpus.claims.entries == {}


@pytest.mark.parametrize("of_companion", [False, True])
def test_a_gpu_that_is_not_as_a_prepare_leaves_it_is_of_no_claim_that_runs(of_companion: bool) -> None:
    """After a reboot kubelet lists what it had prepared before, and has it prepared again. Found by histories: one of
    a group that the boot left divided was never prepared."""
    on_host = audio("0000:01:00.1", 1, driver="snd_hda_intel")
    core = core_with(*((gpu(A, 1), on_host) if of_companion else (gpu(A, 1, driver="nvidia"),)), one=(A,))
    core.strangers = listed(name("one"), A)
    core.feed(LOST)
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.state.gpus.claims.entries == {}
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def test_a_claim_is_found_with_all_its_devices_or_not_at_all() -> None:
    """Its files are written again, and the answer to its prepare names them."""
    core = core_with(gpu(A, 1), gpu(B, 2, driver="nvidia"), one=(A, B))
    core.strangers = listed(name("one"), A, B)
    core.feed(LOST)
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.state.gpus.claims.entries == {}
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    entry = core.entry(name("one"))
    assert entry is not None
    assert [gpu.key for gpu in gpus_of(entry).gpus] == [device_key(A), device_key(B)]


def test_a_device_that_another_claim_has_by_now_stays_its_own() -> None:
    """It was prepared after the loss, when kubelet could not be asked."""
    core = lost("ledger", claims=())
    core.ledger_problem = "kubelet hangs"
    core.release("ledger")
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    core.strangers, core.ledger_problem = listed(name("two"), A), None
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    assert core.claim_state(name("two")) is ClaimState.ABSENT


@pytest.mark.parametrize("pods", [A, B], ids=["the device", "another one of its group"])
def test_a_device_that_a_pod_has_by_now_stays_the_pods(pods: str) -> None:
    """After a reboot a pre-bound GPU is as a prepare leaves it. Kubelet knew of the claim later than of the pod."""
    core = core_with(gpu(A, 1), gpu(B, 1), one=(A,))
    core.ledger, core.strangers = {pods: "vm"}, listed(name("one"), A)
    core.feed(LOST)
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.claim_state(name("one")) is ClaimState.ABSENT
    core.prepare(name("one"))
    core.pass_time(POLL_S)
    assert core.claim_state(name("one")) is ClaimState.WAITING


def test_a_node_that_has_had_no_claim_serves_the_first_one_at_once() -> None:
    core = lost(claims=())
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert isinstance(core.allocation(core.allocate(B)), Granted)
