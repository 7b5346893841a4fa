"""A kind of device that is registered in this test alone goes through both APIs, and all that shows what is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors.cli.inspect.report import as_json, explanation
from gpuactors.cli.inspect.view import Explained, Inspected, find
from gpuactors.control.node_view import view_of
from gpuactors.core.claims.files import contents_of
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.kinds.kind import Kind
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Grant, Granted, Ready, Refused
from gpuactors.core.values.model import DeviceId, DeviceKey, Holder, device_key
from gpuactors.core.values.slices import Attribute, BlockKind, BlockReason, ServerKeeps
from tests.core.builders import A, gpu
from tests.core.gpus.claim_core import DRIVER, ClaimCore, allocated, name
from tests.core.kinds.toy import CARD, RESOURCE, card, group_of, half, registered
from tests.observe.recording import RecordedSteps, write
from tests.replay.replayed import replayed
from tests.support.edits import nodes_of

ROOT = Path(__file__).resolve().parents[3]

ONE, OTHER = half(0), half(1)
GROUP = group_of(0)


class Recorded(RecordedSteps, ClaimCore):
    """`ClaimCore`, whose steps are kept."""


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with registered(monkeypatch):
        yield


@pytest.fixture
def core() -> Recorded:
    core = Recorded(gpu(A, group=1), card())
    core.feed(KubeletAppeared("kubelet"))
    return core


def allocate(core: Recorded, *devices: DeviceKey) -> object:
    token = core.token()
    return core.answers(AllocateAsked(token, RESOURCE, (tuple(map(DeviceId, devices)),)))


def inspected(core: Recorded) -> Inspected:
    return Inspected(view_of(core.state, core.at), True, "the running daemon", node="node-1", wall=1e9)


def explained(core: Recorded, words: str) -> str:
    found = inspected(core)
    return explanation(Explained(find(found.view, words), found), 100)


def offered(core: Recorded, key: DeviceKey) -> tuple[bool, BlockReason | None]:
    device = core.state.offered.devices[key]
    return device.claimed, device.blocked


# --- the device plugin API --------------------------------------------------------------------------------------------


def test_it_is_listed_beside_whole_functions(core: Recorded) -> None:
    assert core.device_list(RESOURCE) == dict.fromkeys(sorted((ONE, OTHER)), "Healthy")
    assert core.device_list() == {A: "Healthy"}
    assert device_key(CARD) not in core.state.index.devices


def test_allocate_names_it_by_the_variable_of_its_kind(core: Recorded) -> None:
    nodes = ("/dev/vfio/vfio", f"/dev/vfio/{GROUP}")
    assert allocate(core, ONE) == [Granted((Grant((("TOY_TOY_EXAMPLE_COM_HALF", ONE),), nodes),))]
    core.others[RESOURCE, ONE] = "vm-1"
    core.pass_time(10)
    assert core.device_list(RESOURCE)[ONE] == "Healthy", "it is counted in `allocated`"
    assert core.reason(ONE, RESOURCE) == "allocated to pod default/vm-1"
    started = core.answers(PreStartAsked(core.token(), RESOURCE, (DeviceId(ONE),)))
    assert started == [Ready()]
    (refused,) = core.answers(AllocateAsked(core.token(), RESOURCE, ((DeviceId(half(7)),),)))
    assert isinstance(refused, Refused)
    del core.others[RESOURCE, ONE]
    core.pass_time(10)
    assert core.reason(ONE, RESOURCE) == "free"


def test_a_process_that_has_its_group_open_is_seen(core: Recorded) -> None:
    core.holders[GROUP] = (Holder(4711, "qemu", None),)
    core.pass_time(10)
    assert core.device_list(RESOURCE) == {ONE: "Unhealthy", OTHER: "Healthy"}
    assert "process 4711 (qemu)" in core.reason(ONE, RESOURCE)
    (refused,) = core.answers(AllocateAsked(core.token(), RESOURCE, ((DeviceId(ONE),),)))
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.HELD_BY_OTHER,)


def test_it_goes_and_comes_with_its_card(core: Recorded) -> None:
    core.others[RESOURCE, ONE] = "vm-1"
    core.pass_time(40)
    core.changed(card(driver=None))
    assert core.device_list(RESOURCE) == {ONE: "Unhealthy"}, "the pod has it"
    lost = f"allocated to pod default/vm-1, but {CARD} is not on toy-halves, which makes it"
    assert core.reason(ONE, RESOURCE) == lost
    core.unplugged(CARD)
    assert core.device_list(RESOURCE) == {ONE: "Unhealthy"}
    core.changed(card())
    assert core.device_list(RESOURCE) == dict.fromkeys((ONE, OTHER), "Healthy")


# --- claims -----------------------------------------------------------------------------------------------------------


def test_its_slice_says_what_its_kind_offers(core: Recorded) -> None:
    assert core.wanted.offer is not None
    devices = {d.name: d for d in wanted_pool(core.wanted.offer, ServerKeeps.YES).devices}
    assert [*devices] == ["gpu-0000-01-00-0", *sorted((f"half-{ONE}", f"half-{OTHER}"))]
    shown = devices[f"half-{ONE}"]
    assert shown.attributes == {"type": Attribute("string", "half"), "parent": Attribute("string", CARD)}
    assert shown.capacity == {"memory": "1Gi"}
    allocate(core, OTHER)
    assert offered(core, OTHER) == (False, BlockReason(BlockKind.HELD, "Allocated"))


def test_a_claim_is_prepared_and_unprepared_without_an_act_on_it(core: Recorded) -> None:
    claim = allocated(name("one"), ONE)
    core.held_back = {"files"}
    token = core.prepare(claim)
    (act,) = core.wanted.files.values()
    (device,) = act.devices
    assert nodes_of(device) == ("/dev/vfio/vfio", f"/dev/vfio/{GROUP}")
    contents = contents_of(DRIVER, claim, act.devices)
    (in_cdi,) = _list(contents.devices, "devices")
    assert in_cdi["name"] == f"uid-one-half-{ONE}"
    (request,) = _list(contents.metadata[0].documents[0], "requests")
    assert request["devices"][0]["attributes"] == {"toy.example.com/uuid": {"string": ONE}}
    core.release("files")
    assert isinstance(core.answer(token), Prepared)
    assert offered(core, ONE) == (True, None)
    assert core.device_list(RESOURCE)[ONE] == "Unhealthy"
    assert core.reason(ONE, RESOURCE) == "in use by the claim default/one"
    (refused,) = core.answers(AllocateAsked(core.token(), RESOURCE, ((DeviceId(ONE),),)))
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.CLAIMED_ELSEWHERE,)
    waiting = core.prepare(allocated(name("two"), ONE))
    assert core.answer(waiting) is None
    assert core.claim_state(name("two")) is ClaimState.WAITING
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert isinstance(core.answer(waiting), Prepared)
    core.unprepare(name("two"))
    assert core.acts == []
    assert core.device_list(RESOURCE)[ONE] == "Healthy"
    assert core.state.gpus.fitness == {}, "nobody asks whether a claim could bind it"


def test_what_a_pod_or_a_process_has_no_claim_gets(core: Recorded) -> None:
    core.others[RESOURCE, ONE] = "vm-1"
    core.holders[group_of(1)] = (Holder(4711, "qemu", None),)
    core.pass_time(40)
    for claim, key in ((name("one"), ONE), (name("other"), OTHER)):
        assert core.answer(core.prepare(allocated(claim, key))) is None
        assert core.claim_state(claim) is ClaimState.WAITING
    assert "pod default/vm-1" in core.problem(name("one"))
    assert "process 4711 (qemu)" in core.problem(name("other"))


def test_a_claim_is_known_again_after_a_restart_and_its_files_go_when_it_is_gone(core: Recorded) -> None:
    core.prepare(allocated(name("one"), ONE))
    after = core.restarted()
    assert after.claim_state(name("one")) is ClaimState.PREPARED
    assert after.device_list(RESOURCE)[ONE] == "Unhealthy"
    after.changed(card(driver=None))
    assert after.claim_state(name("one")) is ClaimState.DRIFTED
    assert CARD in after.problem(name("one"))
    after.changed(card())
    assert isinstance(after.answer(after.prepare(name("one"))), Prepared)


def test_a_claim_does_not_keep_a_device_that_has_become_another_model(core: Recorded) -> None:
    core.prepare(allocated(name("one"), ONE))
    after = core.restarted()
    after.changed(replace(card(), device="70bb"))
    assert after.claim_state(name("one")) is ClaimState.DRIFTED
    assert "half of 70bb, and the claim has half of 70aa" in after.problem(name("one"))
    assert isinstance(after.answer(after.prepare(name("one"))), Refused)
    after.changed(card())
    assert isinstance(after.answer(after.prepare(name("one"))), Prepared)


# --- what a new kind touches ------------------------------------------------------------------------------------------


def test_the_document_names_each_question_and_only_these_files_know_the_kind() -> None:
    text = (ROOT / "docs/dev/architecture.md").read_text()
    section = text.partition("## A new kind of device\n")[2].partition("\n## ")[0]
    questions = {name for name in vars(Kind) if not name.startswith("_")}
    assert {name for name in questions if f"`{name}`" not in section} == set()
    core = ROOT / "src/gpuactors/core"
    knowing = {
        str(path.relative_to(core))
        for path in core.rglob("*.py")
        if "kinds.pci_function" in path.read_text() or "PCI_FUNCTION" in path.read_text()
    }
    assert knowing == {
        "kinds/table.py",
        "kinds/pci_function.py",
        "kinds/virtual_function.py",
        "kinds/vgpu.py",
    }


# --- what an operator sees --------------------------------------------------------------------------------------------


def test_inspect_and_explain_show_it(core: Recorded) -> None:
    core.prepare(allocated(name("one"), ONE))
    shown = {d["address"]: d for d in json.loads(as_json(inspected(core)))["devices"]}
    assert [*shown] == [A, *sorted((ONE, OTHER))]
    assert (shown[ONE]["resource"], shown[OTHER]["health"]) == (RESOURCE, "Healthy")
    for words in (ONE, f"half-{ONE}"):
        text = explained(core, words)
        assert ONE in text
        assert "in use by the claim default/one" in text


def test_a_journal_of_it_is_replayed_without_a_difference(core: Recorded, tmp_path: Path) -> None:
    allocate(core, OTHER)
    core.prepare(allocated(name("one"), ONE))
    core.changed(card(driver=None))
    core.changed(card())
    core.unprepare(name("one"))
    write(tmp_path, *core.steps)
    told = "\n".join(replayed(tmp_path))
    assert f"prepared half-{ONE}" in told
    assert "call 1001: Allocate" in told
    page = tmp_path / "page.html"
    replayed(tmp_path, html=page)
    assert ONE in page.read_text()
    of_one = "\n".join(replayed(tmp_path, device=ONE))
    assert "NodeUnprepareResources of claim default/one" in of_one
    assert "call 1001: Allocate" not in of_one


def _list(content: object, field: str) -> list[Mapping[str, Any]]:
    assert isinstance(content, Mapping)
    return [*content[field]]
