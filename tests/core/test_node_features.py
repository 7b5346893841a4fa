"""The labels of our node: models, drivers and IOMMU of what is selected, by names that Kubernetes takes."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.events.daemon import ShutdownRequested
from gpuactors.core.reports.node_features import PREFIX, node_features
from gpuactors.core.step import initial_state
from gpuactors.core.values.model import Role
from tests.core.builders import SETTINGS, Core, gpu


def labels(core: Core) -> dict[str, str]:
    """Without their prefix."""
    found = node_features(core.state)
    assert found is not None
    assert list(found) == sorted(found)
    return {name.removeprefix(f"{PREFIX}/"): value for name, value in found.items()}


def test_models_and_drivers_are_counted_whatever_they_are_bound_to() -> None:
    core = Core(
        gpu("01:00.0"),
        gpu("02:00.0", driver="nvidia"),
        gpu("03:00.0", driver=None),
        gpu("04:00.0", device="20b0", model="GA100 [A100 SXM4 40GB]"),
        gpu("05:00.0", driver="snd_hda_intel", class_code="040300"),
    )
    assert labels(core) == {
        "GH100_H100_SXM5_80GB": "3",
        "GA100_A100_SXM4_40GB": "1",
        "driver.vfio-pci": "2",
        "driver.nvidia": "1",
        "driver.none": "1",
        "iommu": "true",
    }


def test_the_labels_do_not_change_with_pods() -> None:
    core = Core(gpu("01:00.0"))
    before = labels(core)
    core.ledger = {"0000:01:00.0": "vm"}
    core.pass_time(60.0)
    assert labels(core) == before


def test_a_node_without_an_iommu_says_so() -> None:
    function = replace(gpu("01:00.0", driver=None), iommu_group=None)
    assert labels(Core(function))["iommu"] == "false"
    assert labels(Core(replace(gpu("01:00.0"), without_iommu=True)))["iommu"] == "false"


def test_a_drivers_name_that_no_label_can_have_is_left_out() -> None:
    assert "driver" not in str(labels(Core(gpu("01:00.0", driver="odd\\xff name"))))


def test_nothing_is_known_before_the_first_scan_or_by_who_does_not_serve() -> None:
    assert node_features(initial_state(SETTINGS)) is None
    core = Core(gpu("01:00.0"))
    waiting = replace(core.state, daemon=replace(core.state.daemon, role=Role.TAKING_OVER))
    assert node_features(waiting) is None
    core.feed(ShutdownRequested())
    assert node_features(core.state) is None
