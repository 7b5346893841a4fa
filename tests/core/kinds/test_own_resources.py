"""Resources of the operator's own, by selectors, and what is excluded: for devices of every kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors.core.events.daemon import ConfigUsed
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.reports.snapshot import report
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared
from gpuactors.core.values.effects import Ready, Refused
from gpuactors.core.values.model import DeviceId, DeviceKey, PciAddress, ResourceName
from gpuactors.core.values.own_resources import conflict_of_rules, parse_model_rule, parse_rule
from gpuactors.core.values.selector import Selector, parse_selector
from tests.core.builders import H100, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.core.kinds.test_kubevirt import (
    CARD,
    GPUS,
    KINDS,
    MEDIATED,
    PARENT,
    PF,
    SERIAL,
    VFS,
    VGPUS,
    grant,
    node,
)
from tests.observe.recording import RecordedSteps, write
from tests.replay.replayed import replayed

BIG: Final = ResourceName("example.com/big")
OTHER: Final = PciAddress("0000:09:00.0")


def with_rules(*texts: str) -> ClaimCore:
    return node("NVIDIA L40S-1Q", *map(parse_rule, texts))


def resources(core: ClaimCore) -> Mapping[str, str]:
    return {key: device.resource for key, device in core.state.index.devices.items()}


def causes(core: ClaimCore, *devices: str) -> list[Cause]:
    by_device = {device.key: device.cause for device in report(core.state)}
    return [by_device[DeviceKey(device)] for device in devices]


# --- a rule as it is written ------------------------------------------------------------------------------------------


def test_a_rule_is_a_resource_and_a_selector() -> None:
    rule = parse_rule(" example.com/big = vendor=0x10DE,device=2330")
    assert rule == Selector(vendor="10de", device="2330", resource="example.com/big")
    assert str(rule) == "example.com/big=vendor=10de,device=2330"
    assert parse_rule(str(rule)) == rule
    typed = parse_rule("example.com/small=mdev=NVIDIA A10-24Q")
    assert parse_rule(str(typed)) == typed == Selector(mdev="nvidia_a10-24q", resource="example.com/small")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vendor=10de", "is not DOMAIN/NAME=SELECTOR"),
        ("example.com/big", "is not DOMAIN/NAME=SELECTOR"),
        ("/big=vendor=10de", "is no resource"),
        ("kubernetes.io/big=vendor=10de", "Kubernetes' own names"),
        ("example.com/big=vendor", "is not KEY=VALUE"),
        ("example.com/big=", "is not KEY=VALUE"),
        ("example.com/big=!vendor=10de", "exclude devices by a selector of --select"),
    ],
)
def test_a_rule_that_is_none_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_rule(text)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ("a.b/x=device=2330", "a.b/x=mdev=nvidia-593"),
            "mediated devices (mdev=nvidia-593) and PCI functions",
        ),
        (
            ("a.b/x=vendor=10de,device=2342", "a.b/x=device=2330"),
            "Grace superchips (vendor=10de,device=2342)",
        ),
        (("a.b/x=device=2941", "a.b/x=vendor=1002"), "and other devices (vendor=1002)"),
        (("a.b/x=device=2342", "a.b/x=device=2348"), None),
        (("a.b/x=device=2342", "a.b/y=device=2330"), None),
        (("a.b/x=vendor=1002,device=2342", "a.b/x=device=2330"), None),
        (("a.b/x=mdev=a", "a.b/x=mdev=b", "a.b/y=device=2330"), None),
        (("a.b/x=device=2342", "a.b/x=class=03"), None),
    ],
)
def test_devices_that_kubevirt_cannot_use_under_one_name_are_seen_by_their_selectors(
    texts: tuple[str, ...], said: str | None
) -> None:
    rules = [(ResourceName(rule.resource or ""), rule) for rule in map(parse_rule, texts)]
    conflict = conflict_of_rules(rules)
    assert (conflict is None) == (said is None)
    assert said is None or said in (conflict or "")


# --- what it names ----------------------------------------------------------------------------------------------------

OF_KIND: Final[Mapping[str, tuple[str, str]]] = {
    "whole functions": (f"address={GPUS[0]}", GPUS[0]),
    "virtual functions": (f"address={VFS[0]}", VFS[0]),
    "mediated devices": ("mdev=NVIDIA H100-4C", MEDIATED[0]),
    "mediated devices without a PCI parent": ("mdev=mtty-2", SERIAL[0]),
}
"""A selector of a rule for devices of each kind that a rule can name, and such a device."""


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_device_is_of_the_resource_of_its_rule(kind: str) -> None:
    selector, device = OF_KIND[kind]
    core = with_rules(f"{BIG}={selector}")
    assert resources(core)[device] == BIG
    of, _, _ = KINDS[kind]
    variable = {"pci": "PCI_RESOURCE", "mdev": "MDEV_PCI_RESOURCE"}[of]
    assert grant(core, BIG, device).envs == ((f"{variable}_EXAMPLE_COM_BIG", device),)


def test_several_models_of_one_resource_are_in_one_variable() -> None:
    core = with_rules(f"{BIG}=device=2330,class=0302", f"{BIG}=device=2331")
    core.changed(replace(core.functions[PciAddress(GPUS[1])], device="2331"))
    assert grant(core, BIG, *GPUS).envs == (("PCI_RESOURCE_EXAMPLE_COM_BIG", ",".join(GPUS)),)


def test_the_first_rule_that_matches_names_a_device_before_the_name_of_its_model() -> None:
    texts = (f"example.com/one=address={GPUS[0]}", f"{BIG}=vendor=10de,device=2330")
    rules = (*map(parse_rule, texts), parse_model_rule("10de:2330=example.com/model"))
    core = node("NVIDIA L40S-1Q", *rules)
    assert [resources(core)[a] for a in GPUS] == ["example.com/one", BIG]


def test_a_name_for_a_model_selects_nothing() -> None:
    other = replace(gpu(OTHER, 50), vendor="1002", class_code="120000")
    core = node("NVIDIA L40S-1Q", parse_model_rule(f"1002:2330={BIG}"))
    core.changed(other)
    assert OTHER not in resources(core)


def test_a_rule_selects_what_it_names() -> None:
    other = replace(gpu(OTHER, 50), vendor="1002", class_code="120000")
    for rules, is_there in (((), False), ((f"{BIG}=vendor=1002,class=12",), True)):
        core = with_rules(*rules)
        core.changed(other)
        assert (resources(core).get(OTHER) == BIG) == is_there


def test_a_vgpu_by_vendor_vfio_and_a_mediated_device_keep_the_name_of_their_profile_beside_a_rule_for_functions() -> (
    None
):
    core = with_rules(f"{BIG}=vendor=10de,class=03")
    assert {resources(core)[key] for key in VGPUS} == {"nvidia.com/NVIDIA_L40S-1Q"}
    assert {resources(core)[key] for key in MEDIATED} == {"nvidia.com/NVIDIA_H100-4C"}


# --- which KubeVirt cannot use together -------------------------------------------------------------------------------


def test_virtual_functions_are_refused_where_whole_ones_have_their_name_and_claims_get_them() -> None:
    core = with_rules(f"{BIG}=vendor=10de,class=03")
    assert causes(core, *GPUS) == [Cause.FREE] * 2
    assert causes(core, *VFS) == [Cause.RESOURCE_MIXED] * 2
    (answer,) = core.answers(AllocateAsked(core.token(), BIG, ((DeviceId(VFS[0]),),)))
    assert isinstance(answer, Refused)
    assert GPUS[0] in answer.reason
    assert "give one of them another name (--resource)" in answer.reason
    of_claim = allocated(name("one"), VFS[0])
    assert isinstance(core.answer(core.prepare(of_claim)), Prepared)


def test_a_card_with_virtual_functions_keeps_none_of_them_from_its_name() -> None:
    core = with_rules(f"{BIG}=address={PF}", f"{BIG}=address={VFS[0]}")
    assert causes(core, VFS[0]) == [Cause.FREE]


def test_whatever_driver_a_whole_function_is_on_it_keeps_the_name() -> None:
    """A claim that binds it changes nothing for the virtual functions."""
    core = with_rules(f"{BIG}=address={OTHER}", f"{BIG}=address={VFS[0]}")
    assert causes(core, *VFS) == [Cause.FREE] * 2
    for driver in ("nvidia", "vfio-pci", None):
        core.changed(gpu(OTHER, 50, driver=driver))
        assert causes(core, *VFS) == [Cause.RESOURCE_MIXED, Cause.FREE], driver
    core.unplugged(OTHER)
    assert causes(core, *VFS) == [Cause.FREE] * 2


def test_gpus_of_grace_superchips_keep_the_name_and_others_are_refused() -> None:
    core = with_rules(f"{BIG}=vendor=10de,class=03")
    core.changed(replace(gpu(OTHER, 50), device="2342"))
    assert causes(core, OTHER, *GPUS, VFS[0]) == [Cause.FREE, *[Cause.RESOURCE_MIXED] * 3]


def test_mediated_devices_are_refused_where_functions_have_their_name() -> None:
    profile = ResourceName("nvidia.com/NVIDIA_H100-4C")
    core = with_rules(f"{profile}=address={GPUS[0]}")
    assert causes(core, GPUS[0], *MEDIATED) == [Cause.FREE, *[Cause.RESOURCE_MIXED] * 2]


def test_names_that_no_operator_has_given_are_not_judged() -> None:
    """A profile of both kinds of vGPU."""
    core = node("NVIDIA H100-4C")
    assert {resources(core)[key] for key in (*VGPUS, *MEDIATED)} == {"nvidia.com/NVIDIA_H100-4C"}
    assert causes(core, *VGPUS, *MEDIATED) == [Cause.FREE] * 4


# --- a new name -------------------------------------------------------------------------------------------------------


def test_a_device_that_a_pod_has_keeps_the_name_until_the_pod_ends() -> None:
    """And it is not refused for what has the new name."""
    core, before = node(), ResourceName(f"{H100}_VF")
    core.feed(KubeletAppeared("kubelet"))
    core.others[before, VFS[0]] = "vm"
    core.pass_time(40)
    selectors = (*core.state.daemon.settings.selectors, parse_model_rule(f"10de:2330={BIG}"))
    core.feed(ConfigUsed(("resource_name",), selectors, ()))
    assert resources(core)[VFS[0]] == before
    assert causes(core, VFS[0]) == [Cause.ALLOCATED]
    assert core.answers(PreStartAsked(core.token(), before, (DeviceId(VFS[0]),))) == [Ready()]
    del core.others[before, VFS[0]]
    core.pass_time(40)
    assert resources(core)[VFS[0]] == BIG
    assert causes(core, VFS[0]) == [Cause.RESOURCE_MIXED]


class Recorded(RecordedSteps, ClaimCore):
    """`ClaimCore`, whose steps are kept."""


def test_a_journal_of_it_is_replayed_without_a_difference(tmp_path: Path) -> None:
    like = with_rules(f"{BIG}=vendor=10de,class=03", "example.com/typed=mdev=mtty-2")
    core = Recorded(settings=like.state.daemon.settings)
    core.functions, core.mediated = like.functions, like.mediated
    core.scanned()
    core.feed(KubeletAppeared("kubelet"))
    core.others[BIG, GPUS[0]] = "vm"
    core.pass_time(40)
    core.unplugged(*GPUS)
    write(tmp_path, *core.steps)
    assert "example.com/typed" in "\n".join(replayed(tmp_path))


# --- exclusion --------------------------------------------------------------------------------------------------------

EXCLUDED: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "whole functions": ((f"!address={GPUS[0]}",), (GPUS[0],)),
    "virtual functions": ((f"!address={VFS[0]}",), (VFS[0],)),
    "vGPUs by vendor VFIO": ((f"!address={VGPUS[0]}",), (VGPUS[0],)),
    "mediated devices": (("!mdev=NVIDIA H100-4C",), MEDIATED),
    "mediated devices without a PCI parent": (("!mdev=mtty-2",), SERIAL),
    "mediated devices by their parent": ((f"!address={PARENT}",), (PARENT, *MEDIATED)),
}
"""Selectors that exclude devices of each kind, and which devices these are."""


@pytest.mark.parametrize("kind", EXCLUDED)
@pytest.mark.parametrize("is_named", [False, True], ids=["by its model", "by a rule"])
def test_what_is_excluded_is_no_device_whatever_else_chooses_it(kind: str, is_named: bool) -> None:
    selectors, excluded = EXCLUDED[kind]
    rules = (f"{BIG}=vendor=10de,class=03", "example.com/typed=mdev=mtty-2") if is_named else ()
    others = {*GPUS, PF, *VFS, CARD, *VGPUS, PARENT, *MEDIATED, *SERIAL} - {*excluded}
    core = node("NVIDIA L40S-1Q", *map(parse_rule, rules), *map(parse_selector, selectors))
    assert set(resources(core)) == others & set(resources(with_rules(*rules)))
    assert set(resources(with_rules(*rules))) - set(resources(core)) <= {*excluded}
