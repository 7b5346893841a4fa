"""The CDI files of the device plugin: a device is Healthy only by the file that is on disk, and Kata resolves every
answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.acts.blocking_runner import in_a_thread
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.spec_files import SpecFiles
from gpuactors.core.deviceplugin import specs
from gpuactors.core.deviceplugin.calls import ALLOCATE_WAIT_S
from gpuactors.core.events.daemon import (
    HandOverRequested,
    PredecessorGone,
    ShutdownRequested,
    SuccessorLost,
    Ticked,
)
from gpuactors.core.events.deviceplugin import AllocateAsked, SpecsWritten
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.reports.snapshot import project
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.cdi import CdiSpec, CdiSpecs
from gpuactors.core.values.device_spec import (
    DeviceSpecs,
    SpecsWanted,
    cdi_id,
    file_name,
    is_kind,
    resource_of,
)
from gpuactors.core.values.effects import Grant, Granted, Refusal, Refused
from gpuactors.core.values.model import DeviceId, PciFunction, ResourceName, device_key
from gpuactors.core.values.naming import parse_own_name
from tests.core.builders import H100, SETTINGS, A, B, Core, allocate_call, gpu, only
from tests.support.kata import LETTERS, SandboxError, is_word, sandbox_nodes

KATA = replace(SETTINGS, allocates_by_cdi=True, waits_in_allocate=True, pre_start_gate=False)
GROUP_1 = ("/dev/vfio/vfio", "/dev/vfio/1")


class KataCore(Core):
    """A core whose CDI files are written where it says so."""

    def __init__(self, *functions: PciFunction, **kwargs: object) -> None:
        super().__init__(*functions, settings=KATA, **kwargs)  # type: ignore[arg-type]

    def write(self, directory: Path | None = None) -> None:
        """What is wanted is written, into this directory, and the core hears of it."""
        wanted = self.files()
        assert wanted is not None
        if directory is not None:
            SpecFiles(RealDisk(), str(directory), in_a_thread).write_now(wanted)
        self.feed(SpecsWritten(wanted, {}))

    def files(self) -> DeviceSpecs | None:
        """The files that are to be there."""
        wanted = specs.wanted(self.state)
        return wanted.specs if wanted is not None else None

    def granted(self, *functions: PciFunction) -> Granted:
        """The answer to an Allocate of A."""
        return only(Granted, self.called(allocate_call(A), *functions))


def running(*functions: PciFunction) -> KataCore:
    """A node whose files are written."""
    core = KataCore(*functions)
    core.feed(KubeletAppeared("1"))
    core.write()
    return core


def test_a_free_device_is_healthy_when_its_file_is_written_and_not_before() -> None:
    core = KataCore(gpu(A), gpu(B))
    assert core.device_list() == {A: "Unhealthy", B: "Unhealthy"}
    assert core.reason(A) == "its CDI file is not written yet"
    core.feed(SpecsWritten({}, {H100: "the disk is full"}))
    assert core.reason(A) == "its CDI file is not written: the disk is full"
    core.feed(SpecsWritten({H100: {DeviceId(A): GROUP_1}}, {}))
    assert core.device_list() == {A: "Healthy", B: "Unhealthy"}
    core.write()
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_device_that_a_pod_has_stays_healthy_without_a_file() -> None:
    """Kubelet subtracts it already."""
    core = KataCore(gpu(A), gpu(B))
    core.ledger = {A: "vm"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Healthy", B: "Unhealthy"}


def test_without_the_setting_there_is_no_file_and_the_answer_has_nodes() -> None:
    core = Core(gpu(A))
    assert specs.wanted(core.state) is None
    assert core.device_list() == {A: "Healthy"}
    (grant,) = only(Granted, core.called(allocate_call(A), gpu(A))).containers
    assert (grant.nodes, grant.cdi_ids) == (GROUP_1, ())


def test_kata_resolves_every_answer_by_the_files_and_it_has_nothing_else(tmp_path: Path) -> None:
    functions = (gpu(A, cdev=0), gpu(B, cdev=1), gpu("25:00.0", device="20b0", model="GA100 [A100.80 SXM4]"))
    core = KataCore(*functions)
    core.write(tmp_path)
    assert set(core.files() or {}) == {H100, "nvidia.com/GA100_A100_80_SXM4"}
    for resource, spec in (core.files() or {}).items():
        for device in spec:
            function = next(f for f in functions if DeviceId(f.address) == device)
            asked = AllocateAsked(allocate_call(A).token, ResourceName(resource), ((DeviceId(device),),))
            answer = only(Granted, core.called(asked, function))
            assert answer.containers == (Grant((), (), (f"{resource}={device}",)),)
            nodes = sandbox_nodes([tmp_path], {resource: [device]})
            assert nodes == {"/dev/vfio/vfio", f"/dev/vfio/{function.iommu_group}"}, (
                "one backend, no /dev/iommu"
            )


def test_without_group_nodes_the_file_has_the_cdev_alone(tmp_path: Path) -> None:
    cdev_only = replace(gpu(A), nodes=("/dev/vfio/devices/vfio3", "/dev/iommu"))
    core = KataCore(cdev_only)
    core.write(tmp_path)
    assert sandbox_nodes([tmp_path], {H100: [A]}) == {"/dev/vfio/devices/vfio3"}


# --- a device that changes ---------------------------------------------------------------------------------


def test_a_device_in_another_group_is_withheld_and_its_call_waits_until_the_file_has_that_group(
    tmp_path: Path,
) -> None:
    core = running(gpu(A), gpu(B))
    core.inspect(A, gpu(A, 9))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.called(allocate_call(A), gpu(A, 9)) == [], "the file has the old group"
    wanted = core.files() or {}
    SpecFiles(RealDisk(), str(tmp_path), in_a_thread).write_now(wanted)
    answer = only(Granted, core.answers(SpecsWritten(wanted, {})))
    assert answer.containers[0].cdi_ids == (f"{H100}={A}",)
    assert sandbox_nodes([tmp_path], {H100: [A]}) == {"/dev/vfio/vfio", "/dev/vfio/9"}


def test_a_device_that_comes_back_is_withheld_until_its_file_is_written_again() -> None:
    """The write without it may be under way."""
    core = running(gpu(A), gpu(B))
    with_both = core.files()
    assert with_both is not None
    core.inspect(A, gpu(A, driver="nvidia"))
    assert core.device_list() == {B: "Healthy"}
    core.feed(SpecsWritten(with_both, {}))  # it was posted before
    core.inspect(A, gpu(A))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    core.write()
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


def test_a_call_whose_file_is_not_written_in_time_is_refused_with_the_reason() -> None:
    core = running(gpu(A))
    core.inspect(A, gpu(A, 9))
    core.feed(SpecsWritten({}, {H100: "the disk is full"}))
    assert core.called(allocate_call(A), gpu(A, 9)) == []
    answer = only(Refused, core.answers(Ticked(), after_s=limits.CALL_DEADLINE_S))
    assert (answer.status, answer.causes) == (Refusal.UNAVAILABLE, (Cause.CDI_FILE_UNWRITTEN,))
    assert "the disk is full" in answer.reason


def with_a_pod_on_a() -> KataCore:
    core = running(gpu(A), gpu(B))
    core.ledger = {A: "vm"}
    core.pass_time(limits.LEDGER_QUIET_S)
    return core


def test_a_device_that_is_gone_stays_in_the_file_until_its_pod_has_ended() -> None:
    core = with_a_pod_on_a()
    core.inspect(A)
    assert core.files() == {H100: {DeviceId(A): GROUP_1, DeviceId(B): ("/dev/vfio/vfio", "/dev/vfio/2")}}
    core.ledger = {}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert DeviceId(A) not in (core.files() or {})[H100]


def test_a_device_that_is_gone_leaves_the_file_when_another_one_has_its_node() -> None:
    """The pod's container would start with somebody else's GPU."""
    core = with_a_pod_on_a()
    core.inspect(A)
    core.inspect(B, gpu(B, 1))
    assert (core.files() or {})[H100] == {DeviceId(B): GROUP_1}


def test_a_resource_without_devices_has_no_file() -> None:
    """A CDI file without devices is none, and fails every sandbox."""
    core = running(gpu(A))
    core.inspect(A)
    assert core.files() == {}


# --- names -------------------------------------------------------------------------------------------------


def test_a_model_without_a_name_is_withheld_with_the_mapping_to_use() -> None:
    core = KataCore(gpu(A, device="2330", model=""), gpu(B))
    core.write()
    unnamed = ResourceName("nvidia.com/2330")
    assert core.device_list(unnamed) == {A: "Unhealthy"}
    assert unnamed not in (core.files() or {})
    mapping = "10de:2330=nvidia.com/GPU_2330"
    assert core.reason(A, unnamed).endswith(f"by --resource-name {mapping}")
    assert is_kind(parse_own_name(mapping)[1])
    asked = AllocateAsked(allocate_call(A).token, unnamed, ((DeviceId(A),),))
    answer = only(Refused, core.called(asked, gpu(A, device="2330", model="")))
    assert answer.causes == (Cause.CDI_NAME_INVALID,)


def test_a_model_without_a_name_is_withheld_also_when_the_pod_of_its_old_name_has_just_left() -> None:
    """Found by a history: it was Healthy until a poll had seen that the group is closed, and Allocate was refused."""
    core = KataCore(gpu(A, device="2330", model=""), gpu(B))
    core.write()
    core.ledger, core.enabled = {A: "gone"}, {A: 1}
    core.pass_time(limits.LEDGER_QUIET_S)
    core.ledger, core.silent = {}, True
    core.pass_time(limits.LEDGER_QUIET_S)
    core.feed(core.ledger_event(core.read))
    unnamed = ResourceName("nvidia.com/2330")
    assert core.state.assessments[device_key(A)].status.cause is Cause.HOLDER_UNKNOWN
    assert core.device_list(unnamed) == {A: "Unhealthy"}


_WORDS = st.text("aZ09-_.", min_size=1, max_size=6)


@given(_WORDS, _WORDS)
def test_a_kind_is_what_cdi_takes_and_no_two_have_one_file(vendor: str, cdi_class: str) -> None:
    resource = ResourceName(f"{vendor}/{cdi_class}")
    taken = is_word(vendor, LETTERS, "_-.") and is_word(cdi_class, LETTERS, "_-.")
    assert is_kind(resource) is taken
    if taken and "_" not in vendor:  # kubelet admits no other domain
        assert resource_of(file_name(resource)) == resource


@pytest.mark.parametrize(
    "name", ["nvidia.com-pgpu.yaml", "gpuactors-.json", "gpuactors-a.json", ".gpuactors-a_b.json.new", "x"]
)
def test_another_programs_file_is_no_file_of_ours(name: str) -> None:
    assert resource_of(name) is None


def test_a_name_that_another_programs_file_has_as_well_is_withheld_until_the_file_is_gone() -> None:
    core = running(gpu(A), gpu(B))
    core.cdi = CdiSpecs((CdiSpec("/var/run/cdi/nvidia.com-h100.yaml", (cdi_id(H100, DeviceId(A)),)),))
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A).startswith("/var/run/cdi/nvidia.com-h100.yaml of another program defines ")
    answer = only(Refused, core.called(allocate_call(A), gpu(A)))
    assert answer.causes == (Cause.CDI_NAME_TAKEN,)
    core.cdi = CdiSpecs((CdiSpec(f"/var/run/cdi/{file_name(H100)}", (cdi_id(H100, DeviceId(A)),)),))
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}, "our own file is no other one"


# --- the wait in Allocate ----------------------------------------------------------------------------------


def left_by_its_pod() -> KataCore:
    """A's pod has left kubelet's ledger, and its virtual machine still has the group open."""
    core = running(gpu(A))
    core.ledger, core.enabled = {A: "gone"}, {A: 1}
    core.pass_time(limits.LEDGER_QUIET_S)
    core.ledger = {}
    core.pass_time(limits.LEDGER_QUIET_S)
    return core


def test_allocate_waits_until_the_old_machine_has_released_the_device() -> None:
    core = left_by_its_pod()
    assert core.called(allocate_call(A), gpu(A)) == []
    core.pass_time(limits.CALL_DEADLINE_S)
    assert core.state.calls.waiting, "as long as PreStartContainer would wait"
    core.enabled = {}
    before = len(core.effects)
    core.pass_time(1.0)
    assert [type(e.answer) for e in core.effects[before:] if hasattr(e, "answer")] == [Granted]


def test_allocate_is_refused_when_the_old_machine_does_not_release_the_device_in_time() -> None:
    core = left_by_its_pod()
    assert core.called(allocate_call(A), gpu(A)) == []
    before = len(core.effects)
    core.pass_time(ALLOCATE_WAIT_S)
    (answer,) = [e.answer for e in core.effects[before:] if hasattr(e, "answer")]
    assert isinstance(answer, Refused)
    assert answer.causes == (Cause.ORPHANED,)


def test_an_allocate_that_waits_ends_soon_after_a_hand_over() -> None:
    core = left_by_its_pod()
    core.feed(HandOverRequested())
    assert core.called(allocate_call(A), gpu(A)) == []
    assert only(Refused, core.answers(Ticked(), after_s=limits.LATE_CALL_S)).status is Refusal.UNAVAILABLE


def test_an_allocate_that_waits_is_refused_before_a_stopping_daemon_s_streams_end() -> None:
    core = left_by_its_pod()
    assert core.called(allocate_call(A), gpu(A)) == []
    core.pass_time(limits.CALL_DEADLINE_S)
    before = len(core.effects)
    core.feed(ShutdownRequested())
    core.pass_time(limits.DRAIN_S - limits.LATE_CALL_S)
    assert [type(e.answer) for e in core.effects[before:] if hasattr(e, "answer")] == [Refused]


def test_with_the_gate_in_prestart_allocate_does_not_wait() -> None:
    core = Core(gpu(A))
    core.feed(KubeletAppeared("1"))
    core.ledger, core.enabled = {A: "gone"}, {A: 1}
    core.pass_time(limits.LEDGER_QUIET_S)
    core.ledger = {}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert [type(a) for a in core.called(allocate_call(A), gpu(A))] == [Granted]


# --- who writes --------------------------------------------------------------------------------------------


def test_only_the_serving_daemon_writes_and_one_that_serves_again_writes_anew() -> None:
    core = running(gpu(A))
    core.feed(HandOverRequested())
    assert core.files() is None
    core.feed(SuccessorLost(), PredecessorGone("it was there"))
    assert core.files() is not None
    assert core.device_list() == {A: "Unhealthy"}, "the successor may have written other files"
    core.write()
    assert core.device_list() == {A: "Healthy"}


def test_a_daemon_takes_over_when_it_has_looked_which_files_are_there_and_offers_what_they_have_at_once() -> (
    None
):
    """Found by a history: each GPU was Unhealthy until the first write, also one that a pod had been given a moment
    before, so that the free count was negative."""
    core = running(gpu(A), gpu(B))
    files = core.files() or {}
    core.feed(HandOverRequested())
    core.feed(SuccessorLost())
    assert specs.wanted(core.state) == SpecsWanted(files, writes=False)
    assert not project(core.state).take_over
    core.feed(SpecsWritten({H100: {DeviceId(A): GROUP_1}}, {}))
    assert project(core.state).take_over
    core.feed(PredecessorGone("it has handed over"))
    assert core.device_list() == {A: "Healthy", B: "Unhealthy"}
    assert specs.wanted(core.state) == SpecsWanted(files, writes=True)


def test_a_disk_that_does_not_answer_delays_no_hand_over_for_longer_than_its_deadline() -> None:
    core = running(gpu(A))
    core.feed(HandOverRequested())
    core.feed(SuccessorLost())
    core.feed(SpecsWritten({}, {H100: "no answer within 10 s"}))
    assert project(core.state).take_over
    assert core.device_list() == {A: "Unhealthy"}


def test_before_the_first_list_nothing_is_wanted() -> None:
    """An empty wish would remove the files of pods that run."""
    assert KataCore().files() is None


def test_an_id_of_an_older_plugin_is_the_name_of_its_device(tmp_path: Path) -> None:
    core = KataCore(gpu(A), gpu(B))
    core.feed(KubeletAppeared("1"))
    core.ledger = {"1": "old-vm"}
    core.pass_time(limits.LEDGER_QUIET_S)
    core.write(tmp_path)
    assert "1" in core.device_list()
    assert sandbox_nodes([tmp_path], {H100: ["1"]}) == set(GROUP_1)


def test_the_resolver_refuses_what_kata_refuses(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"cdiVersion": "0.6.0", "kind"')
    with pytest.raises(SandboxError, match=r"torn\.json"):
        sandbox_nodes([tmp_path], {})
    (tmp_path / "torn.json").unlink()
    with pytest.raises(SandboxError, match="unresolvable"):
        sandbox_nodes([tmp_path], {H100: [A]})
    core = KataCore(gpu(A))
    core.write(tmp_path)
    (tmp_path / "other.json").write_bytes((tmp_path / file_name(H100)).read_bytes())
    with pytest.raises(SandboxError, match="unresolvable"):
        sandbox_nodes([tmp_path], {H100: [A]})
