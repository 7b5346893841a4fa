"""What `inspect` and `explain` print of cards that are given away in parts: virtual functions and vGPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpuactors.cli.inspect.cards import in_order
from gpuactors.cli.inspect.report import (
    as_json,
    as_table,
    as_wide,
    explained_json,
    explained_text,
    explanation,
)
from gpuactors.cli.inspect.view import (
    Explained,
    ExplainedCard,
    ExplainedResource,
    Inspected,
    UnknownAddressError,
    explain_in,
    find,
)
from gpuactors.control.node_view import view_of
from gpuactors.control.view import CardView, DeviceView, NodeView
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import device_key, pci_address
from tests.core.builders import Core, gpu
from tests.core.kinds.toy import CARD, RESOURCE, card, half, registered

PF, WHOLE = "0000:3b:00.0", "0000:23:00.0"
PROFILE, RESOURCE_OF_PROFILE = "NVIDIA A40-12Q", "nvidia.com/NVIDIA_A40-12Q"
UUIDS = tuple(f"c5f9a3a0-0000-4000-8000-0000000000{n:02x}" for n in range(3))


def shown(view: NodeView) -> Inspected:
    return Inspected(view, True, "the running daemon (process 7, version 1.2.3)", node="gpu-17", wall=1e9)


def whole_view(*addresses: str) -> NodeView:
    core = Core(*(gpu(address, 0x30 + n) for n, address in enumerate(addresses)))
    return view_of(core.state, core.at)


def part(of: DeviceView, key: str, **changes: Any) -> DeviceView:
    """A part of the card `of`, Healthy unless changed."""
    known = {"kind": "vgpu", "parent": of.address, "driver": "nvidia", "profile": PROFILE}
    listed = {"resource": RESOURCE_OF_PROFILE, "listed": True, "health": "Healthy", "cause": "Free"}
    return replace(of, address=key, id=key, **known | listed | changes)


def divided(*parts: DeviceView, whole: Sequence[DeviceView] = ()) -> NodeView:
    """A view with one card that is not offered itself, and its parts."""
    view = whole_view(PF)
    pf = replace(
        view.devices[0],
        driver="nvidia",
        listed=False,
        health="Unhealthy",
        cause="VirtualFunctions",
        reason="its virtual functions are active",
    )
    return replace(view, devices=tuple(sorted((pf, *parts, *whole), key=lambda d: d.address)), resources=())


def a_card() -> DeviceView:
    return whole_view(PF).devices[0]


def vf(number: int, **changes: Any) -> DeviceView:
    return part(a_card(), f"0000:3b:00.{number}", **changes)


def card_lines(view: NodeView, columns: int = 200) -> list[str]:
    """The block of the card."""
    (block,) = [b for b in as_table(shown(view), columns).split("\n\n") if b.startswith(f"Card {PF}")]
    return block.splitlines()


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_whole_functions_alone_are_shown_as_ever() -> None:
    text = as_table(shown(whole_view(WHOLE, "0000:24:00.0")), 100)
    assert "Card" not in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["ADDRESS", WHOLE, "0000:24:00.0"]


def test_a_card_is_one_block_and_each_part_one_line_below_its_resource() -> None:
    held = {"health": "Unhealthy", "cause": "HeldByOther", "reason": "process 4711 (qemu) has it open"}
    view = divided(vf(4), vf(5, owner="default/vm-1", cause="Allocated"), vf(6, **held))
    assert card_lines(view) == [
        f"Card {PF}  GH100 [H100 SXM5 80GB] (10de:2330), on nvidia; "
        "the card itself is not listed: its virtual functions are active",
        f"  {RESOURCE_OF_PROFILE} ({PROFILE}): 3 parts: 2 Healthy, 1 Unhealthy; 1 with an owner",
        "    ADDRESS       DRIVER  GROUP  NUMA  HEALTH     CAUSE        OWNER",
        "    0000:3b:00.4  nvidia  48     -     Healthy    Free         -",
        "    0000:3b:00.5  nvidia  48     -     Healthy    Allocated    default/vm-1",
        "    0000:3b:00.6  nvidia  48     -     Unhealthy  HeldByOther  -",
        "    HeldByOther: process 4711 (qemu) has it open (0000:3b:00.6)",
    ]


def test_on_a_narrow_terminal_columns_are_left_out_and_no_line_is_wider() -> None:
    lost = {"health": "Unhealthy", "cause": "PhysicalFunctionNotReady", "reason": f"{PF} is on vfio-pci"}
    view = divided(vf(4, owner="default/vm-1"), vf(5, owner="default/vm-2", driver="vfio-pci", **lost))
    lines = card_lines(view, 80)
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if "ADDRESS" in line).split() == [
        "ADDRESS",
        "DRIVER",
        "HEALTH",
        "CAUSE",
        "OWNER",
    ]
    assert any(line.endswith("PhysicalFunctionNotReady  default/vm-2") for line in lines)
    assert "GROUP" in "".join(card_lines(view, 120))


def test_the_resources_come_first_with_the_cards_that_have_their_parts() -> None:
    whole = whole_view(WHOLE)
    text = as_table(shown(divided(vf(4), vf(5), whole=whole.devices)), 100)
    sections = [section.splitlines()[0] for section in text.split("\n\n")[1:]]
    assert sections[:2] == ["nvidia.com/GH100_H100_SXM5_80GB", RESOURCE_OF_PROFILE]
    assert sections[2].startswith(f"Card {PF}")
    assert f"  parts of {PF} (2)" in text.splitlines()
    assert text.count(WHOLE) == 1, "a whole function is in its resource's table alone"


def test_one_reason_of_many_parts_is_said_once() -> None:
    lost = {"health": "Unhealthy", "cause": "NotBound", "reason": f"{PF} is on vfio-pci"}
    parts = [part(a_card(), f"0000:3b:{n // 8:02x}.{n % 8}", **lost) for n in range(8, 264)]
    lines = card_lines(divided(*parts), 120)
    assert sum(f"{PF} is on vfio-pci" in line for line in lines) == 1
    assert "and 240 more" in " ".join(lines)
    rows = [line for line in lines if line.startswith("    0000:")]
    assert len(rows) == 256
    assert len(lines) < 256 + 12, "a part has one line"


def test_a_part_of_a_part_names_the_one_that_it_is_of() -> None:
    mdev = part(vf(4), UUIDS[0], kind="mdev")
    bare = vf(4, profile=None, resource="nvidia.com/GA102GL_A40", listed=False, health="Unhealthy")
    lines = card_lines(divided(bare, mdev))
    head = next(line for line in lines if "ADDRESS" in line)
    row = next(line for line in lines if UUIDS[0] in line)
    assert row[head.index("PART OF") :].startswith("0000:3b:00.4")
    assert sum(line.lstrip().startswith("ADDRESS") for line in lines) == 2, "each resource has its own rows"


def test_parents_that_form_a_ring_end_somewhere() -> None:
    one, other = vf(4, parent="0000:3b:00.5"), vf(5, parent="0000:3b:00.4")
    view = replace(divided(), devices=(one, other))
    assert "0000:3b:00.4" in as_table(shown(view), 100)


def test_in_one_list_a_part_follows_its_parent_whatever_its_key() -> None:
    mdev, other = part(vf(4), UUIDS[0], kind="mdev"), part(a_card(), UUIDS[1], kind="mdev")
    whole = whole_view("0000:ff:00.0").devices
    view = divided(mdev, other, vf(4), vf(5), whole=whole)
    assert [(device.address, depth) for device, depth in in_order(view.devices)] == [
        (PF, 0), ("0000:3b:00.4", 1), (UUIDS[0], 2), ("0000:3b:00.5", 1), (UUIDS[1], 1), ("0000:ff:00.0", 0),
    ]  # fmt: skip
    without_card = [device for device in view.devices if device.address != PF]
    assert {d.address: depth for d, depth in in_order(without_card)}[UUIDS[0]] == 1


def test_the_wide_table_has_every_column_of_a_part() -> None:
    text = as_wide(shown(divided(vf(4, owner="default/vm-1"))))
    head = next(line for line in text.splitlines() if "ADDRESS" in line)
    assert {"CDEV", "SINCE", "HOLDER", "OWNER"} <= set(head.split())
    assert "REASON" not in head.split()


def test_json_has_kind_parent_and_profile_of_each_device() -> None:
    found = json.loads(as_json(shown(divided(vf(4)))))
    by_address = {d["address"]: (d["kind"], d["parent"], d["profile"]) for d in found["devices"]}
    assert by_address == {PF: ("pci-function", None, None), "0000:3b:00.4": ("vgpu", PF, PROFILE)}


def test_a_view_of_a_daemon_that_knows_no_parts_is_read() -> None:
    """The view goes over the control socket between versions."""
    fields = json.loads(msgspec.json.encode(divided(vf(4))))
    del fields["cards"]
    for device in fields["devices"]:
        del device["kind"], device["parent"], device["profile"]
    view = msgspec.json.decode(json.dumps(fields), type=NodeView)
    assert {(d.kind, d.parent, d.profile) for d in view.devices} == {("pci-function", None, None)}
    assert "Card" not in as_table(shown(view), 100)


# --- explain ----------------------------------------------------------------------------------------------------------


def explained(view: NodeView, words: str) -> tuple[list[str], Mapping[str, Any]]:
    found = explain_in(shown(view), words)
    return explained_text(found, 200).splitlines(), json.loads(explained_json(found))


@pytest.mark.parametrize("words", [PF, "3b:00.0", "gpu-0000-3b-00-0"])
def test_a_parent_is_explained_with_its_parts(words: str) -> None:
    text, known = explained(divided(vf(4), vf(5, owner="default/vm-1")), words)
    assert text[0] == f"{PF}  GH100 [H100 SXM5 80GB] (10de:2330)"
    at = next(n for n, line in enumerate(text) if line.startswith("Parts"))
    assert [line.split(maxsplit=1)[-1] for line in text[at : at + 3]] == [
        f"{RESOURCE_OF_PROFILE} ({PROFILE}): 2 parts: 2 Healthy; 1 with an owner",
        "Healthy: free",
        "Healthy: free",
    ]
    assert [p["address"] for p in known["parts"]] == ["0000:3b:00.4", "0000:3b:00.5"]


@pytest.mark.parametrize("words", [UUIDS[1], UUIDS[1].upper()])
def test_a_uuid_is_explained_as_the_device_that_has_it(words: str) -> None:
    text, known = explained(divided(*(part(a_card(), uuid, kind="mdev") for uuid in UUIDS)), words)
    assert text[0].startswith(UUIDS[1])
    assert f"Profile       {PROFILE}" in text
    assert f"Part of       {PF}, GH100 [H100 SXM5 80GB] (10de:2330), on nvidia" in text
    assert (known["parent"], known["profile"], "parts" in known) == (PF, PROFILE, False)


def test_a_uuid_that_no_device_has_is_still_looked_for_among_objects() -> None:
    with pytest.raises(UnknownAddressError, match="knows no claim"):
        explained(divided(vf(4)), UUIDS[2])


@pytest.mark.parametrize("words", [PROFILE, "NVIDIA_A40-12Q", RESOURCE_OF_PROFILE])
def test_a_profile_lists_its_devices(words: str) -> None:
    text, known = explained(divided(vf(4), vf(5)), words)
    assert text[0] == RESOURCE_OF_PROFILE
    assert f"Profile  {PROFILE}" in [" ".join(line.split(maxsplit=1)).replace(" ", "  ", 1) for line in text]
    assert [d["address"] for d in known["devices"]] == ["0000:3b:00.4", "0000:3b:00.5"]


def test_a_profile_of_several_resources_asks_which() -> None:
    view = divided(vf(4), vf(5, resource="example.com/vgpu"))
    with pytest.raises(UnknownAddressError, match=f"say which of example.com/vgpu, {RESOURCE_OF_PROFILE}"):
        explained(view, PROFILE)
    assert isinstance(explain_in(shown(view), "example.com/vgpu"), ExplainedResource)


def test_a_device_whose_parent_is_no_pci_function_has_its_profile_as_its_name() -> None:
    no_function = {"parent": "mtty", "vendor": "", "device": "", "model": None}
    mdev = part(a_card(), UUIDS[0], kind="mediated-device", profile="mtty-2", **no_function)
    view = replace(divided(), devices=(mdev,))
    text, known = explained(view, UUIDS[0])
    assert text[0] == f"{UUIDS[0]}  mtty-2"
    assert "Part of       mtty" in text
    assert known["parent"] == "mtty"
    assert "Card mtty" in as_table(shown(view), 100).splitlines()


# --- a card that no selector chooses, from the core -------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeView]:
    with registered(monkeypatch):
        core = Core(gpu("23:00.0", 1), card())
        yield view_of(core.state, core.at)


def test_the_daemon_knows_the_parent_the_kind_and_the_profile(toy: NodeView) -> None:
    one = find(toy, half(0))
    assert (one.kind, one.parent, one.profile) == ("half", CARD, "half of 70aa")
    whole = find(toy, WHOLE)
    assert (whole.kind, whole.parent, whole.profile) == ("pci-function", None, None)
    assert toy.cards == (CardView(CARD, "f00d", "70aa", "Toy", "toy-halves"),)
    assert one.nodes == ("/dev/vfio/500",)


def test_a_card_that_no_selector_chooses_has_a_block_and_an_explanation(toy: NodeView) -> None:
    text = as_table(shown(toy), 100)
    assert f"Card {CARD}  Toy (f00d:70aa), on toy-halves; no selector matches the card itself" in text
    found = explain_in(shown(toy), "05:00.0")
    assert isinstance(found, ExplainedCard)
    lines, known = explained_text(found).splitlines(), json.loads(explained_json(found))
    assert lines[:2] == [f"{CARD}  Toy (f00d:70aa)", "no selector matches the card itself"]
    assert any(f"{RESOURCE} (half of 70aa): 2 parts" in line for line in lines)
    assert {p["address"] for p in known["parts"]} == {half(0), half(1)}


def test_a_virtual_function_shows_its_physical_function() -> None:
    pf = replace(gpu("3b:00.0", 1, driver="nvidia"), has_virtual_functions=True)
    of_pf = replace(gpu("3b:00.4", 2), physical=pci_address("0000:3b:00.0"))
    core = Core(pf, of_pf)
    view = view_of(core.state, core.at)
    assert find(view, "3b:00.4").parent == PF
    assert view.cards == (), "the selectors choose it"
    assert f"Card {PF}" in as_table(shown(view), 100)
    assert f"Part of       {PF}" in explanation(Explained(find(view, "3b:00.4"), shown(view)), 200)


def test_the_parent_of_a_mediated_device_that_is_no_pci_function_has_its_name_in_sysfs() -> None:
    """Its key and facts are those of a kind that the core asks for nothing here."""
    core = Core(gpu("23:00.0", 1))
    key = device_key(pci_address(WHOLE))
    mediated = MediatedDevice(key, None, "mtty", "mtty-2", "", None, None, (), (), None, None, None)
    state = replace(core.state, host=replace(core.state.host, mediated={key: mediated}))
    assert find(view_of(state, core.at), WHOLE).parent == "mtty"
