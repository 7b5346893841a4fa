"""Sets of devices in the daemon's decisions: preference, Allocate, a claim's prepare, and slices."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.events.daemon import ConfigUsed, Ticked
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked, PreferenceRequest
from gpuactors.core.events.host import HostScanned, SetsObserved
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.kinds.sets import DeviceSet, KnownSets, Partition, PartitionGpu, SetSource
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Claim, Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted, Log, Preferred, Refusal, Refused
from gpuactors.core.values.model import DeviceId, PciFunction, ResourceName, Settings, Token, function_address
from gpuactors.core.values.own_resources import parse_model_rule
from gpuactors.core.values.slices import Attribute
from tests.core.builders import H100, SETTINGS, Core, gpu, only
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.core.kinds.boards import board, key, partition

REQUIRED = replace(SETTINGS, sets_required=True)


def named(*sets: DeviceSet) -> SetsObserved:
    return SetsObserved(SetSource.OPERATOR, KnownSets(sets))


BOARD = SetsObserved(SetSource.OPERATOR, KnownSets(board(4), {key(1): 3}))
"""The pairs are 1, 2 and 3, 4."""
SWITCHES = ResourceName("nvidia.com/GH100_H100_NVSWITCH")
WHY = "cannot read /sets.json (--sets-file): Permission denied; correct the file or the option"
UNREAD = SetsObserved(SetSource.OPERATOR, WHY)


def switch(number: int) -> PciFunction:
    return gpu(
        f"{number:02x}:00.0", device="22a3", class_code="068000", model="GH100 [H100 NVSwitch]", group=number
    )


def gpus(*numbers: int) -> tuple[PciFunction, ...]:
    return tuple(gpu(f"{n:02x}:00.0") for n in numbers)


def node(*functions: PciFunction, settings: Settings = REQUIRED, sets: SetsObserved | None = BOARD) -> Core:
    core = Core(*functions, settings=settings)
    if sets is not None:
        core.feed(sets)
    return core


def allocate(*containers: tuple[int, ...], resource: ResourceName = H100) -> AllocateAsked:
    return AllocateAsked(Token(1), resource, tuple(tuple(DeviceId(key(n)) for n in c) for c in containers))


def answer(core: Core, *containers: tuple[int, ...], resource: ResourceName = H100) -> Granted | Refused:
    answers = core.answers(allocate(*containers, resource=resource))
    for number in sorted({n for container in containers for n in container}):
        if not answers:
            address = function_address(key(number))
            answers = core.answers(core.inspected(address, core.state.host.functions[address]))
    (one,) = answers
    assert isinstance(one, Granted | Refused)
    return one


def preferred(core: Core, available: tuple[int, ...], size: int, resource: ResourceName = H100) -> list[int]:
    request = PreferenceRequest(tuple(DeviceId(key(n)) for n in available), (), size)
    answer = only(Preferred, core.answers(PreferenceAsked(Token(7), resource, (request,))))
    return [int(i[5:7], 16) for i in answer.containers[0]]


# --- preference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SETTINGS, REQUIRED], ids=["prefer", "require"])
def test_a_set_is_preferred_from_when_it_is_read(settings: Settings) -> None:
    core = node(*gpus(1, 2, 3, 4), settings=settings, sets=None)
    assert preferred(core, (2, 3, 4), 2) == [2, 3]
    core.feed(BOARD)
    assert preferred(core, (2, 3, 4), 2) == [3, 4]
    core.feed(named(partition(1, 2, 4)))
    assert preferred(core, (2, 3, 4), 2) == [2, 4], "a changed file counts without a restart"


def test_a_set_with_a_gpu_whose_pod_has_just_ended_is_preferred_where_sets_are_required() -> None:
    """Kubelet offers it again, and the daemon has not read so yet: the other two are free, but no set."""
    for settings, wanted in ((SETTINGS, [2, 3]), (REQUIRED, [1, 2])):
        core = node(*gpus(1, 2, 3), settings=settings)
        core.ledger = {key(1): "vm-1"}
        core.feed(Ticked(), after_s=60.0)
        assert core.state.kubelet.ledger.entries
        assert preferred(core, (1, 2, 3), 2) == wanted
    assert preferred(core, (2, 3), 2) == [2, 3], "kubelet has not given it back"


def test_the_nvswitches_are_offered_by_default_and_preferred_all_or_none() -> None:
    core = node(*gpus(1), switch(9), switch(10), switch(11), settings=SETTINGS, sets=None)
    assert core.device_list(SWITCHES).keys() == {key(9), key(10), key(11)}
    assert core.state.sets[0].devices == (key(9), key(10), key(11))
    assert preferred(core, (9, 10, 11), 3, SWITCHES) == [9, 10, 11]


def test_a_set_of_gpus_and_switches_is_a_set_for_each_resource() -> None:
    sets = named(partition(1, 2, 4, 9, 10))
    core = node(*gpus(1, 2, 3, 4), switch(9), switch(10), sets=sets)
    assert preferred(core, (1, 2, 3, 4), 2) == [2, 4]
    assert isinstance(answer(core, (2, 4)), Granted)
    assert isinstance(answer(core, (9, 10), resource=SWITCHES), Granted)


# --- Allocate ---------------------------------------------------------------------------------------------


def test_allocate_refuses_what_is_no_set_at_once() -> None:
    core = node(*gpus(1, 2, 3, 4))
    refused = only(Refused, core.answers(allocate((2, 3))))
    assert (refused.status, refused.causes) == (Refusal.FAILED_PRECONDITION, (Cause.NOT_A_SET,))
    assert f"{key(2)}, {key(3)} are not exactly one partition" in refused.reason
    assert "--sets prefer" in refused.reason
    assert core.state.calls.waiting == {}
    assert isinstance(answer(core, (3, 4)), Granted)


def test_devices_that_pods_have_under_an_earlier_name_are_in_their_sets_still() -> None:
    """Kubelet gives them away by that name as soon as their pods have ended."""
    core = node(*gpus(1, 2, 3, 4))
    core.feed(KubeletAppeared("kubelet"))
    core.ledger = {key(n): f"vm-{n}" for n in (1, 2, 3)}
    core.pass_time(40)
    rule = parse_model_rule("10de:2330=example.com/big")
    core.feed(ConfigUsed(("resource_name",), (*SETTINGS.selectors, rule), ()))
    assert core.device_list().keys() >= {key(1), key(2), key(3)}
    refused = only(Refused, core.answers(allocate((2, 3))))
    assert refused.causes == (Cause.NOT_A_SET,)


def test_each_container_must_have_a_set_of_its_own() -> None:
    refused = only(Refused, node(*gpus(1, 2, 3, 4)).answers(allocate((1,), (2, 3, 4))))
    assert f"{key(2)}, {key(3)}, {key(4)} are not" in refused.reason
    assert isinstance(answer(node(*gpus(1, 2, 3, 4)), (1, 2), (3, 4)), Granted)


def test_where_sets_are_preferred_any_devices_are_granted() -> None:
    assert isinstance(answer(node(*gpus(1, 2, 3, 4), settings=SETTINGS), (2, 3)), Granted)


def test_some_of_the_switches_are_no_set() -> None:
    core = node(switch(9), switch(10), switch(11), sets=None)
    refused = only(Refused, core.answers(allocate((9, 10), resource=SWITCHES)))
    assert f"the NVSwitches {key(11)} are missing" in refused.reason
    assert isinstance(answer(core, (9, 10, 11), resource=SWITCHES), Granted)


def test_a_gpu_of_a_set_that_has_lost_another_is_no_set() -> None:
    sets = named(partition(1, 1, 2))
    refused = only(Refused, node(*gpus(1), sets=sets).answers(allocate((1,))))
    assert refused.causes == (Cause.NOT_A_SET,)


def test_nothing_is_granted_before_the_sets_are_known() -> None:
    core = node(*gpus(1, 2, 3, 4), sets=UNREAD)
    refused = only(Refused, core.answers(allocate((3, 4))))
    assert (refused.status, refused.causes) == (Refusal.UNAVAILABLE, (Cause.NOT_A_SET,))
    assert "/sets.json (--sets-file): Permission denied" in refused.reason
    core.feed(BOARD)
    assert isinstance(answer(core, (3, 4)), Granted)


def test_the_last_sets_count_while_the_file_cannot_be_read() -> None:
    core = node(*gpus(1, 2, 3, 4))
    core.feed(UNREAD)
    assert preferred(core, (2, 3, 4), 2) == [3, 4]
    assert only(Refused, core.answers(allocate((2, 3)))).causes == (Cause.NOT_A_SET,)


# --- claims -----------------------------------------------------------------------------------------------


def claim_core(settings: Settings = REQUIRED, sets: SetsObserved = BOARD) -> ClaimCore:
    core = ClaimCore(*gpus(1, 2, 3, 4), settings=settings)
    core.feed(sets)
    return core


def claim(*numbers: int) -> Claim:
    return allocated(name("one"), *[key(n) for n in numbers])


def test_the_prepare_of_a_claim_refuses_what_is_no_set() -> None:
    core = claim_core()
    reason = core.refusal(core.prepare(claim(2, 3)))
    assert f"{key(2)}, {key(3)} are not exactly one partition of this node" in reason
    assert core.claim_state(name("one")) is ClaimState.ABSENT
    core = claim_core()
    assert isinstance(core.answer(core.prepare(claim(3, 4))), Prepared)


def test_a_claim_gets_any_devices_where_sets_are_preferred() -> None:
    core = claim_core(SETTINGS)
    assert isinstance(core.answer(core.prepare(claim(2, 3))), Prepared)


def test_a_claim_waits_until_the_sets_are_known() -> None:
    core = claim_core(sets=UNREAD)
    token = core.prepare(claim(3, 4))
    assert core.answer(token) is None
    core.feed(BOARD)
    assert isinstance(core.answer(token), Prepared)


def test_a_prepared_claim_keeps_its_devices_when_the_sets_change() -> None:
    core = claim_core()
    assert isinstance(core.answer(core.prepare(claim(3, 4))), Prepared)
    core.feed(named(partition(1, 2, 3)))
    core.pass_time(5.0)
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def test_a_slice_says_which_partition_of_each_size_a_gpu_is_in() -> None:
    core = claim_core()
    offered = core.state.offered.devices
    assert offered[key(3)].attributes["partition2"] == offered[key(4)].attributes["partition2"]
    assert offered[key(2)].attributes["partition2"] != offered[key(3)].attributes["partition2"]
    assert {offered[key(n)].attributes["partition4"] for n in (1, 2, 3, 4)} == {Attribute("int", 1)}
    assert offered[key(1)].attributes["gpuModuleID"] == Attribute("int", 3)
    assert "gpuModuleID" not in offered[key(2)].attributes, "0 is never published"
    core.feed(named())
    assert "partition2" not in core.state.offered.devices[key(3)].attributes


# --- the log ----------------------------------------------------------------------------------------------


def test_each_change_of_the_sets_is_logged_once() -> None:
    core = Core()
    problem = "/sets.json, sets of 2: it is no list"
    wrong = SetsObserved(SetSource.OPERATOR, KnownSets(problems=(problem,)))
    for event in (BOARD, BOARD, UNREAD, UNREAD, BOARD, wrong, wrong, HostScanned(1, gpus(1)), wrong):
        core.feed(event)
    lines = [(e.name, *e.fields.values()) for e in core.effects if isinstance(e, Log) and "sets" in e.name]
    file = "the operator's file"
    assert lines == [
        ("sets.read", file),
        ("sets.unread", file, WHY),
        ("sets.read", file),
        ("sets.read", file),
        ("sets.refused", problem),
    ], "what is left out once it is known which GPUs there are"


# --- the fabric manager -----------------------------------------------------------------------------------


def listed(*partitions: Partition) -> SetsObserved:
    return SetsObserved(SetSource.FABRIC_MANAGER, KnownSets(partitions=partitions))


def of_addresses(number: int, *numbers: int, active: bool = False) -> Partition:
    return Partition(
        number, active, tuple(PartitionGpu(8 + n, "", f"00000000:{n:02X}:00.0") for n in numbers)
    )


def test_a_partition_of_the_fabric_manager_is_a_set() -> None:
    core = node(*gpus(1, 2, 3, 4), sets=listed(of_addresses(4, 1, 3), of_addresses(7, 2, 4, active=True)))
    assert preferred(core, (1, 2, 3, 4), 2) == [2, 4], "the active one"
    assert only(Refused, core.answers(allocate((1, 2)))).causes == (Cause.NOT_A_SET,)
    assert isinstance(answer(core, (1, 3)), Granted)


def test_a_gpu_is_found_by_its_module_id_where_the_list_has_no_more() -> None:
    core = node(*gpus(1, 2, 3), sets=SetsObserved(SetSource.OPERATOR, KnownSets((), {key(3): 1, key(2): 2})))
    core.feed(listed(Partition(0, False, (PartitionGpu(1), PartitionGpu(2, "", "00000000:00:00.0")))))
    assert preferred(core, (1, 2, 3), 2) == [2, 3]


def test_a_gpu_is_found_when_the_host_knows_its_uuid() -> None:
    core = node(*gpus(1, 2, 3))
    core.feed(
        listed(Partition(0, False, (PartitionGpu(9, "GPU-2"), PartitionGpu(10, "", "00000000:03:00.0"))))
    )
    (line,) = core.logged("sets.refused")
    assert "--partition-command, partition 0: UUID GPU-2 is of no GPU" in str(line.fields["reason"])
    core.feed(named())
    known = replace(gpus(2)[0], driver="nvidia", vfio_bound=False, gpu_uuid="GPU-2")
    core.inspect(key(2), known)
    assert [s.devices for s in core.state.sets] == [(key(2), key(3))]


def test_a_slice_has_the_numbers_of_the_fabric_manager() -> None:
    core = claim_core()
    core.feed(named(), listed(of_addresses(4, 1, 3), of_addresses(7, 2, 4)))
    numbers = [core.state.offered.devices[key(n)].attributes["partition2"].value for n in (1, 2, 3, 4)]
    assert numbers == [4, 7, 4, 7]


def test_a_source_that_was_never_read_refuses_although_another_one_was() -> None:
    core = node(*gpus(1, 2, 3, 4))
    core.feed(SetsObserved(SetSource.FABRIC_MANAGER, "/fmpm query ends with status 1"))
    reason = only(Refused, core.answers(allocate((3, 4)))).reason
    assert reason.startswith("the sets of devices are not known: /fmpm query ends with status 1; or allow")
    core.feed(listed())
    assert isinstance(answer(core, (3, 4)), Granted)
