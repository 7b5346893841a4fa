"""Which DeviceClasses take a resource of the device plugin, and which resources are ours."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.gpus.device_classes import (
    CLASSES_TOLD_MAX,
    DeviceClass,
    contested,
    own_resources,
    sentence_of,
)
from gpuactors.core.step import initial_state
from gpuactors.core.values.model import ResourceName, Role
from tests.core.builders import SETTINGS, Core, gpu

H100, A100 = ResourceName("nvidia.com/GH100_H100_SXM5_80GB"), ResourceName("nvidia.com/GA100_A100_SXM4_40GB")


def test_a_class_with_a_resource_of_ours_is_found_and_no_other_one() -> None:
    ours = DeviceClass("ours", H100)
    others = (DeviceClass("plain", None), DeviceClass("empty", ""), DeviceClass("else", "example.com/h100"))
    assert contested((*others, ours), {H100, A100}) == (ours,)
    assert contested(others, {H100}) == contested((ours,), ()) == ()


def test_a_cluster_full_of_such_classes_fills_no_log() -> None:
    many = [DeviceClass(f"class-{number}", H100) for number in range(1000)]
    assert contested(many, {H100}) == tuple(many[:CLASSES_TOLD_MAX])


def test_a_name_from_outside_is_short_and_printable_in_the_sentence() -> None:
    said = sentence_of(DeviceClass("x" * 100_000 + "\n", H100))
    assert len(said) < 1000
    assert said.isprintable()
    assert H100 in said


def test_ours_are_the_resources_of_all_selected_gpus_whatever_they_are_bound_to() -> None:
    """A claim binds one to vfio at any time, and the device plugin lists it then."""
    on_host = gpu("02:00.0", driver="nvidia", device="20b0", model="GA100 [A100 SXM4 40GB]")
    core = Core(gpu("01:00.0"), on_host, gpu("03:00.0", class_code="040300"))
    assert own_resources(core.state) == frozenset({H100, A100})


def test_nothing_is_known_before_the_first_scan_or_by_who_does_not_serve() -> None:
    assert own_resources(initial_state(SETTINGS)) is None
    state = Core(gpu("01:00.0")).state
    assert own_resources(replace(state, daemon=replace(state.daemon, role=Role.TAKING_OVER))) is None
