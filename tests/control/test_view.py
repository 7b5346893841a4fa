"""What an operator sees of a node, read off states that the real core made; and that the wire changes nothing of it."""

from __future__ import annotations

import msgspec
import pytest

from gpuactors.control.about import About, Setting
from gpuactors.control.client import OtherVersionError, Running, running, understood
from gpuactors.control.messages import Answer, line_of
from gpuactors.control.node_view import view_of
from gpuactors.control.pods_view import pods_view
from gpuactors.control.view import NOT_LISTED, DaemonStatus, DeviceView, NodeView
from gpuactors.core.events.host import (
    FunctionInspected,
    HostChanged,
    HostScanned,
    UeventsOpened,
    UeventsUnavailable,
)
from gpuactors.core.events.kubelet import KubeletGone
from gpuactors.core.reports.snapshot import project
from gpuactors.core.values.model import Holder, Pod, pci_address
from tests.core.builders import Core, audio, gpu

GPU = "0000:23:00.0"
QEMU = Holder(4711, "qemu-system-x86", "0b0f-uid")


def seen(core: Core) -> NodeView:
    return view_of(core.state, core.at)


def device(core: Core, address: str = GPU) -> DeviceView:
    return next(d for d in seen(core).devices if d.address == address)


def held(core: Core, *holders: Holder) -> None:
    core.enabled[GPU] = 1
    if holders:
        core.holders[0x23] = holders
    core.pass_time(10)


def gone(core: Core) -> None:
    address = pci_address(GPU)
    core.feed(HostChanged(address, None, "remove pci"))
    inspection = project(core.state).inspections.functions[address]
    core.feed(FunctionInspected(inspection, address, ()))


def test_a_free_gpu() -> None:
    core = Core(gpu("23:00.0", numa_node=1), audio("23:00.1", 0x23, driver=None))
    view = device(core)
    assert (view.health, view.reason, view.owner, view.holders, view.remedy) == (
        "Healthy",
        "free",
        None,
        (),
        None,
    )
    assert [(m.address, m.driver) for m in view.group] == [(GPU, "vfio-pci"), ("0000:23:00.1", None)]
    assert (view.id, view.numa_node, view.iommu_group) == (GPU, 1, 0x23)


def test_an_external_holder_is_named_and_the_remedy() -> None:
    core = Core(gpu("23:00.0"))
    held(core, QEMU)
    view = device(core)
    assert (view.health, view.cause) == ("Unhealthy", "HeldByOther")
    assert [change.cause for change in view.history] == ["Free", "HolderUnknown", "HeldByOther"]
    assert view.holders == (QEMU,)
    assert view.remedy is not None
    assert "end process 4711 (qemu-system-x86)" in view.remedy


def test_an_external_holder_without_a_name_leads_to_the_option_that_names_it() -> None:
    core = Core(gpu("23:00.0"))
    held(core)
    remedy = device(core).remedy
    assert remedy is not None
    assert "--holders proc" in remedy


def test_what_is_being_unbound_under_an_external_holder_is_not_promised_again() -> None:
    core = Core(gpu("23:00.0"))
    held(core, QEMU)
    address = pci_address(GPU)
    core.feed(HostChanged(address, None, "remove vfio-dev"))
    inspection = project(core.state).inspections.functions[address]
    core.feed(FunctionInspected(inspection, address, (gpu(GPU, driver=None, has_node=True),)))
    view = device(core)
    assert "held by process 4711 (qemu-system-x86)" in view.reason
    assert "end the process that has /dev/vfio/35 open" in view.reason
    assert (view.health, view.driver, view.holders, view.remedy) == ("Unhealthy", None, (QEMU,), None)


def test_a_pod_that_is_gone_and_a_process_that_is_not() -> None:
    core = Core(gpu("23:00.0"))
    core.ledger[GPU] = "vm-1"
    held(core, QEMU)
    assert device(core).owner == "default/vm-1"
    assert device(core).remedy is None
    core.ledger.clear()
    core.pass_time(30)
    view = device(core)
    assert (view.health, view.owner) == ("Unhealthy", None)
    assert view.remedy is not None
    assert view.remedy.startswith("wait until process 4711")


def test_changes_have_ages() -> None:
    core = Core(gpu("23:00.0"))
    held(core, QEMU)
    core.pass_time(180)
    first, *_, last = device(core).history
    assert (first.health, first.reason) == ("Healthy", "free")
    assert last.health == "Unhealthy"
    assert first.age_s == pytest.approx(190)
    assert 180 <= last.age_s < 190


def test_a_gpu_that_left_under_its_pod_is_still_explained() -> None:
    core = Core()
    core.ledger[GPU] = "vm-1"
    core.feed(HostScanned(core.state.host.inspections.last - 1, (gpu("23:00.0"), gpu("24:00.0"))))
    gone(core)
    view = device(core)
    assert (view.present, view.health, view.owner) == (False, "Unhealthy", "default/vm-1")
    assert view.remedy is not None
    assert view.resource


def test_a_gpu_that_left_is_remembered() -> None:
    core = Core(gpu("23:00.0"), gpu("24:00.0"))
    gone(core)
    core.pass_time(10)
    view = device(core)
    assert (view.present, view.health, view.resource) == (False, NOT_LISTED, "")
    assert view.history[-1].health is None
    assert [d.address for d in seen(core).devices] == [GPU, "0000:24:00.0"]


def test_the_state_of_kubelet_and_of_the_registration() -> None:
    core = Core(gpu("23:00.0"))
    core.feed(KubeletGone("waiting for kubelet: no socket"))
    view = seen(core)
    assert view.kubelet_problem == "waiting for kubelet: no socket"
    assert [(r.registered, bool(r.problem)) for r in view.resources] == [(False, True)]
    assert view.ledger_problem == ""
    core.ledger_problem = "kubelet's ledger is damaged"
    held(core)  # of which the ledger is asked whose it is
    assert seen(core).ledger_problem == "kubelet's ledger is damaged"


def test_whether_uevents_are_heard() -> None:
    core = Core(gpu("23:00.0"))
    core.feed(UeventsUnavailable("netlink is forbidden"))
    assert seen(core).uevents_problem == ("not received: netlink is forbidden; only scans find changes")
    core.feed(UeventsOpened())
    assert seen(core).uevents_problem == ""


ABOUT = About("gpu-17", (Setting("holders", '"proc"', "flag --holders"), Setting("select", "[]", "default")))


def read(pid: int, version: str, status: object) -> Running:
    """What a command has of a daemon that sends this."""
    line = line_of(Answer(pid, version, msgspec.Raw(msgspec.json.encode(status))))
    return running("/s", understood("/s", line))


def received(view: NodeView, about: About = ABOUT) -> Running:
    """What a command has of a view after the wire."""
    return read(7, "1.2.3", DaemonStatus(about, view))


def test_the_wire_changes_nothing() -> None:
    core = Core(gpu("23:00.0", numa_node=0), audio("23:00.1", 0x23, driver=None), gpu("24:00.0", driver=None))
    core.ledger["0000:24:00.0"] = "vm-2"
    core.feed(KubeletGone("waiting for kubelet: no socket"), UeventsUnavailable("netlink is forbidden"))
    held(core, QEMU, Holder(1, "init", None))
    view = seen(core)
    assert received(view) == Running(7, "1.2.3", ABOUT, view)
    assert view.devices[0].numa_node == 0
    assert "" not in (view.kubelet_problem, view.uevents_problem)


def test_a_newer_daemon_may_report_more_and_an_older_one_less() -> None:
    """Fields that are not known are ignored, and missing ones have their default."""
    view = NodeView("serving", (), (), "", "", "")
    status = msgspec.to_builtins(DaemonStatus(ABOUT, view))
    del status["view"]["domains"]
    assert read(7, "2.0.0", {**status, "new": {"of": [1]}}) == Running(7, "2.0.0", ABOUT, view)


def test_a_daemon_whose_view_cannot_be_decoded_is_of_another_version() -> None:
    status = msgspec.to_builtins(DaemonStatus(ABOUT, NodeView("serving", (), (), "", "", "")))
    del status["view"]["role"]
    with pytest.raises(
        OtherVersionError, match=r"^the daemon behind /s is of another version \(2\.0\.0\) than this"
    ):
        read(7, "2.0.0", status)


def test_each_pod_is_named_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 pods looked through for each of 256 pods took 39 ms of each view."""
    core = Core(*(gpu(f"{number:02x}:00.0", number) for number in range(64)))
    core.ledger = {f"0000:{number:02x}:00.0": f"vm-{number}" for number in range(64)}
    core.pass_time(60)
    named, name_of = list[Pod](), Pod.__str__

    def counted(pod: Pod) -> str:
        named.append(pod)
        return name_of(pod)

    monkeypatch.setattr(Pod, "__str__", counted)
    assert len(pods_view(core.state)) == 64
    assert len(named) == 64
