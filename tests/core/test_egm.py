"""The device node of an EGM: in an answer and in a claim's files only with every GPU of it, and refusing nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.deviceplugin import specs
from gpuactors.core.events.deviceplugin import SpecsWritten
from gpuactors.core.events.host import SetsObserved
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.kinds.container import node_order
from gpuactors.core.kinds.sets import DeviceSet, KnownSets, SetSource
from gpuactors.core.values.claim import Claim, Prepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted
from gpuactors.core.values.model import Settings
from gpuactors.core.values.slices import Attribute
from tests.core.builders import SETTINGS, Core
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.core.kinds.boards import egm, key
from tests.core.test_sets_wired import REQUIRED, answer, claim_core, gpus, node, preferred
from tests.support.edits import nodes_of

BY_CDI = replace(SETTINGS, allocates_by_cdi=True)
FOUR = egm("egm4", 1, 2, node="/dev/egm4")
ONE_GPU = egm("egm4", 1, node="/dev/egm4")
FIVE = egm("egm5", 3, 4, node="/dev/egm5")
HANGS = "cannot read /sys/class/egm: no answer within 0.2 s"


def read(*sets: DeviceSet) -> SetsObserved:
    return SetsObserved(SetSource.EGM, KnownSets(sets))


def egm_nodes(core: Core, *containers: tuple[int, ...]) -> list[list[str]]:
    """The nodes of EGMs that each container gets."""
    granted = answer(core, *containers)
    assert isinstance(granted, Granted)
    return [[n for n in c.nodes if n.startswith("/dev/egm")] for c in granted.containers]


def grace(*sets: DeviceSet, settings: Settings = SETTINGS) -> Core:
    core = node(*gpus(1, 2, 3, 4), settings=settings, sets=read(*sets or (FOUR, FIVE)))
    if settings.allocates_by_cdi:
        core.feed(KubeletAppeared("1"))
        wanted = specs.wanted(core.state)
        assert wanted is not None
        core.feed(SpecsWritten(wanted.specs, {}))
    return core


# --- Allocate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SETTINGS, BY_CDI, REQUIRED], ids=["nodes", "cdi", "sets required"])
@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        (((1, 2),), [["/dev/egm4"]]),
        (((1, 2, 3, 4),), [["/dev/egm4", "/dev/egm5"]]),
        (((1, 2, 3),), [["/dev/egm4"]]),
        (((1,),), [[]]),
        (((2, 3),), [[]]),
        (((1,), (2,)), [[], []]),
        (((3, 4), (1, 2)), [["/dev/egm5"], ["/dev/egm4"]]),
    ],
)
def test_a_container_gets_the_node_with_all_gpus_of_the_egm(
    settings: Settings, containers: tuple[tuple[int, ...], ...], expected: list[list[str]]
) -> None:
    assert egm_nodes(grace(settings=settings), *containers) == expected


def test_by_cdi_names_it_is_the_only_node_beside_them() -> None:
    granted = answer(grace(settings=BY_CDI), (1, 2))
    assert isinstance(granted, Granted)
    (container,) = granted.containers
    assert (len(container.cdi_ids), container.nodes, container.envs) == (2, ("/dev/egm4",), ())


def test_it_is_the_last_node() -> None:
    nodes = ["/dev/egm4", "/dev/iommu", "/dev/vfio/devices/vfio1", "/dev/vfio/51", "/dev/vfio/vfio"]
    assert sorted(nodes, key=node_order) == nodes[::-1]


def test_an_egm_with_a_gpu_that_is_not_offered_is_never_whole() -> None:
    assert egm_nodes(grace(egm("egm4", 1, 2, 9, node="/dev/egm4")), (1, 2)) == [[]]


def test_an_egm_without_its_node_is_in_no_answer_and_its_gpus_stay_healthy() -> None:
    core = grace(egm("egm4", 1, 2))
    assert set(core.device_list().values()) == {"Healthy"}
    assert egm_nodes(core, (1, 2)) == [[]]


@pytest.mark.parametrize(
    ("later", "expected"),
    [(read(ONE_GPU), ["/dev/egm4"]), (read(FOUR), []), (read(), [])],
    ids=["made late", "its list grows", "it goes"],
)
def test_each_change_counts_at_once(later: SetsObserved, expected: list[str]) -> None:
    core = node(*gpus(1, 2), settings=SETTINGS, sets=None)
    if later != read(ONE_GPU):
        core.feed(read(ONE_GPU))
    core.feed(later)
    assert egm_nodes(core, (1,)) == [expected]


def test_the_last_ones_count_while_they_cannot_be_read() -> None:
    core = grace()
    core.feed(SetsObserved(SetSource.EGM, HANGS))
    assert egm_nodes(core, (1, 2)) == [["/dev/egm4"]]
    assert [line.fields["reason"] for line in core.logged("sets.unread")] == [HANGS]


@pytest.mark.parametrize("settings", [SETTINGS, REQUIRED], ids=["prefer", "require"])
def test_egms_that_were_never_read_refuse_nothing(settings: Settings) -> None:
    core = node(*gpus(1, 2), settings=settings, sets=SetsObserved(SetSource.EGM, HANGS))
    assert egm_nodes(core, (1, 2)) == [[]]


def test_the_gpus_of_one_are_preferred_together() -> None:
    core = grace()
    assert preferred(core, (2, 3, 4), 2) == [3, 4]
    assert preferred(core, (1, 2, 4), 2) == [1, 2]


# --- claims -----------------------------------------------------------------------------------------------


def egms_in_files(core: ClaimCore, claim: Claim) -> list[list[str]]:
    """The nodes of EGMs that each device has in the files of this claim."""
    core.held_back.add("files")
    core.prepare(claim)
    (act,) = core.wanted.files.values()
    found = [[n for n in nodes_of(device) if n.startswith("/dev/egm")] for device in act.devices]
    core.release("files")
    return found


def claimed(*numbers: int, admin: bool = False) -> Claim:
    return allocated(name("one"), *[key(n) for n in numbers], admin=admin)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((2, 1), [[], ["/dev/egm4"]]),
        ((1, 2, 3, 4), [["/dev/egm4"], [], ["/dev/egm5"], []]),
        ((1,), [[]]),
        ((2, 3), [[], []]),
    ],
)
def test_a_claims_files_have_the_node_once_with_all_gpus_of_the_egm(
    numbers: tuple[int, ...], expected: list[list[str]]
) -> None:
    core = claim_core(SETTINGS, read(FOUR, FIVE))
    assert egms_in_files(core, claimed(*numbers)) == expected


def test_a_claim_with_admin_access_gets_no_node() -> None:
    assert egms_in_files(claim_core(SETTINGS, read(FOUR)), claimed(1, 2, admin=True)) == [[], []]


def test_an_egm_that_comes_with_the_binding_of_its_gpus_is_in_the_files() -> None:
    on_host = tuple(replace(one, driver="nvidia", vfio_bound=False) for one in gpus(1, 2))
    core = ClaimCore(*on_host, settings=SETTINGS)
    core.held_back = {"device", "files"}
    core.prepare(claimed(1, 2))
    core.feed(read(FOUR))
    core.release("device")
    (act,) = core.wanted.files.values()
    assert [n for device in act.devices for n in nodes_of(device) if "egm" in n] == ["/dev/egm4"]
    core.release("files")
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_prepared_claim_keeps_its_answer_when_the_egm_goes() -> None:
    core = claim_core(SETTINGS, read(FOUR))
    first = core.answer(core.prepare(claimed(1, 2)))
    core.feed(read())
    assert isinstance(first, Prepared)
    assert core.answer(core.prepare(name("one"))) == first


def test_a_slice_has_the_name_of_the_egm_where_it_is_known() -> None:
    core = claim_core(SETTINGS, read(FOUR))
    offered = core.state.offered.devices
    assert (
        offered[key(1)].attributes["egm"] == offered[key(2)].attributes["egm"] == Attribute("string", "egm4")
    )
    assert "egm" not in offered[key(3)].attributes
    core.feed(read())
    assert "egm" not in core.state.offered.devices[key(1)].attributes
