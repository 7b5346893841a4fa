"""A device of a prepared claim moves: the kernel gives its group's number to another one, or another model is in its
slot. No claim's files may name what is not its own, at any moment."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims import outputs
from gpuactors.core.claims.files import contents_of
from gpuactors.core.claims.restoration import gpus_by_name
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActDone, ActFailed, CheckpointRead, FilesTouched
from gpuactors.core.events.daemon import PredecessorGone
from gpuactors.core.gpus.report import claim_reports
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.reports.kube_events import PodsOf, kube_events
from gpuactors.core.state.claims import GpuReservation, StoredEntry
from gpuactors.core.values.claim import Claim, ClaimName, ClaimsOf, ClaimUid, Json, OpaqueConfig, Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction
from tests.core.builders import SETTINGS, A, B, C, audio, gpu
from tests.core.gpus.claim_core import DRIVER, ClaimCore, allocated, name
from tests.support.edits import nodes_of

ONE, TWO = name("one"), name("two")


class FilesCore(ClaimCore):
    """`ClaimCore` that keeps the device nodes in each claim's CDI file, and checks after each act on files that no node
    is in two of them."""

    files: dict[ClaimUid, frozenset[str]]

    def _claims_answer(self) -> Event | None:
        event = super()._claims_answer()
        wanted = self.wanted.files
        if isinstance(event, ActDone) and event.number in (act.number for act in wanted.values()):
            self.carry_out(event.number)
        return event

    def carry_out(self, number: int) -> None:
        ((claim, act),) = (item for item in self.wanted.files.items() if item[1].number == number)
        self.__dict__.setdefault("files", {}).pop(claim, None)
        if act.claim is not None:
            contents_of(DRIVER, act.claim, act.devices)
            self.files[claim] = frozenset(node for device in act.devices for node in nodes_of(device))
        own = [node for named in self.files.values() for node in named if node != "/dev/vfio/vfio"]
        assert len(own) == len({*own}), f"two claims' files name one node: {self.files}"

    def groups(self, claim: ClaimName) -> set[str]:
        """The groups that the claim's files name."""
        named = self.files.get(claim.uid, frozenset())
        return {node.removeprefix("/dev/vfio/") for node in named - {"/dev/vfio/vfio"}}


def two_prepared(*functions: PciFunction) -> FilesCore:
    core = FilesCore(*(functions or (gpu(A, 1), gpu(B, 2))))
    for claim, address in ((ONE, A), (TWO, B)):
        assert isinstance(core.answer(core.prepare(allocated(claim, address))), Prepared)
    return core


def test_files_follow_when_both_cards_are_rescanned_and_their_numbers_swapped() -> None:
    core = two_prepared()
    core.unplugged(A, B)
    assert core.files == {}, "a container that restarts fails, and meets no other tenant's device"
    core.changed(gpu(A, 2), gpu(B, 1))
    assert (core.groups(ONE), core.groups(TWO)) == ({"2"}, {"1"})
    assert core.claim_state(ONE) is ClaimState.PREPARED
    assert len(core.logged("claim.astray")) == 2


def test_of_two_files_that_swap_numbers_the_old_ones_are_removed_first() -> None:
    """The rescan is seen as one change: each of the two claims waits for the other's removal."""
    core = two_prepared()
    core.functions |= {PciAddress(A): gpu(A, 2), PciAddress(B): gpu(B, 1)}
    core.held_back = {"files"}
    core.changed(gpu(A, 2))
    core.changed(gpu(B, 1))
    acts = core.wanted.files
    assert [act.claim for act in acts.values()] == [None, None]
    first, second = (act.number for act in acts.values())
    core.carry_out(first)
    core.feed(ActDone(first, driver_kind=ClaimsOf.GPUS))
    assert all(act.claim is None for act in core.wanted.files.values()), (
        "nothing is written while the other's files may name the number"
    )
    core.carry_out(second)
    core.feed(ActDone(second, driver_kind=ClaimsOf.GPUS))
    core.release("files")
    assert (core.groups(ONE), core.groups(TWO)) == ({"2"}, {"1"})


def test_files_stay_removed_while_the_card_is_back_on_its_host_driver_until_a_prepare() -> None:
    """A rescan loses the driver_override."""
    core = two_prepared(gpu(A, 1, driver="nvidia"), gpu(B, 2))
    core.unplugged(A)
    core.changed(gpu(A, 7, driver="nvidia"))
    assert core.groups(ONE) == set()
    assert core.claim_state(ONE) is ClaimState.DRIFTED
    assert "on nvidia" in core.problem(ONE)
    assert core.driver(A) == "nvidia", "no act without a call"
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert core.groups(ONE) == {"7"}


def test_a_new_claim_on_a_card_with_the_freed_number_waits_for_the_old_files_removal() -> None:
    core = two_prepared()
    core.held_back = {"files"}
    core.unplugged(A)
    core.changed(gpu(C, 1))
    three = name("three")
    token = core.prepare(allocated(three, C))
    assert core.claim_state(three) is ClaimState.WRITING
    assert [*core.wanted.files] == [ONE.uid]
    core.release("files")
    assert isinstance(core.answer(token), Prepared)
    assert (core.groups(ONE), core.groups(three)) == (set(), {"1"})


def test_a_removal_that_fails_is_tried_again_and_holds_the_number() -> None:
    core = two_prepared()
    core.held_back = {"files"}
    core.unplugged(A)
    (act,) = core.wanted.files.values()
    core.feed(ActFailed(act.number, "the disk is read-only", driver_kind=ClaimsOf.GPUS))
    core.changed(gpu(C, 1))
    three = name("three")
    core.prepare(allocated(three, C))
    assert dict(core.wanted.files) == {}
    assert "read-only" in core.problem(ONE)
    core.pass_time(limits.CLAIM_RETRY_S)
    core.release("files")
    assert core.groups(three) == {"1"}


@pytest.mark.parametrize("back", [(), (gpu(A, 2), gpu(B, 1))], ids=["gone", "swapped"])
def test_what_has_moved_while_no_daemon_ran_is_found_by_the_next(back: tuple[PciFunction, ...]) -> None:
    core = two_prepared()
    core.functions = {f.address: f for f in back}
    after = FilesCore(disk=core.disk)
    after.files, after.functions, after.api, after.at = core.files, core.functions, core.api, core.at
    after.held_back = {"files", "inspection"}
    after.scanned()
    assert all(act.claim is None for act in after.wanted.files.values()), "nothing is written by old numbers"
    after.release("inspection")
    after.release("files")
    assert (after.groups(ONE), after.groups(TWO)) == (({"2"}, {"1"}) if back else (set(), set()))


@pytest.mark.parametrize("back", [(), (gpu(A, 2), gpu(B, 1))], ids=["gone", "swapped"])
def test_what_has_moved_is_said_once_at_a_start_which_reads_the_checkpoint_twice(
    back: tuple[PciFunction, ...],
) -> None:
    """A daemon that takes over touches no file: it says so when it serves."""
    core = two_prepared()
    after = FilesCore(settings=replace(SETTINGS, hand_over=True), disk=core.disk)
    after.files, after.functions, after.api, after.at = (
        core.files, {f.address: f for f in back}, core.api, core.at,
    )  # fmt: skip
    after.scanned()
    assert after.logged("claim.astray") == []
    assert (after.groups(ONE), after.groups(TWO)) == ({"1"}, {"2"})
    after.feed(PredecessorGone("there was none"))
    assert [line.fields["claim"] for line in after.logged("claim.astray")] == ["default/one", "default/two"]
    assert (after.groups(ONE), after.groups(TWO)) == (({"2"}, {"1"}) if back else (set(), set()))


def test_missing_files_are_written_after_a_start_only_when_the_device_was_seen() -> None:
    core = two_prepared()
    after = FilesCore(disk=core.disk)
    after.functions, after.api, after.at = core.functions, core.api, core.at
    after.files = {}
    after.held_back = {"inspection", "files"}
    after.feed_answers()
    assert after.claim_state(ONE) is ClaimState.PREPARED
    assert dict(after.wanted.files) == {}
    after.release("inspection", "files")
    after.scanned()
    assert (after.groups(ONE), after.groups(TWO)) == ({"1"}, {"2"})


def test_what_kubelet_waits_for_is_written_before_what_is_written_again_after_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outputs, "FILES_AT_ONCE", 1)
    core = FilesCore(gpu(A, 1), gpu(B, 2))
    core.api = {str(ONE): allocated(ONE, A), str(TWO): allocated(TWO, B)}
    core.prepare(ONE)
    after = core.restarted("files")
    assert [*after.wanted.files] == [ONE.uid]
    token = after.prepare(TWO)
    assert [*after.wanted.files] == [TWO.uid]
    after.release("files")
    assert isinstance(after.answer(token), Prepared)
    assert not after.wanted.files


def test_of_a_claim_with_several_devices_all_files_go_and_each_device_stays_its_own() -> None:
    core = FilesCore(gpu(A, 1), gpu(B, 2))
    core.prepare(allocated(ONE, A, B))
    core.unplugged(B)
    assert core.files == {}
    token = core.prepare(allocated(TWO, A))
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "default/one" in core.refusal(token)
    core.changed(gpu(B, 9))
    assert core.groups(ONE) == {"1", "9"}


def test_a_companion_in_another_group_is_a_drift_as_well() -> None:
    core = FilesCore(gpu(A, 1), audio("0000:01:00.1", 1))
    core.prepare(allocated(ONE, A))
    core.changed(audio("0000:01:00.1", 3))
    assert "0000:01:00.1 is in IOMMU group 3" in core.logged("claim.astray")[0].fields["reason"]  # type: ignore[operator]


def test_another_cdev_number_is_a_drift_as_well() -> None:
    cdev = ("/dev/iommu", "/dev/vfio/1", "/dev/vfio/devices/vfio0")
    on_cdev = replace(gpu(A, 1), nodes=cdev, iommufd=True)
    core = FilesCore(on_cdev)
    iommufd: Json = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "VfioDeviceConfig",
        "iommu": {"backendPolicy": "PreferIommuFD"},
    }
    claim = Claim(ONE, None, 1, allocated(ONE, A).results, (OpaqueConfig(False, (), iommufd),))
    core.created(claim)
    core.held_back = {"device"}
    core.prepare(ONE)
    (act,) = core.wanted.devices.values()
    event = core.act_event(act)
    assert isinstance(event, ActDone)
    bound = tuple(replace(b, cdev="vfio0") for b in event.bound)
    core.functions[PciAddress(A)] = on_cdev
    core.held_back = set()
    core.feed(replace(event, bound=bound))
    assert "/dev/vfio/devices/vfio0" in core.files[ONE.uid]
    core.held_back = {"files"}
    core.changed(replace(on_cdev, nodes=(), fault="the nodes: EIO"))
    assert dict(core.wanted.files) == {}, "what cannot be read is no drift"
    core.changed(replace(on_cdev, nodes=(*cdev[:2], "/dev/vfio/devices/vfio1")))
    (removal,) = core.wanted.files.values()
    assert removal.claim is None


def test_a_companion_that_comes_and_is_on_its_host_driver_is_a_drift_as_well() -> None:
    """The kernel gives the group to no virtual machine any more."""
    core = two_prepared()
    core.changed(audio("0000:01:00.1", 1, driver="snd_hda_intel"))
    assert core.claim_state(ONE) is ClaimState.DRIFTED
    assert (core.groups(ONE), core.groups(TWO)) == (set(), {"2"})


def test_a_group_that_cannot_be_read_is_no_drift() -> None:
    core = two_prepared()
    core.changed(replace(gpu(A, 1), iommu_group=None, fault="iommu_group: EIO"))
    assert core.claim_state(ONE) is ClaimState.PREPARED
    assert core.groups(ONE) == {"1"}


def test_facts_that_cannot_be_read_are_no_drift() -> None:
    core = two_prepared()
    core.changed(replace(gpu(A, 1), driver=None, vfio_bound=False, nodes=(), fault="driver: EIO"))
    assert core.claim_state(ONE) is ClaimState.PREPARED
    assert core.groups(ONE) == {"1"}


def test_a_device_that_its_own_act_has_just_bound_has_not_drifted() -> None:
    """The last inspection found it on nvidia."""
    core = FilesCore(gpu(A, 1, driver="nvidia"))
    core.created(allocated(ONE, A))
    core.held_back = {"inspection"}
    # What the prepare asks for itself is answered, and then no inspection.
    token = core.prepare(ONE)
    core.release("inspection")
    assert isinstance(core.answer(token), Prepared)
    assert core.logged("claim.astray") == []


def test_it_is_said_in_the_log_the_claims_reason_and_an_event_of_its_pods() -> None:
    core = two_prepared()
    core.unplugged(A)
    (line,) = core.logged("claim.astray")
    sentence = "0000:01:00.0 is gone from this node"
    assert (line.fields["claim"], line.fields["reason"]) == ("default/one", sentence)
    (of_one,) = (r for r in claim_reports(core.state) if r.name == ONE)
    assert (of_one.state, of_one.problem) == (ClaimState.DRIFTED, sentence)
    posted = [e for e in kube_events(core.state) if e.about == PodsOf(ONE)]
    assert [(e.reason, e.message) for e in posted] == [("Gone", f"claim default/one: {sentence}")]


def test_the_files_of_a_whole_node_of_claims_are_removed_after_one_rescan() -> None:
    addresses = [f"0000:{n:02x}:00.0" for n in range(64)]
    core = FilesCore(*(gpu(a, n) for n, a in enumerate(addresses)))
    claims = [name(f"claim-{n}") for n in range(64)]
    for claim, address in zip(claims, addresses, strict=True):
        core.prepare(allocated(claim, address))
    assert len(core.files) == 64
    core.functions = {PciAddress(a): gpu(a, 63 - n) for n, a in enumerate(addresses)}
    core.pass_time(core.state.daemon.settings.resync_interval_s)
    core.scanned()
    assert [core.groups(c) for c in claims] == [{str(63 - n)} for n in range(64)]


# --- another model ----------------------------------------------------------------------------------------------------


def test_files_are_never_written_for_another_model_in_the_slot() -> None:
    core = two_prepared()
    core.unplugged(A)
    core.changed(replace(gpu(A, 1), device="20b5"))
    assert core.groups(ONE) == set()
    assert core.claim_state(ONE) is ClaimState.DRIFTED
    refused = core.refused(core.prepare(ONE))
    assert "another device is there now (10de:20b5, and the claim has 10de:2330)" in refused.reason
    assert refused.causes == ("ReplacedByAnother",)
    core.unplugged(A)
    core.changed(gpu(A, 1))
    assert core.groups(ONE) == {"1"}, "its own model is back"


def test_another_model_is_a_drift_also_where_nobody_saw_the_first_one_go() -> None:
    core = two_prepared()
    core.changed(replace(gpu(A, 1), device="20b5"))
    assert core.claim_state(ONE) is ClaimState.DRIFTED
    assert core.groups(ONE) == set()


def test_another_model_after_a_reboot_is_refused() -> None:
    """The claim is kubelet's still, with the device that the scheduler gave it; the checkpoint knows which model that
    was."""
    core = FilesCore(replace(gpu(A, 1, driver="nvidia"), device="20b5"))
    core.created(allocated(ONE, A))
    core.state = replace(core.state)
    core.feed(
        CheckpointRead(
            earlier_models={ONE.uid: {DeviceKey(A): "10de:2330"}}, driver_kind=ClaimsOf.GPUS, load=3
        )
    )
    for _ in range(2):  # kubelet asks again
        refused = core.refused(core.prepare(ONE))
        assert refused.causes == ("ReplacedByAnother",)
        core.effects.clear()
    assert core.acts == []
    core.changed(gpu(A, 1, driver="nvidia"))
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert core.state.gpus.claims.earlier_models == {}


def test_the_models_of_an_earlier_boot_are_kept_on_disk_until_the_claim_is_prepared_or_unprepared() -> None:
    core = FilesCore(gpu(A, 1), gpu(B, 2))
    models = {ONE.uid: {DeviceKey(A): "10de:20b5"}, TWO.uid: {DeviceKey(B): "10de:2330"}}
    core.feed(CheckpointRead(earlier_models=models, driver_kind=ClaimsOf.GPUS, load=3))
    core.prepare(allocated(TWO, B))
    assert core.disk is not None
    assert core.disk.earlier_models == {ONE.uid: models[ONE.uid]}
    core.unprepare(ONE)
    core.unprepare(TWO)
    assert core.disk.earlier_models == {}


def test_files_that_somebody_has_touched_are_written_by_what_is_seen() -> None:
    core = two_prepared()
    del core.files[ONE.uid]
    core.feed(FilesTouched(driver_kind=ClaimsOf.GPUS))
    assert core.groups(ONE) == {"1"}


def test_files_that_are_touched_before_the_first_scan_are_not_written_by_old_numbers() -> None:
    """A daemon starts where both cards have each other's number, and somebody touches the files meanwhile."""
    core = two_prepared()
    after = FilesCore(disk=core.disk)
    after.files, after.api, after.at = {}, core.api, core.at
    after.functions = {PciAddress(A): gpu(A, 2), PciAddress(B): gpu(B, 1)}
    after.held_back = {"inspection"}
    after.feed_answers()
    after.feed(FilesTouched(driver_kind=ClaimsOf.GPUS))
    assert after.claim_state(ONE) is ClaimState.PREPARED
    assert (dict(after.wanted.files), after.files) == ({}, {})
    after.release("inspection")
    after.scanned()
    assert (after.groups(ONE), after.groups(TWO)) == ({"2"}, {"1"})


@pytest.mark.parametrize("when", ["while no daemon ran", "before it is bound again"])
def test_files_whose_numbers_nobody_knows_are_removed_when_the_card_is_pulled(when: str) -> None:
    """The checkpoint is lost: another card may have the number by now."""
    core = FilesCore(gpu(B, 2)) if when == "while no daemon ran" else FilesCore(gpu(A, 1), gpu(B, 2))
    core.held_back = {"device"}
    core.created(allocated(ONE, A))
    core.files = {ONE.uid: frozenset({"/dev/vfio/1", "/dev/vfio/vfio"})}
    own = GpuReservation(gpus_by_name([slice_name(DeviceKey(A))]))
    found = StoredEntry(ONE, ClaimState.PREPARED, None, own)
    core.feed(CheckpointRead(entries=(found,), is_lost=True, driver_kind=ClaimsOf.GPUS))
    core.pass_time(limits.LEDGER_QUIET_S)
    core.unplugged(A)
    core.release("device")
    assert core.files == {}
    assert core.claim_state(ONE) is ClaimState.DRIFTED
    core.changed(gpu(A, 7))
    assert core.groups(ONE) == {"7"}, "it has kept its card"
